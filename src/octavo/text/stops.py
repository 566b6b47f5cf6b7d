"""Stop strings in text that arrives piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Passed:
    """`text` can go out: no part of it can become a stop string any more."""

    text: str


@dataclass(frozen=True, slots=True)
class Matched:
    """The answer ends with `text`, because `stop` was found."""

    text: str
    stop: str


class StopStrings:
    """Lets text through up to the first stop string.

    The stop string that is complete first wins, so the answer does not depend on how the text was
    cut into pieces; of those complete at the same character, the longest.
    Keeps  the text held back is the longest ending that a stop string begins with.
    Cost   O(stop strings × their length) for each piece.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, piece: str, *, may_match: bool) -> Passed | Matched:
        """What `piece` sets free. Without `may_match` a stop completed by it is plain text."""
        text = self._held + piece
        if may_match and (found := self._first_match(text)) is not None:
            end, stop = found
            self._held = ""
            return Matched(text[: end if self._include else end - len(stop)], stop)
        keep = longest_beginning(text, self._stops)
        self._held = text[len(text) - keep :]
        return Passed(text[: len(text) - keep])

    def flush(self) -> str:
        """The text held back, when nothing more comes."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """The end of the first stop completed after the held text, and the stop."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), stop))
        return min(found, key=lambda match: (match[0], -len(match[1])), default=None)


def longest_beginning(text: str, marks: tuple[str, ...]) -> int:
    """The length of the longest ending of `text` that is the beginning of one of the marks."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest
