"""canonical(): one value for all states of a core that differ in nothing a decision depends on.

Blocks are alike: they are named in the order in which they are met; so are rows, which are only
counted. Of arrivals and turns the order matters. Counts of the past, times and caches of what can
be computed again are left out. An attribute that no table here names is taken whole: so what a
new feature remembers is part of the state. What grows without end must be named, or no search ends.
"""

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from typing import Any

from octavo.core.block_manager import BlockManager
from octavo.core.block_pool import BlockPool
from octavo.core.block_table import ABSENT, BlockTable
from octavo.core.draft import InFlight
from octavo.core.fairness import ServiceCounters
from octavo.core.holds import Hold, Holds
from octavo.core.plan import Span, StepPlan
from octavo.core.prefix_cache import Context, Prefix, PrefixCache
from octavo.core.request import Request
from octavo.core.roster import Roster
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence, State
from octavo.core.swap import HostArena

MANY = 8
"""So many preemptions are like any more: a small pool is held back whole."""

Value = Any
"""Nested tuples of plain values."""


class _Names:
    """Names for blocks, and for slots of the host arena, in the order in which they are met."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self.slots: dict[int, int] = {}

    def slot(self, slot: int) -> int:
        return self.slots.setdefault(slot, len(self.slots))

    def block(self, block: int) -> int:
        return block if block == ABSENT else self.blocks.setdefault(block, len(self.blocks))

    def all(self, blocks: Iterable[int]) -> Value:
        return tuple(map(self.block, blocks))


def canonical(scheduler: Scheduler) -> Value:
    """Two schedulers with one value decide alike for ever, but for the names of blocks and rows."""
    names = _Names()
    live = sorted((*scheduler.running, *scheduler.waiting, *scheduler.held), key=lambda one: one.id)
    turns = _ranked({-1, *(one.last_served for one in live)})
    orders = _ranked({one.order for one in live})
    tickets = _ranked({one.ticket for one in live if one.ticket is not None})
    sequences = tuple(
        (
            one.id,
            turns[one.last_served],
            orders[one.order],
            None if one.ticket is None else (one.rank[0], tickets[one.ticket]),
            _walk(names, one, vars_of=one),
        )
        for one in live
    )
    return (sequences, _walk(names, scheduler, vars_of=scheduler))


def _ranked(values: set[Any]) -> dict[Any, int]:
    """The place of each among all."""
    return {value: place for place, value in enumerate(sorted(values))}


# --- what to make of each attribute: None leaves it out

Reader = Callable[[_Names, Any], Value]


def _count(names: _Names, items: Any) -> int:
    return len(items)


def _blocks(names: _Names, blocks: Iterable[int]) -> Value:
    return names.all(blocks)


def _swapped(names: _Names, arena: HostArena) -> Value:
    return tuple(
        (name, swapped.tokens, tuple(map(names.slot, swapped.live())))
        for name, swapped in sorted(arena.held().items())
    )


def _in_flight(names: _Names, step: InFlight) -> Value:
    parts = tuple(
        (one.id, one.state is State.FINISHED, one.epoch == epoch, _walk(names, span))
        for one, epoch, span in zip(step.sequences, step.epochs, step.plan.spans, strict=True)
    )
    moves = [
        (move.kind, names.block(move.block), names.slot(move.slot)) for move in step.plan.moves
    ]
    return parts, tuple(moves)


def _published(names: _Names, by_block: dict[int, tuple[Prefix, int]]) -> Value:
    """Which block stands for which prefix."""
    placed = sorted((_path(node), group, block) for block, (node, group) in by_block.items())
    return tuple((path, group, names.block(block)) for path, group, block in placed)


def _path(node: Prefix) -> Value:
    """All that a node means: its salt and every token up to its end."""
    if isinstance(node.parent, Context):
        return (node.parent.salt, *node.tokens)
    return (*_path(node.parent), *node.tokens)


def _ahead(counters: dict[str, int]) -> Value:
    """By how much each is ahead of the last: the counters themselves only grow."""
    least = min(counters.values(), default=0)
    return tuple((tenant, counter - least) for tenant, counter in sorted(counters.items()))


READERS: dict[tuple[type, str], Reader | None] = {
    (BlockManager, "_hits"): None,  # they read what is told here, and remember nothing
    (BlockManager, "_room"): None,
    (BlockManager, "_transfers"): None,
    (BlockManager, "_now"): None,
    (BlockManager, "_plan_id"): None,
    (BlockManager, "_returned"): None,  # for the runner to know, decides nothing
    (BlockPool, "_references"): None,  # the owners say it, as `check` has found
    (BlockPool, "_holds"): None,
    (BlockPool, "_yielding"): None,
    (BlockPool, "_epochs"): None,
    (BlockPool, "_free"): _count,
    (BlockPool, "_cached"): _blocks,
    (BlockPool, "_fenced"): None,  # the moves in flight say it
    (BlockPool, "_transfers"): None,
    (Holds, "_manager"): None,
    (Holds, "_pinned"): None,  # the pins again, by block
    (Holds, "_next_s"): None,
    (Hold, "tokens"): _count,
    (Hold, "prefixes"): _count,
    (BlockTable, "_blocks"): _blocks,
    (BlockTable, "peak"): None,
    (PrefixCache, "_nodes"): None,  # weak: those without a block or a sequence mean nothing
    (PrefixCache, "_children"): None,  # the published ones again, in order
    (PrefixCache, "_by_block"): _published,
    (PrefixCache, "_fates"): None,  # for those who explain
    (PrefixCache, "_hash"): None,
    (Scheduler, "counters"): None,
    (Scheduler, "pace"): None,
    (Scheduler, "_committed_at"): None,
    (Scheduler, "_plans"): None,
    (Scheduler, "_untold"): None,
    (Scheduler, "_growth"): None,  # they keep nothing of their own
    (Scheduler, "_admissions"): lambda names, admissions: _walk(names, admissions.promise),
    (Roster, "running"): None,  # all that live are told above, by name
    (Roster, "waiting"): None,
    (Roster, "arrivals"): None,
    (Roster, "tickets"): None,
    (Roster, "_rows"): _count,
    (Sequence, "rank"): None,  # the place among those that live, above
    (Sequence, "ticket"): None,
    (Sequence, "order"): None,
    (Sequence, "last_served"): None,
    (Sequence, "row"): None,
    (Sequence, "epoch"): None,  # those in flight say whether it is theirs
    (Sequence, "context"): None,
    (Sequence, "tokens"): _count,
    (Sequence, "prefixes"): _count,
    (Sequence, "preemptions"): lambda names, count: min(count, MANY),
    (Sequence, "swaps"): None,
    (Sequence, "_reached"): None,
    (Sequence, "_cached_tokens"): None,
    (Sequence, "_recomputed_tokens"): None,
    (Sequence, "_admitted_s"): None,
    (ServiceCounters, "_counters"): lambda names, counters: _ahead(counters),
    (ServiceCounters, "_most"): None,
    (Scheduler, "_lengths"): None,  # too few to predict anything by
}

VALUES: dict[type, Reader] = {
    # met below the top: a name is enough, `canonical` tells the rest of all that live
    Sequence: lambda names, one: (one.id, one.state is State.FINISHED),
    Request: lambda names, one: (one.id, one.sampling.branch),
    Context: lambda names, one: one.salt,
    Prefix: lambda names, one: _path(one),
    StepPlan: lambda names, plan: None,  # carried out; the parts beside it say what will come back
    Span: lambda names, span: (span.start, span.stop, span.samples),
    HostArena: _swapped,
    InFlight: _in_flight,
}

_PLAIN = (int, str, bool, float, bytes, type(None))


def _walk(names: _Names, value: Any, *, vars_of: Any = None) -> Value:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if vars_of is None and kind in VALUES:
        return VALUES[kind](names, value)
    if kind in (tuple, list, deque):
        return tuple([_walk(names, one) for one in value])
    if isinstance(value, dict):
        return tuple([(_walk(names, key), _walk(names, one)) for key, one in value.items()])
    if kind in (set, frozenset):
        return tuple(sorted((_walk(names, one) for one in value), key=repr))
    if isinstance(value, Enum):
        return value.value
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return tuple([read(names, getattr(value, name)) for name, read in _attributes(kind, value)])


def _attributes(kind: type, value: Any) -> list[tuple[str, Reader]]:
    return _readers(kind, tuple(vars(value)) if hasattr(value, "__dict__") else ())


@cache
def _readers(kind: type, of_instance: tuple[str, ...]) -> list[tuple[str, Reader]]:
    slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    names = sorted({*slots, *of_instance} - {"__weakref__", "__dict__"})
    readers = [(name, READERS.get((kind, name), _walk)) for name in names]
    return [(name, read) for name, read in readers if read is not None]
