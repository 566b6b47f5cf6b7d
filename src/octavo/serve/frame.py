"""A picture of the pool as bytes for a page, and as JSON for everybody else.

    ┌────────┬─────────────────────────┬──────────────────────────────┬───────────────┐
    │ length │ head: JSON, with spaces │ all tables, one after another│ cells         │
    │ uint32 │ to a multiple of four   │ int32 a block                │ uint8 a block │
    └────────┴─────────────────────────┴──────────────────────────────┴───────────────┘

Numbers are little-endian. `Row.tables` and `Hold.tables` say in order where their tables begin and
how long each is.
"""

from collections.abc import Callable, Iterable
from itertools import groupby
from struct import unpack

import msgspec

from octavo.core.view import STATE_BITS, STATES, HoldView, SequenceView, TableView
from octavo.engine.engine import EngineStatus
from octavo.engine.showing import PoolShown, Standing
from octavo.observe.lives import Phase

INT_BYTES = 4


Table = tuple[int, int]
"""How many entries before are absent, and how many blocks follow."""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A table with its blocks."""

    first: int
    blocks: list[int]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A request, or one branch of it. Without tables it waits; `age_s` is since it came."""

    id: str
    phase: Phase
    reason: str
    tenant: str
    priority: int
    prompt_tokens: int
    answer_tokens: int
    most_tokens: int
    computed: int
    cached_tokens: int
    preemptions: int
    swapped_tokens: int
    age_s: float
    tables: tuple[Table | Listed, ...]


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """A pin or a session; `left_s` is how long a pin stays if it is not used."""

    id: str
    kind: str
    tokens: int
    left_s: float | None
    tables: tuple[Table | Listed, ...]


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks as the engine itself counts them: `owned` by one request or several."""

    free: int
    cached: int
    owned: int
    held: int
    fenced: int
    pinned: int


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """All but the blocks. `steps` is how many were planned until then."""

    number: int
    blocks: int
    block_size: int
    windows: tuple[int | None, ...]
    steps: int
    counts: Counts
    swap_blocks_total: int
    swap_blocks_used: int
    running: tuple[Row, ...]
    waiting: tuple[Row, ...]
    waiting_total: int
    holds: tuple[Hold, ...]
    holds_total: int


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The same with the blocks: runs of (state, marks, how many) in their order."""

    pool: Head
    states: tuple[str, ...] = STATES
    cells: list[tuple[int, int, int]]


def frame(number: int, shown: PoolShown) -> bytes:
    """For a page."""
    text = msgspec.json.encode(_head(number, shown, _measured))
    text += b" " * (-len(text) % INT_BYTES)
    view = shown.view
    owners: list[SequenceView | HoldView] = [*view.running, *view.holds]
    tables = [table.blocks for owner in owners for table in owner.tables]
    return b"".join((len(text).to_bytes(INT_BYTES, "little"), text, *tables, view.cells))


def document(number: int, shown: PoolShown) -> bytes:
    """For everybody else."""
    runs = [
        (cell & STATE_BITS, cell & ~STATE_BITS, sum(1 for _ in same))
        for cell, same in groupby(shown.view.cells)
    ]
    return msgspec.json.encode(Pool(pool=_head(number, shown, _listed), cells=runs))


def _measured(table: TableView) -> Table:
    return table.first, len(table.blocks) // INT_BYTES


def _listed(table: TableView) -> Listed:
    blocks = unpack(f"<{len(table.blocks) // INT_BYTES}i", table.blocks)
    return Listed(first=table.first, blocks=list(blocks))


def _head(number: int, shown: PoolShown, form: Callable[[TableView], Table | Listed]) -> Head:
    view, status = shown.view, shown.status
    return Head(
        number=number,
        blocks=len(view.cells),
        block_size=view.block_size,
        windows=view.windows,
        steps=status.steps,
        counts=_counts(status),
        swap_blocks_total=status.swap_blocks_total,
        swap_blocks_used=status.swap_blocks_used,
        running=_rows(shown.at_s, view.running, shown.running, form),
        waiting=_rows(shown.at_s, view.waiting, shown.waiting, form),
        waiting_total=view.waiting_total,
        holds=tuple(_hold(shown.at_s, hold, form) for hold in view.holds),
        holds_total=view.holds_total,
    )


def _counts(status: EngineStatus) -> Counts:
    return Counts(
        free=status.blocks_free,
        cached=status.blocks_cached,
        owned=status.blocks_owned,
        held=status.blocks_held,
        fenced=status.blocks_fenced,
        pinned=status.blocks_pinned,
    )


def _rows(
    now: float,
    sequences: Iterable[SequenceView],
    standings: Iterable[Standing],
    form: Callable[[TableView], Table | Listed],
) -> tuple[Row, ...]:
    return tuple(
        Row(
            id=one.id,
            phase=standing.phase,
            reason=standing.reason,
            tenant=one.tenant,
            priority=one.priority,
            prompt_tokens=one.prompt_tokens,
            answer_tokens=one.answer_tokens,
            most_tokens=one.most_tokens,
            computed=one.computed,
            cached_tokens=one.cached_tokens,
            preemptions=one.preemptions,
            swapped_tokens=one.swapped_tokens,
            age_s=now - one.submitted_s,
            tables=tuple(form(table) for table in one.tables),
        )
        for one, standing in zip(sequences, standings, strict=True)
    )


def _hold(now: float, hold: HoldView, form: Callable[[TableView], Table | Listed]) -> Hold:
    return Hold(
        id=hold.id,
        kind=hold.kind,
        tokens=hold.tokens,
        left_s=None if hold.until_s is None else hold.until_s - now,
        tables=tuple(form(table) for table in hold.tables),
    )
