"""Prompt lookup: guesses what follows from what followed the same few tokens before.

A text that is summarised, edited or quoted comes again, so that its own words are the best guess.

Source  Saxena 2023, "Prompt lookup decoding": the continuation of an earlier match of the last
        tokens is taken as the draft.
"""

from collections.abc import Iterable

LONGEST, SHORTEST = 4, 2
"""Lengths of the matches that are looked for, in tokens; the longest are right most often."""


class PromptLookup:
    """The tokens of one branch, and where each short run of them last stood.

    Cost     O(tokens) at the first guess, O(1) a token after it; nothing before.
    """

    __slots__ = ("_after", "_known", "_tokens")

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = list(tokens)
        self._after: dict[tuple[int, ...], int] = {}
        """By a run of tokens, the place after its last one but the newest."""
        self._known = 0
        """Runs that end before this place are in `_after`."""

    def append(self, token: int) -> None:
        self._tokens.append(token)

    def guess(self, count: int) -> tuple[int, ...]:
        """Up to `count` tokens that may follow; none when the last two were never seen before."""
        tokens = self._tokens
        self._learn(len(tokens) - 1)
        for length in range(LONGEST, SHORTEST - 1, -1):
            place = self._after.get(tuple(tokens[-length:]))
            if place is not None and len(tokens) >= length:
                guesses = tokens[place : place + count]
                period = len(tokens) - place
                while len(guesses) < count:  # it repeats itself: so may what comes
                    guesses.append(guesses[len(guesses) - period])
                return tuple(guesses)
        return ()

    def _learn(self, upto: int) -> None:
        """Note each run that ends before `upto`."""
        tokens, after = self._tokens, self._after
        for end in range(max(self._known, SHORTEST - 1), upto):
            for length in range(SHORTEST, min(LONGEST, end + 1) + 1):
                after[tuple(tokens[end + 1 - length : end + 1])] = end + 1
        self._known = max(self._known, upto)
