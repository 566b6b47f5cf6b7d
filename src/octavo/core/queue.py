"""Waiting: the sequences that wait to be admitted, in lanes.

    priority 0, tenant a    │ r1 r4 r9        in a lane those that were preempted come first,
    priority 0, tenant b    │ r2              then all by arrival
    priority 1, tenant a    │ r3 r5
    aside                   │ r6              their turn cannot come now

That order is the same under every policy, so that one which changes while sequences wait, or
depends on the time, need not sort them anew: it compares the first of each lane.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from itertools import chain, islice
from math import inf

from octavo.core.budget import Limits
from octavo.core.events import Refused
from octavo.core.request import Request
from octavo.core.sequence import Sequence

Lane = tuple[int, str]


class Waiting:
    """Cost     O(log n + shifting a list) to add and to remove; O(lanes) for the heads."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, list[Sequence]] = {}
        self._aside: dict[Sequence, None] = {}
        self._count = 0
        self.tokens = 0
        """Prompt tokens that wait, see `prompt_tokens`."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """All whose turn can come, lane by lane."""
        return chain.from_iterable(self._lanes.values())

    def all(self) -> Iterator[Sequence]:
        """Those who are aside too."""
        return chain(self, self._aside)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._aside or self._in_lane(sequence)

    def _in_lane(self, sequence: Sequence) -> bool:
        lane = self._lanes.get(_lane_of(sequence), [])
        index = bisect_left(lane, _place(sequence), key=_place)
        return index < len(lane) and lane[index] is sequence

    def foremost(self, count: int) -> list[Sequence]:
        """At most `count`: those aside, then by priority and place in the lane.

        Cost     O(lanes + count · log lanes).
        """
        lanes = merge(*self._lanes.values(), key=lambda one: (one.request.priority, _place(one)))
        return list(islice(chain(self._aside, lanes), count))

    def heads(self) -> Iterator[Sequence]:
        """The first of each lane."""
        return (lane[0] for lane in self._lanes.values())

    def tenants(self) -> set[str]:
        """Who has a sequence here."""
        return {tenant for _, tenant in self._lanes} | {s.request.tenant for s in self._aside}

    def earlier(self, sequence: Sequence) -> int:
        """How many that never ran and wait for their turn arrived before `sequence`."""
        first, last = (inf, -1, 0), (inf, *sequence.order)
        return sum(
            bisect_left(lane, last, key=_place) - bisect_left(lane, first, key=_place)
            for lane in self._lanes.values()
        )

    def add(self, sequence: Sequence) -> None:
        self._enter(sequence)
        self._count += 1
        self.tokens += prompt_tokens(sequence)

    def remove(self, sequence: Sequence, now: float) -> None:
        assert sequence in self, f"{sequence.id} does not wait"
        if sequence in self._aside:
            del self._aside[sequence]
        else:
            self._leave(sequence, now)
        self._count -= 1
        self.tokens -= prompt_tokens(sequence)

    def set_aside(self, sequence: Sequence, now: float) -> None:
        """Its turn does not come until it is called back."""
        self._leave(sequence, now)
        self._aside[sequence] = None

    def call_back(self, sequence: Sequence) -> None:
        """Give it back its place, if it is aside still."""
        if sequence in self._aside:
            del self._aside[sequence]
            self._enter(sequence)

    def _enter(self, sequence: Sequence) -> None:
        insort(self._lanes.setdefault(_lane_of(sequence), []), sequence, key=_place)

    def _leave(self, sequence: Sequence, now: float) -> None:
        lane = self._lanes[_lane_of(sequence)]
        index = bisect_left(lane, _place(sequence), key=_place)
        del lane[index]
        if not lane:
            del self._lanes[_lane_of(sequence)]
        elif not index:
            lane[0].headed_s = now


def prompt_tokens(sequence: Sequence) -> int:
    """What a sequence that waits counts: its prompt, which the other branches of a request share:
    they count the one position that each computes for itself."""
    return 1 if sequence.number else len(sequence.request.prompt)


def turned_away(request: Request, limits: Limits, *, answers: int, tokens: int) -> Refused | None:
    """Whether a queue of so many answers and prompt tokens is too long for one request more.

    When nobody waits any request is taken, however large; so is one that was accepted before.
    """
    if request.accepted:
        return None
    prompt = len(request.prompt) + request.branches - 1
    for limit, most, waiting, coming, what in (
        ("waiting", limits.waiting, answers, request.branches, "answers"),
        ("waiting_tokens", limits.waiting_tokens, tokens, prompt, "prompt tokens"),
    ):
        if most is not None and answers and waiting + coming > most:
            return Refused(
                request.id,
                limit,
                f"{waiting:,} {what} wait already and {coming:,} come; at most {most:,} may wait",
            )
    return None


def _lane_of(sequence: Sequence) -> Lane:
    return sequence.request.priority, sequence.request.tenant


def _place(sequence: Sequence) -> tuple[float, int, int]:
    return inf if sequence.ticket is None else sequence.ticket, *sequence.order
