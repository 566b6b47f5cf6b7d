"""Pace: how long a step takes, learned from the steps that were.

    seconds ≈ base + tokens · per token        a line through the steps, the recent ones weigh most

A step reads all weights once, however many tokens it computes; that is the base.
"""

DECAY = 0.98
"""What the weight of a step is multiplied by with each step after it: fifty steps count."""


class Pace:
    """Keeps    the line never falls, and never starts below zero."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._tokens_squared = 0.0
        self._products = 0.0

    @property
    def known(self) -> bool:
        """Whether any step has been seen."""
        return self._weight > 0.0 and self._seconds > 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step that computed `tokens` (1 or more) in `seconds`."""
        seconds = max(seconds, 0.0)
        self._weight = self._weight * DECAY + 1.0
        self._tokens = self._tokens * DECAY + tokens
        self._seconds = self._seconds * DECAY + seconds
        self._tokens_squared = self._tokens_squared * DECAY + tokens * tokens
        self._products = self._products * DECAY + tokens * seconds

    @property
    def token_s(self) -> float:
        """What one more token adds to a step, in seconds; 0 while nothing is known.

        While all steps had the same size the whole step is charged to its tokens.
        """
        if not self.known:
            return 0.0
        average = self._seconds / self._tokens
        spread = self._tokens_squared * self._weight - self._tokens * self._tokens
        if spread <= 1e-9 * self._tokens * self._tokens:
            return average
        slope = (self._products * self._weight - self._tokens * self._seconds) / spread
        return min(max(slope, 0.0), average)

    @property
    def base_s(self) -> float:
        """What a step costs before its first token, in seconds."""
        if not self.known:
            return 0.0
        return (self._seconds - self.token_s * self._tokens) / self._weight

    def seconds(self, tokens: int) -> float:
        """How long a step of `tokens` will take; 0 while nothing is known."""
        return self.base_s + self.token_s * tokens
