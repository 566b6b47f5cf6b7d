"""Roster: every sequence that has not ended, and where it is.

held ── its turn among its siblings ──▶ waiting ── start ──▶ running, in a row
                                           ▲                    │
                                           └───── preempt ──────┘
"""

from collections import Counter
from collections.abc import Iterator

from octavo.core import policy
from octavo.core.fairness import ServiceCounters
from octavo.core.queue import Waiting
from octavo.core.request import Request
from octavo.core.sequence import Sequence, State
from octavo.core.siblings import Siblings


class Roster:
    """Keeps    a sequence is in one place; one row for each that runs, of `rows` there are."""

    def __init__(self, rows: int) -> None:
        self.waiting = Waiting()
        self.running: list[Sequence] = []
        self.service = ServiceCounters()
        self.live: Counter[int] = Counter()
        """How many sequences have not ended, by priority."""
        self.arrivals = 0
        self.tickets = 0
        """How many were admitted for the first time."""
        self._rows = list(range(rows - 1, -1, -1))
        self._by_id: dict[str, Siblings] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Sequence]:
        """Those that run, then those that wait."""
        yield from self.running
        yield from self.waiting.all()

    @property
    def held(self) -> tuple[Sequence, ...]:
        return tuple(one for siblings in self._by_id.values() for one in siblings.held)

    @property
    def unadmitted(self) -> int:
        """How many wait or are held."""
        return self.live.total() - len(self.running)

    @property
    def unadmitted_tokens(self) -> int:
        """The prompt tokens among them."""
        return self.waiting.tokens + self.unadmitted - len(self.waiting)

    @property
    def next_row(self) -> int:
        """Where the next to start will run."""
        return self._rows[-1]

    def siblings_of(self, request: Request) -> Siblings:
        return self._by_id[request.id]

    def of(self, request_id: str, number: int | None) -> tuple[Sequence, ...]:
        """What has not ended of a request, or only the one whose events carry `number`; those that
        search together end together."""
        siblings = self._by_id.get(request_id)
        if siblings is None:
            return ()
        return siblings.of(number if siblings.search is None else None)

    def enter(self, siblings: Siblings, request: Request, now: float) -> None:
        """A request is taken."""
        self.arrivals += 1
        self._by_id[request.id] = siblings
        self.live[request.priority] += len(siblings)
        self._queue_next(siblings, now)

    def queue_next(self, sequence: Sequence, now: float) -> None:
        """Queue the next sibling of `sequence` if it is its turn, in the place of its request or
        behind all."""
        self._queue_next(self._by_id[sequence.request.id], now)

    def _queue_next(self, siblings: Siblings, now: float) -> None:
        sequence = siblings.next()
        if sequence is None:
            return
        if policy.crowds(siblings.started - 1, len(self.running)):
            sequence.arrive(self.arrivals, now)
            self.arrivals += 1
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        self.service.join(sequence.request.tenant, self.waiting.tenants())
        self.waiting.add(sequence)

    def start(self, sequence: Sequence, now: float) -> tuple[int, int]:
        """Give it a row; returns that and its ticket. Its class is for the policy to say."""
        self.waiting.remove(sequence, now)
        self.running.append(sequence)
        self.service.leave(sequence.request.tenant)
        if sequence.ticket is not None:
            return self._rows.pop(), sequence.ticket
        self.tickets += 1
        return self._rows.pop(), self.tickets

    def preempt(self, victim: Sequence, *, kept: bool) -> None:
        """Take the row of one that runs; it waits again. Its KV is `kept` elsewhere, or lost."""
        self._stop(victim)
        victim.preempt(kept=kept)
        self._queue(victim)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._rows.append(sequence.row)

    def leave(self, sequence: Sequence, now: float) -> None:
        """It ends, wherever it is; its siblings go on."""
        if sequence.state is State.RUNNING:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence, now)
        request = sequence.request
        siblings = self._by_id[request.id]
        siblings.remove(sequence)
        self.live[request.priority] -= 1
        if not self.live[request.priority]:
            del self.live[request.priority]
        if siblings:
            self._queue_next(siblings, now)
        else:
            del self._by_id[request.id]
