"""Who goes first and who yields: pure functions over sequences and the circumstances of a plan.

Two orders. Those that wait are admitted in the order of the policy in force, which may change at
any time. Those that run yield by rank, which is fixed when one is admitted:

    rank = (class, ticket)      class: the priority value, less what it climbed while it waited
                                ticket: a count of first admissions; it stays over preemptions

In a class whoever is preempted is admitted again before those that never ran. So nobody admitted
later in a class ever takes blocks from one admitted before, whatever the policy.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import attrgetter
from typing import Literal

from octavo.core.budget import AdmissionRule, Budget, Limits, Policy, Preemption
from octavo.core.fairness import ServiceCounters
from octavo.core.pace import Pace
from octavo.core.queue import Waiting
from octavo.core.request import Request
from octavo.core.sequence import Sequence
from octavo.core.targets import Outlook, excess_tokens, is_late, outlook, turn_s

SHARE_OF_LATE = 4
"""Those that missed their targets end, and leave most to those in time: did they all come first
once they have waited for long, nobody would be in time any more after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What an order may depend on besides the sequences.

    The `highest` and `lowest` classes are those of the lowest and highest priority values that are
    live; `ahead` is there when latency targets count. At one admission of `SHARE_OF_LATE` those
    come first who missed theirs and have climbed back, `late_first`.
    """

    now: float
    limits: Limits
    order: "Order"
    highest: int = 0
    lowest: int = 0
    service: ServiceCounters
    ahead: Outlook | None = None
    late_first: bool = True


Key = tuple[float, ...]
"""Whose is lower goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One policy: `candidates` to be first of those that wait, and by what they compare within a
    class; `classes` tells whether priorities count, `targets` whether those for latency do, `since`
    when one begins to climb."""

    classes: bool = True
    targets: bool = False
    since: Callable[[Sequence], float] = attrgetter("arrived_s")
    candidates: Callable[[Waiting], Iterable[Sequence]] = Waiting.heads
    key: Callable[[Sequence, Circumstances], Key]


def _arrival(sequence: Sequence, at: Circumstances) -> Key:
    return sequence.order


def _service(sequence: Sequence, at: Circumstances) -> Key:
    return at.service.of(sequence.request.tenant), *sequence.order


def _due(sequence: Sequence, at: Circumstances) -> Key:
    return turn_s(sequence, at.limits), *sequence.order


_ORDERS: Mapping[Policy, Order] = {
    "fcfs": Order(classes=False, key=_arrival),
    "priority": Order(key=_arrival),
    "fair": Order(since=attrgetter("headed_s"), key=_service),
    "slo": Order(targets=True, candidates=iter, key=_due),
}


def circumstances(
    now: float,
    limits: Limits,
    running: Items[Sequence],
    *,
    priorities: Collection[int],
    service: ServiceCounters,
    pace: Pace,
    admissions: int = 0,
) -> Circumstances:
    """Those of a plan made now, after so many `admissions`."""
    order = _ORDERS[limits.policy]
    return Circumstances(
        now=now,
        limits=limits,
        order=order,
        highest=min(priorities, default=0),
        lowest=max(priorities, default=0),
        service=service,
        ahead=outlook([one for one in running if not one.idle], limits, pace, now)
        if order.targets
        else None,
        late_first=admissions % SHARE_OF_LATE == 0,
    )


def first(waiting: Waiting, at: Circumstances) -> Sequence | None:
    """Who is to be admitted next; None when nobody waits.

    Cost     O(lanes); O(waiting) by deadline.
    """
    return min(at.order.candidates(waiting), key=partial(_place, at), default=None)


def _place(at: Circumstances, sequence: Sequence) -> tuple[int, float, Key]:
    ticket = inf if sequence.ticket is None else sequence.ticket
    return turn_of(sequence, at), ticket, at.order.key(sequence, at)


def class_of(sequence: Sequence, at: Circumstances) -> int:
    """The priority value, less one for each `aging_s` since the arrival, the lower the better.

    Nobody climbs above the highest class that is live: there, who came first goes first.
    """
    return _class(sequence, at, 0)


def turn_of(sequence: Sequence, at: Circumstances) -> int:
    """The class in which it waits for its turn: who can no longer meet its target falls behind
    all that can, and has to climb from there."""
    fallen = _fallen(sequence, at)
    if fallen and not at.late_first:
        return sequence.request.priority + fallen
    return _class(sequence, at, fallen)


def rank_class(sequence: Sequence, at: Circumstances) -> int:
    """The class in which it ranks while it runs, if it is admitted now.

    Who missed its target yields to those in time; but only once, or it could be for ever.
    """
    return turn_of(sequence, at) if sequence.ticket is None else class_of(sequence, at)


def _fallen(sequence: Sequence, at: Circumstances) -> int:
    """How many classes a missed target costs."""
    if at.ahead is None or not is_late(sequence, at.limits, at.ahead, at.now):
        return 0
    return at.lowest - at.highest + 1


def _is_behind(sequence: Sequence, at: Circumstances) -> bool:
    """Whether it missed its target and has not climbed back yet."""
    return _fallen(sequence, at) > climbed(sequence, at)


def _class(sequence: Sequence, at: Circumstances, fallen: int) -> int:
    if not at.order.classes:
        return 0
    return max(sequence.request.priority + fallen - climbed(sequence, at), at.highest)


def climbed(sequence: Sequence, at: Circumstances) -> int:
    """How many classes its waiting is worth.

    Between tenants, waiting behind one's own requests is worth nothing: else a tenant that floods
    would have the oldest ones, and the first turn.
    """
    aging_s = at.limits.aging_s
    if not aging_s:
        return 0
    waited_s = at.now - at.order.since(sequence)
    return int(waited_s / aging_s) if waited_s >= aging_s else 0


def budget(at: Circumstances) -> Budget:
    """What the step may spend: where targets count, no more than those that run can bear."""
    if at.ahead is None or at.ahead.tokens >= at.limits.tokens:
        return Budget(at.limits.tokens)
    return Budget(at.ahead.tokens, "slo")


def overload(sequence: Sequence, started: Items[Request], at: Circumstances) -> int:
    """By how many tokens a step would be too long for those that run, were `sequence` admitted
    after those that this plan has `started`. Who is late itself takes only what they leave, and who
    has climbed is not kept waiting by the targets of others."""
    if at.ahead is None or climbed(sequence, at):
        return 0
    if is_late(sequence, at.limits, at.ahead, at.now):
        return 0
    return excess_tokens(at.ahead, started, at.limits)


Offered = tuple[Sequence, int]
"""A running sequence and its demand."""


def service_order(demands: Iterable[Offered], at: Circumstances) -> Items[Offered]:
    """The order in which running sequences, each with its demand, are offered a token budget that
    is not enough for all.

    Decodes first, those that waited longest before the others, so that each gets its turn when the
    budget is smaller than their number; then the rest as they would be admitted. Who missed its
    target comes after all others.
    """
    return sorted(demands, key=partial(_service_turn, at))


def _service_turn(at: Circumstances, offered: Offered) -> tuple[bool, bool, Key]:
    sequence, demand = offered
    behind, order = _is_behind(sequence, at), at.order
    if demand == 1:
        return behind, False, (sequence.last_served, *sequence.rank)
    if order.key is _arrival:
        return behind, True, sequence.rank
    return behind, True, (turn_of(sequence, at), *order.key(sequence, at))


_rank = attrgetter("rank", "number")
"""Those that search together share a ticket."""


def by_rank(sequences: Iterable[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=_rank)


def victim_for(sequence: Sequence, running: Items[Sequence]) -> Sequence | None:
    """The last of the lowest class, if it makes way for `sequence`, which must grow; one that ranks
    above and idles only after all that rank below."""
    return max(
        below(sequence, running),
        key=lambda other: (_rank(other) > _rank(sequence), _rank(other)),
        default=None,
    )


def below(sequence: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
    """All that make way for `sequence`, which rank below it or idle for it: when their blocks do
    not suffice, nobody yields for it."""
    return [
        other
        for other in running
        if _rank(other) > _rank(sequence) or (other.barred and other.idles_for(sequence))
    ]


def yielding_to(
    sequence: Sequence, running: Iterable[Sequence], at: Circumstances
) -> list[Sequence]:
    """Who may be preempted to admit `sequence`: only lower classes and those that idle for it, who
    ranks last first.

    What it climbed while it waited gives it a place in the queue and no right to that of others.
    """
    lower = [other for other in running if yields(other, sequence, at)]
    return sorted(lower, key=_rank, reverse=True)


def yields(running: Sequence, waiting: Sequence, at: Circumstances) -> bool:
    """Whether one that runs may be preempted to admit one that waits."""
    if running.barred and running.idles_for(waiting):
        return True
    if not at.order.classes:
        return False
    return running.rank[0] > waiting.request.priority + _fallen(waiting, at)


@dataclass(frozen=True, slots=True)
class Yielding:
    """How a victim yields, and how long either way was estimated to take (None: not known, or not
    possible)."""

    mode: Literal["recompute", "swap"]
    swap_s: float | None
    recompute_s: float | None

    @property
    def estimates_s(self) -> tuple[float | None, float | None]:
        return self.swap_s, self.recompute_s


def swap_or_recompute(
    preemption: Preemption, *, swap_s: float | None, recompute_s: float | None
) -> Yielding:
    """Whether the KV of a victim is moved there and back, or computed again.

    Neither estimate counts what the prefix cache will still have by then: nobody can know it.
    """
    if swap_s is None or preemption == "recompute":
        mode: Literal["recompute", "swap"] = "recompute"
    elif preemption == "swap" or recompute_s is None or swap_s < recompute_s:
        mode = "swap"
    else:
        mode = "recompute"
    return Yielding(mode, swap_s, recompute_s)


def goes_before(running: Sequence, waiting: Sequence, at: Circumstances) -> bool:
    """Whether one that runs ranks before one that waits, were that admitted now."""
    ticket = inf if waiting.ticket is None else waiting.ticket
    return running.rank < (rank_class(waiting, at), ticket)


def worth_following(alike: int, lacking: int, left: int, pace: Pace) -> bool:
    """Whether one that lacks so many tokens waits for another to compute those that are `alike`.

    They are not computed twice then; but the rest comes a step later, and a step costs something
    before its first token. With too little `left` of this step's budget the rest does so anyway.
    """
    return alike > 0 and (lacking > left or alike * pace.token_s >= pace.base_s)


def crowds(siblings: int, running: int) -> bool:
    """Whether the next of `siblings` that have started queues behind all others.

    It keeps the place of its request while they are less than half of what runs: so a request with
    many answers neither waits once for each, nor stands in the way of those that came after it.
    """
    return 2 * siblings >= running


def foresees(limits: Limits) -> bool:
    """Whether room is kept for the answers that are expected."""
    return limits.admission == "predicted"


def reserved(sequence: Sequence, admission: AdmissionRule) -> int:
    """Below which position blocks are reserved when `sequence` is admitted, whatever its chunk.

    Chunk-wise admission reserves no more than the first chunk needs. Who was preempted once has
    all reserved: or it would be let in because that fits, and thrown out in the next step, again
    and again.
    """
    return 0 if admission == "chunked" and not sequence.preemptions else len(sequence.tokens)


def headroom(
    sequence: Sequence, *, watermark: int, alone: bool, blocks: int, foreseen: int = 0
) -> int:
    """How many blocks must stay available when `sequence` is admitted: at least those that it and
    the others are `foreseen` to grow by.

    Doubles with each preemption it has suffered, so that the number of preemptions of one request
    is bounded by the logarithm of the pool. Nothing is held back from a sequence that runs alone.
    """
    least = max(watermark, 1) if sequence.preemptions else watermark
    return 0 if alone else min(max(least << sequence.preemptions, foreseen), blocks)
