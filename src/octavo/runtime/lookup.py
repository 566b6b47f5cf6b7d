"""Prompt lookup: guesses what follows from what followed the same few tokens before.

A text that is summarised, edited or quoted comes again, so that its own words are the best guess.

Source  Saxena 2023, "Prompt lookup decoding": the continuation of an earlier match of the last
        tokens is taken as the draft.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from octavo.core.plan import Span, StepPlan
from octavo.core.request import Request
from octavo.runtime.batch import RowTables

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


class Drafter(Protocol):
    """Guesses what follows the tokens of one branch."""

    def append(self, token: int) -> None: ...

    def guess(self, count: int) -> tuple[int, ...]:
        """Up to `count` tokens."""


class Drafters:
    """A drafter for each row; those rows that guess nothing cost nothing."""

    def __init__(
        self,
        drafter: Callable[[Iterable[int]], Drafter] = PromptLookup,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafter = drafter
        self._clock = clock
        self._drafters: dict[int, Drafter] = {}
        self.rounds: tuple[tuple[int, float], ...] = ()

    def carry(self, plan: StepPlan) -> None:
        """Nothing is kept of blocks."""

    def bind(self, row: int, request: Request, tokens: Sequence[int]) -> None:
        self._drafters[row] = self._drafter(tokens)

    def guess(self, spans: Sequence[Span], tables: RowTables) -> Sequence[tuple[int, ...]]:
        """What may follow each of these spans."""
        asked = sum([span.drafts > 0 for span in spans])
        if not asked:
            self.rounds = ()
            return [()] * len(spans)
        began_s = self._clock()
        guesses = [self._drafters[s.row].guess(s.drafts) if s.drafts else () for s in spans]
        self.rounds = ((asked, self._clock() - began_s),)
        return guesses

    def append(self, row: int, tokens: Iterable[int]) -> None:
        drafter = self._drafters[row]
        for token in tokens:
            drafter.append(token)
