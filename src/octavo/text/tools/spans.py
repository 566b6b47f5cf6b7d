"""Where a value in brackets ends, in text that arrives piece by piece."""

import re
from typing import Literal, Protocol

Broken = Literal["broken"]
"""It is no such value, whatever follows."""


class Span(Protocol):
    """Finds the end of a value that begins a text."""

    def scan(self, text: str) -> int | Broken | None:
        """Where the value ends in `text`, which is that of the last call and more; None while it
        does not.

        Keeps    what it says depends on the characters up to there, not on how they were cut.
        Cost     O(what is new).
        """


_OPENS = {"{": "}", "[": "]", "(": ")"}
_CLOSES = frozenset(_OPENS.values())


class Brackets:
    """A value that one of the brackets `first` begins; white space may come before.

    Outside of strings nothing that matches `wrong` may be, so that what is no such value is known
    for that early.
    """

    def __init__(self, first: str, quotes: str, wrong: str = r"(?!)") -> None:
        self._first = first
        self._outside = re.compile(rf"[{quotes}{{}}\[\]()]|{wrong}")
        self._inside = {quote: re.compile(rf"[{quote}\\]") for quote in quotes}
        self._quote = ""
        self._open: list[str] = []
        self.at = 0
        """Up to where the text was looked at."""

    def scan(self, text: str) -> int | Broken | None:
        while self.at < len(text):
            step = self._string if self._quote else self._value if self._open else self._start
            found = step(text)
            if found is not None:
                return found
            if self._quote and self.at == len(text) - 1 and text[self.at] == "\\":
                return None  # what it escapes is still to come
        return None

    def _start(self, text: str) -> Broken | None:
        character = text[self.at]
        self.at += 1
        if character.isspace():
            return None
        if character not in self._first:
            return "broken"
        self._open.append(_OPENS[character])
        return None

    def _string(self, text: str) -> None:
        found = self._inside[self._quote].search(text, self.at)
        if found is None:
            self.at = len(text)
        elif found[0] == "\\":
            self.at = found.start() if found.end() == len(text) else found.end() + 1
        else:
            self.at, self._quote = found.end(), ""

    def _value(self, text: str) -> int | Broken | None:
        found = self._outside.search(text, self.at)
        if found is None:
            self.at = len(text)
            return None
        self.at, character = found.end(), found[0]
        if character in _OPENS:
            self._open.append(_OPENS[character])
        elif character in self._inside:
            self._quote = character
        elif character not in _CLOSES or self._open.pop() != character:
            return "broken"
        return None if self._open else self.at


def json_span(first: str = "{[") -> Brackets:
    """JSON: an object or a list."""
    return Brackets(first, '"', wrong=r"[^\s\w.,:+\-]")
