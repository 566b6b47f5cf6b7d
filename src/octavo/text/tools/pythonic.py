"""Calls in Python: `[get_weather(city="Oslo"), now()]`."""

import ast
import re
from typing import Any

from octavo.text.tools.json_calls import Called, dumped
from octavo.text.tools.spans import Brackets, Broken

_HEAD = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*\s*\(?)?)?")
"""All that may come up to the first parenthesis."""
MAX_CHARACTERS = 100_000
"""Python's own parser takes its time."""


class PythonicSpan:
    """A list of calls. `[a link](address)` is none, and known for that at the first bracket."""

    def __init__(self) -> None:
        self._brackets = Brackets("[", "\"'")
        self._headed = False

    def scan(self, text: str) -> int | Broken | None:
        if not self._headed:
            found = _HEAD.match(text)
            assert found is not None
            self._headed = found[0].endswith("(")
            if not self._headed:
                return None if found.end() == len(text) else "broken"
        return self._brackets.scan(text)


def calls_in(text: str) -> tuple[Called, ...] | None:
    """The calls that a Python list is; None if it is anything else."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        body = ast.parse(text.strip(), mode="eval").body
        if not isinstance(body, ast.List) or not body.elts:
            return None
        return tuple(_call(one) for one in body.elts)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> Called:
    """Raises  ValueError: it is no call with literals under names."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call, or arguments without names")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments without names")
        arguments[keyword.arg] = _literal(keyword.value)
    return Called(ast.unparse(node.func), dumped(arguments))


def _literal(node: ast.expr) -> Any:
    """A value, in which `true`, `false` and `null` are what JSON means by them."""
    known = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.List):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [one if one is None else ast.literal_eval(one) for one in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys must be text")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if isinstance(value, bytes | complex | set) or value in (float("inf"), float("-inf")):
        raise ValueError("no value of JSON")
    return value
