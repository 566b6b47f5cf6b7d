"""Acceptance: how many of a sequence's drafts were right, and how many more are worth a try.

A draft costs what one more position adds to a step. It saves a share of a step if it is right, and
all drafts before it: with acceptance r draft number j is right with probability r ** j.
"""

from dataclasses import dataclass
from math import floor, log

FIRST_RATE = 0.6
WEIGHT = 0.2
"""Of the newest step in the rate."""
PROBE = 24
"""A sequence whose drafts are not worth their price has one tried each so many tokens: its text may
have changed."""


@dataclass(slots=True)
class Acceptance:
    """Of one sequence."""

    rate: float = FIRST_RATE
    drafted: int = 0
    accepted: int = 0
    _waited: int = 0

    def observe(self, drafted: int, accepted: int) -> None:
        """`drafted` tokens were computed, and the first `accepted` of them were right."""
        self.drafted += drafted
        self.accepted += accepted
        if drafted:
            tried = min(accepted + 1, drafted)
            self.rate += WEIGHT * (accepted / tried - self.rate)

    def worth(self, price: float) -> int:
        """How many drafts to try when each costs `price` times what it saves if it is right."""
        if price <= 0.0 or self.rate >= 1.0:
            return MOST
        worth = 0
        if price < self.rate:
            worth = min(MOST, floor(log(price) / log(self.rate)))
        self._waited = 0 if worth else self._waited + 1
        if self._waited >= PROBE:
            self._waited = 0
            return 1
        return worth


MOST = 64
"""More than any limit allows."""
