"""Acceptance: how many of a sequence's drafts were right, and how many more are worth a try.

A draft costs what one more position adds to a step, and a round of guesses. It saves a share of a
step if it is right, and all drafts before it: with acceptance r draft number j is right with
probability r ** j. So n drafts bring 1 + r + … + r ** n tokens for 1 + n · price.
"""

from dataclasses import dataclass

FIRST_RATE = 0.6
WEIGHT = 0.2
"""Of the newest step in the rate."""
COMMON_WEIGHT = 0.02
"""Of the newest step in the rate that new sequences begin with."""
SHARE = 0.005
"""Where drafts are not worth their price one is tried for so much of the time that tokens take: the
text may have changed."""
LEAST_GAIN = 1.05
"""Drafts that bring less than so many times the tokens are not worth it: estimates are rough."""
MOST = 64
"""More than any limit allows."""


@dataclass(slots=True)
class Experience:
    """Of all sequences so far: the rate at which a new one begins."""

    rate: float = FIRST_RATE

    def observe(self, drafted: int, accepted: int) -> None:
        """As `Acceptance.observe`."""
        self.rate += COMMON_WEIGHT * (_share(drafted, accepted) - self.rate)


@dataclass(slots=True)
class Acceptance:
    """Of one sequence. Without a rate it has not begun."""

    rate: float | None = None
    drafted: int = 0
    accepted: int = 0
    reached: int = 0
    """Up to which position whoever guesses has followed it, as far as is known."""
    _waited: int = 0

    def begin(self, rate: float) -> None:
        """Begin with the rate of others, unless it has one of its own."""
        if self.rate is None:
            self.rate = rate

    def observe(self, drafted: int, accepted: int, length: int) -> None:
        """`drafted` tokens were computed, and the first `accepted` of them were right; now it has
        `length`."""
        self.drafted += drafted
        self.accepted += accepted
        if drafted and self.rate is not None:
            self.rate += WEIGHT * (_share(drafted, accepted) - self.rate)
            self.reached, self._waited = length, 0

    def worth(self, price: float, debt: float = 0.0) -> int:
        """How many drafts to try.

        Units  `price` is what each costs, `debt` what has to be done before the first, both in the
               time that a token takes without drafts. Tokens pay the debt off in advance: each by
               what drafts would have saved it, or by its share where they save nothing.
        """
        self._waited += 1
        count, saved = _best(self.rate if self.rate is not None else FIRST_RATE, price)
        if not count:
            count, saved, debt = 1, SHARE, debt + price
        return count if self._waited * saved >= debt else 0


def _share(drafted: int, accepted: int) -> float:
    """Of the drafts up to the first that was wrong how many were right."""
    return accepted / min(accepted + 1, drafted)


def _best(rate: float, price: float) -> tuple[int, float]:
    """The number of drafts that brings most tokens for what they cost, and which share of the time
    it saves; none if that is too little."""
    tokens = right = best = 1.0
    count = 0
    while count < MOST:
        right *= rate
        tokens += right
        each = tokens / (1.0 + (count + 1) * price)
        if each <= best:
            break
        best, count = each, count + 1
    return (count, 1.0 - 1.0 / best) if best >= LEAST_GAIN else (0, 0.0)
