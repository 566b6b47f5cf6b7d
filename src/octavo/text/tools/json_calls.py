"""Calls in JSON: `{"name": …, "arguments": {…}}`, or a list of such."""

import json
from typing import Any, NamedTuple, NoReturn

KEYS = ("arguments", "parameters")
"""What models call the arguments."""


class Called(NamedTuple):
    """A function's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


def calls_in(text: str) -> tuple[Called, ...] | None:
    """The calls that a JSON text is; None if it is anything else, or none at all."""
    value = loaded(text)
    listed = value if isinstance(value, list) else [value]
    calls = [_call(one) for one in listed]
    whole = tuple(call for call in calls if call is not None)
    return whole if whole and len(whole) == len(calls) else None


def loaded(text: str) -> Any:
    """The value of a JSON text, None if it is none. Line breaks in strings pass."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None


def dumped(value: object) -> str:
    """As JSON; what is not Unicode is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_unicode(text) else json.dumps(value)


def _call(value: object) -> Called | None:
    if not isinstance(value, dict):
        return None
    if isinstance(function := value.get("function"), dict):  # as OpenAI writes it
        value = function
    name = value.get("name")
    given = [value[key] for key in KEYS if key in value]
    arguments = given[0] if given else {}
    if isinstance(arguments, str):
        arguments = loaded(arguments)
    if not isinstance(name, str) or not name or not _is_unicode(name):
        return None
    return Called(name, dumped(arguments)) if isinstance(arguments, dict) else None


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
