"""View: the pool as it stands between two calls, as values that can be shown and sent.

Everything here only reads. A cell is one byte a block, its state and two marks:

    ┌───┬────────┬────────┬───────────────┐
    │ 0 │ MOVING │ PINNED │ state, 3 bits │    FREE CACHED OWNED SHARED HELD FENCED
    └───┴────────┴────────┴───────────────┘
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain, repeat
from math import inf
from struct import pack
from typing import Literal

from octavo.core.block_pool import Books
from octavo.core.block_table import BlockTable
from octavo.core.holds import Hold
from octavo.core.prefix_cache import Prefix
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import NO_ROW, Sequence

FREE, CACHED, OWNED, SHARED, HELD, FENCED = range(6)
"""OWNED: in the tables of one sequence, SHARED: of several. HELD: by holds alone. FENCED: by
transfers alone."""
STATES = ("free", "cached", "owned", "shared", "held", "fenced")
STATE_BITS, PINNED, MOVING = 7, 8, 16

_BY_OWNERS = bytes([FREE, OWNED]) + bytes([SHARED]) * 254
"""The state of a block with so many owners, none of them a hold or a transfer."""


@dataclass(frozen=True, slots=True)
class TableView:
    """The entries of one table from `first` on, those before are absent. Little-endian int32."""

    first: int
    blocks: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """One sequence that has not ended.

    It waits in row -1 and has no tables then. `behind` is the branch that computes the prompt for
    it, "" if it does not wait for that. Times are on the core's clock.
    """

    id: str
    tenant: str
    priority: int
    row: int
    prompt_tokens: int
    answer_tokens: int
    most_tokens: int
    """Prompt and longest answer together."""
    computed: int
    cached_tokens: int
    preemptions: int
    swapped_tokens: int
    submitted_s: float
    behind: str
    tables: tuple[TableView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldView:
    """A pin until a time, or a session."""

    id: str
    kind: Literal["pin", "session"]
    tokens: int
    until_s: float | None
    tables: tuple[TableView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """Every block, every sequence that runs, and the foremost of those that wait."""

    block_size: int
    windows: tuple[int | None, ...]
    cells: bytes
    running: tuple[SequenceView, ...]
    waiting: tuple[SequenceView, ...]
    holds: tuple[HoldView, ...]
    waiting_total: int
    holds_total: int


@dataclass(frozen=True, slots=True)
class OwnerView:
    """An owner of a block: at `index` of its table of `group`."""

    id: str
    kind: Literal["sequence", "pin", "session"]
    group: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """One block. `key` is that of the prefix it is found by, "" if it is not; it ends at position
    `prefix_tokens` then. `evicted_after` so many others, if it is cached."""

    block: int
    cell: int
    epoch: int
    owners: tuple[OwnerView, ...]
    key: str
    prefix_tokens: int
    evicted_after: int | None


def view_pool(scheduler: Scheduler, *, most: int) -> PoolView:
    """All blocks, and at most so many of those that wait and of the holds.

    Cost     about 30 ns a block and a table entry, of which half is the memory of the answer.
    """
    roster = scheduler.roster
    waiting = roster.waiting.foremost(most)
    held = roster.held if roster.unadmitted > len(roster.waiting) else ()
    holds = list(scheduler.holds)[::-1]
    return PoolView(
        block_size=scheduler.manager.block_size,
        windows=scheduler.manager.windows,
        cells=bytes(cells(scheduler)),
        running=tuple(_view(scheduler, one) for one in roster.running),
        waiting=(
            *(_view(scheduler, one) for one in waiting),
            *(_view(scheduler, one, held=True) for one in held[: most - len(waiting)]),
        ),
        holds=tuple(map(_hold, holds[:most])),
        waiting_total=roster.unadmitted,
        holds_total=len(holds),
    )


def cells(scheduler: Scheduler) -> bytearray:
    """The cell of every block.

    Most blocks have a state that follows from the number of owners; the others are few, or one
    state of two: then the rarer is put in by hand.
    """
    books, holds = scheduler.manager.pool.books(), scheduler.holds
    cells = _owners(books).translate(_BY_OWNERS)
    if len(books.cached) <= len(books.free):
        _paint(cells, books.cached, CACHED)
    else:
        cells = cells.replace(bytes([FREE]), bytes([CACHED]))
        _paint(cells, books.free, FREE)
    for block in chain(chain.from_iterable(hold.blocks() for hold in holds), books.transfers):
        cells[block] = _exactly(books, block)
    for hold in holds:
        if hold.until_s < inf:
            for block in hold.blocks():
                cells[block] |= PINNED
    return cells


def _owners(books: Books) -> bytearray:
    """How many owners each block has, or 255 if there are more."""
    try:
        return bytearray(books.references)
    except ValueError:
        return bytearray(map(min, books.references, repeat(255)))


def _paint(cells: bytearray, blocks: Iterable[int], state: int) -> None:
    for block in blocks:
        cells[block] = state


def _exactly(books: Books, block: int) -> int:
    """The cell of a block that holds or transfers own too."""
    moving = books.transfers.get(block, 0)
    owners = books.references[block] - moving
    sequences = owners - books.holds[block]
    mark = MOVING if moving else 0
    if sequences:
        return mark | _BY_OWNERS[min(sequences, 2)]
    return mark | (HELD if owners else FENCED)


def _view(scheduler: Scheduler, sequence: Sequence, *, held: bool = False) -> SequenceView:
    request = sequence.request
    arena = scheduler.manager.arena
    swapped = None if arena is None else arena.swapped(sequence.id)
    return SequenceView(
        id=sequence.id,
        tenant=request.tenant,
        priority=request.priority,
        row=sequence.row,
        prompt_tokens=sequence.prompt_length,
        answer_tokens=sequence.answer_length,
        most_tokens=sequence.prompt_length + request.max_tokens,
        computed=sequence.computed,
        cached_tokens=sequence.cached_tokens,
        preemptions=sequence.preemptions,
        swapped_tokens=0 if swapped is None else swapped.tokens,
        submitted_s=sequence.submitted_s,
        behind=request.id if held else "",
        tables=() if sequence.row == NO_ROW else tuple(map(_table, sequence.tables)),
    )


def _hold(hold: Hold) -> HoldView:
    return HoldView(
        id=hold.id,
        kind=_kind(hold),
        tokens=len(hold.tokens),
        until_s=None if hold.until_s == inf else hold.until_s,
        tables=tuple(map(_table, hold.tables)),
    )


def _kind(hold: Hold) -> Literal["pin", "session"]:
    return "session" if hold.until_s == inf else "pin"


def _table(table: BlockTable) -> TableView:
    live = table.blocks[table.first :]
    return TableView(table.first, pack(f"<{len(live)}i", *live))


def view_block(scheduler: Scheduler, block: int) -> BlockView:
    """What there is to say about one block.

    Cost     O(table entries + cached blocks).
    """
    pool, cache = scheduler.manager.pool, scheduler.manager.cache
    cached = pool.books().cached
    found = None if cache is None else cache.node_of(block)
    return BlockView(
        block=block,
        cell=cells(scheduler)[block],
        epoch=pool.epoch(block),
        owners=tuple(_owners_of(scheduler, block)),
        key="" if found is None else found[0].key.hex(),
        prefix_tokens=0 if found is None else _end(found[0]),
        evicted_after=list(cached).index(block) if block in cached else None,
    )


def _owners_of(scheduler: Scheduler, block: int) -> Iterator[OwnerView]:
    for sequence in scheduler.roster.running:
        for group, index in _places(sequence.tables, block):
            yield OwnerView(sequence.id, "sequence", group, index)
    for hold in scheduler.holds:
        for group, index in _places(hold.tables, block):
            yield OwnerView(hold.id, _kind(hold), group, index)


def _places(tables: Items[BlockTable], block: int) -> Iterator[tuple[int, int]]:
    for group, table in enumerate(tables):
        blocks = table.blocks
        if block in blocks:
            yield group, blocks.index(block)


def _end(node: Prefix) -> int:
    """The position after the last of its tokens."""
    tokens = 0
    parent: object = node
    while isinstance(parent, Prefix):
        tokens += len(parent.tokens)
        parent = parent.parent
    return tokens
