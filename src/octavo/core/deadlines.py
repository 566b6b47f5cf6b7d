"""Deadlines: which requests are over time, because they wait too long or must have ended by now."""

from collections.abc import Iterable
from math import inf

from octavo.core.budget import Limits
from octavo.core.request import Request
from octavo.core.sequence import Sequence


class Deadlines:
    """Cost     O(1), but for one look at all sequences whenever the next deadline passes: at most
    one for each request."""

    def __init__(self) -> None:
        self._next_s = inf
        """Nothing is due before; it may be later."""

    def add(self, request: Request, limits: Limits, now: float) -> None:
        """A request has come."""
        self._next_s = min(self._next_s, now + _patience_s(request, limits, waiting=True))

    def reset(self) -> None:
        """Other limits hold."""
        self._next_s = -inf

    def overdue(self, sequences: Iterable[Sequence], limits: Limits, now: float) -> tuple[str, ...]:
        """The requests whose time is over, of those that have not ended."""
        if now < self._next_s:
            return ()
        due = [(one.request.id, due_s(one, limits)) for one in sequences]
        self._next_s = min((at_s for _, at_s in due if at_s > now), default=inf)
        return tuple(dict.fromkeys(name for name, at_s in due if at_s <= now))


def due_s(sequence: Sequence, limits: Limits) -> float:
    """When its request is over time, as things are; infinity for never.

    The first of its siblings stands for all as they wait.
    """
    waiting = sequence.ticket is None and not sequence.number
    return sequence.submitted_s + _patience_s(sequence.request, limits, waiting=waiting)


def _patience_s(request: Request, limits: Limits, *, waiting: bool) -> float:
    """How long after its arrival; `waiting` for its first admission."""
    own_s = inf if request.timeout_s is None else request.timeout_s
    if limits.waiting_s is None or not waiting or request.emitted:
        return own_s
    return min(own_s, limits.waiting_s)
