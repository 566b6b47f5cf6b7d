"""Departures: how many answers are open, when others ended, and what that says of how long a queue
will take."""

from collections import deque

REMEMBERED = 64
"""So many of the last departures count."""


class Departures:
    """The queue is taken to move on as fast as answers ended of late: while all rows are taken, one
    that ends lets one in. That is no promise: answers under way may be longer than those before."""

    def __init__(self) -> None:
        self.open = 0
        """Prompts whose answers are under way, or there and not read yet."""
        self._ended_s: deque[float] = deque(maxlen=REMEMBERED)
        self._busy_since_s = 0.0

    def enter(self, now: float) -> None:
        """One more is open; after a rest, what was before says nothing any more."""
        if not self.open:
            self._ended_s.clear()
            self._busy_since_s = now
        self.open += 1

    def leave(self) -> None:
        self.open -= 1

    def ended(self, now: float) -> None:
        self._ended_s.append(now)

    def predicted_s(self, position: int, now: float) -> float | None:
        """How long the queue takes to let in whoever is at this `position`, from 1; None while
        nothing has ended yet."""
        if not self._ended_s:
            return None
        whole = len(self._ended_s) < REMEMBERED
        since_s = self._busy_since_s if whole else self._ended_s[0]
        return position * (now - since_s) / len(self._ended_s)
