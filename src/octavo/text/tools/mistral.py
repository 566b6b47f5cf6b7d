"""Calls of Mistral's models: a JSON list of them, or `name[ARGS]{…}`."""

import re

from octavo.text.tools import json_calls
from octavo.text.tools.json_calls import Called, dumped, loaded
from octavo.text.tools.spans import Broken, json_span

_HEAD = re.compile(r"\s*([\w.\-]+)((?:\[\w*(?:\]\w*)?)*)\s*")
MAX_HEAD = 256


class MistralSpan:
    """What follows `[TOOL_CALLS]`."""

    def __init__(self) -> None:
        self._value = json_span()
        self._begins: int | None = None

    def scan(self, text: str) -> int | Broken | None:
        if self._begins is None:
            begins = _value_at(text)
            if not isinstance(begins, int):
                return begins
            self._begins = begins
        end = self._value.scan(text[self._begins :] if self._begins else text)
        return end + self._begins if isinstance(end, int) else end


def _value_at(text: str) -> int | Broken | None:
    """Where JSON begins; at 0 if nothing is before it."""
    stripped = text.lstrip()
    if stripped[:1] in ("", "[", "{"):
        return 0 if stripped else None
    begins = text.find("{")
    head = text if begins < 0 else text[:begins]
    if len(head) > MAX_HEAD or not _HEAD.fullmatch(head):
        return "broken"
    return None if begins < 0 else begins


def calls_in(text: str) -> tuple[Called, ...] | None:
    """The calls that a text is; None if it is anything else."""
    begins = _value_at(text)
    if not isinstance(begins, int) or not begins:
        return json_calls.calls_in(text)
    head = _HEAD.fullmatch(text[:begins])
    arguments = loaded(text[begins:])
    if head is None or not isinstance(arguments, dict):
        return None
    return (Called(head[1], dumped(arguments)),)
