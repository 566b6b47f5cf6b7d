"""Siblings: the sequences of one request, one a branch, which begin with the same tokens."""

from collections import deque
from collections.abc import Callable, Collection, Iterator

from octavo.core.request import Request
from octavo.core.search import Search
from octavo.core.sequence import Sequence, State


class Siblings:
    """One of them computes the prompt; the others wait for it, then go on from its blocks.

        held ── next ──▶ started ── remove ──▶ gone

    They start one at a time, each queued when the one before has been admitted and the prompt is
    there.
    """

    def __init__(self, request: Request, sequence_of: Callable[[Request, int], Sequence]) -> None:
        self._held = deque(sequence_of(own, n) for n, own in enumerate(request.split()))
        self._started: list[Sequence] = []
        self.search = None if request.beams is None else Search(request, tuple(self._held))

    def __iter__(self) -> Iterator[Sequence]:
        """All that have not ended, in order."""
        return iter((*self._started, *self._held))

    def __len__(self) -> int:
        return len(self._started) + len(self._held)

    @property
    def started(self) -> int:
        """How many wait in the queue or run."""
        return len(self._started)

    @property
    def held(self) -> tuple[Sequence, ...]:
        return tuple(self._held)

    def of(self, number: int | None) -> tuple[Sequence, ...]:
        """The one whose events carry `number`, if it has not ended; all for None."""
        return tuple(one for one in self if number in (None, one.request.sampling.branch))

    def next(self) -> Sequence | None:
        """Start the next one, if none that has started still waits or lacks the prompt."""
        if not self._held or self._held[0].barred or not all(map(_has_prompt, self._started)):
            return None
        self._started.append(self._held.popleft())
        return self._started[-1]

    def parent_of(self, sequence: Sequence, leaving: Collection[Sequence] = ()) -> Sequence | None:
        """The running one that is not `leaving` and has most of what `sequence` may share."""
        running = [
            one for one in self._started if one.state is State.RUNNING and one not in leaving
        ]
        return max(running, key=lambda one: one.common_with(sequence), default=None)

    def remove(self, sequence: Sequence) -> None:
        (self._started if sequence in self._started else self._held).remove(sequence)


def _has_prompt(sequence: Sequence) -> bool:
    if sequence.barred:
        return True
    return sequence.state is State.RUNNING and sequence.computed >= sequence.common
