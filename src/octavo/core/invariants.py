"""check(): the books of a scheduler balance. Run after every step in tests."""

from collections import Counter

from octavo.core.block_table import ABSENT, BlockTable
from octavo.core.plan import StepPlan
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import NO_ROW, Sequence, State
from octavo.core.windows import Windows, first_held, first_needed
from octavo.units import ceil_div


def check(scheduler: Scheduler) -> None:
    """All books but those of a plan.

    Raises AssertionError naming the first book that does not balance.
    """
    _check_blocks(scheduler)
    _check_holds(scheduler)
    _check_sequences(scheduler)
    _check_followers(scheduler)
    _check_cache(scheduler)
    _check_arena(scheduler)


def check_writes(scheduler: Scheduler, plan: StepPlan) -> None:
    """A plan just made writes only to blocks that have one owner and are not published.

    Raises  AssertionError naming the block.
    """
    size = scheduler.manager.block_size
    rows = {sequence.row: sequence for sequence in scheduler.running}
    for span in plan.spans:
        for table in rows[span.row].tables:
            for block in table.blocks[span.start // size : ceil_div(span.stop + span.drafts, size)]:
                _check_exclusive(scheduler, block)
    for move in plan.moves:
        if move.kind == "in":
            _check_exclusive(scheduler, move.block)


def _check_blocks(scheduler: Scheduler) -> None:
    pool = scheduler.manager.pool
    free, cached, fenced = pool.states()
    held = Counter(
        block
        for owner in (*scheduler.running, *scheduler.holds)
        for table in owner.tables
        for _, block in table.live()
    )
    moving = Counter(move.block for move in scheduler.moving if move.kind == "out")
    assert fenced == set(moving) - set(held), f"{sorted(fenced)} are fenced, not {moving}, {held}"
    owned = set(held)
    parts = (free, cached, fenced, owned)
    assert sum(map(len, parts)) == pool.total == len(set().union(*parts)), (
        f"free {len(free)} + cached {len(cached)} + fenced {len(fenced)} + owned {len(owned)}"
        f" is not a partition of {pool.total} blocks"
    )
    for block in range(pool.total):
        owners = held[block] + moving[block]
        assert pool.references(block) == owners, (
            f"block {block} has {pool.references(block)} references, {owners} owners"
        )
    entries = sum(
        len(table.blocks) - table.first for one in scheduler.running for table in one.tables
    )
    assert pool.entries == entries, f"{pool.entries} table entries are counted, {entries} there"


def _check_holds(scheduler: Scheduler) -> None:
    """The pool knows what would be available without holds, and pins keep to their quota."""
    pool, size = scheduler.manager.pool, scheduler.manager.block_size
    blocks = Counter(block for hold in scheduler.holds for block in hold.blocks())
    for block in range(pool.total):
        assert pool.holds(block) == blocks[block], f"block {block} is in {blocks[block]} holds"
    yielding = sum(
        pool.references(block) - pool.transfers(block) == count for block, count in blocks.items()
    )
    assert pool.yielding == yielding, f"{pool.yielding} blocks yield, not {yielding}"
    for hold in scheduler.holds:
        for table, window in zip(hold.tables, scheduler.manager.windows, strict=True):
            first = first_held(window, len(hold.tokens), size)
            if table.first > first:  # it ended before it computed anything after what it found
                first = first_needed(window, len(hold.tokens), size)
            _check_held(hold.id, table, first)
            assert len(table) == ceil_div(len(hold.tokens), size), f"{hold.id}: table length"
    assert scheduler.holds.pinned_blocks <= pool.total


def _check_sequences(scheduler: Scheduler) -> None:
    size = scheduler.manager.block_size
    rows = [sequence.row for sequence in scheduler.running]
    assert len(set(rows)) == len(rows) <= scheduler.ceilings.sequences, f"rows {rows}"
    scheduler.ceilings.check(scheduler.limits)
    for sequence in scheduler.running:
        assert sequence.state is State.RUNNING
        assert 0 <= sequence.computed <= sequence.scheduled <= sequence.length, sequence.id
        covered = max(sequence.scheduled, sequence.computed)
        windows = scheduler.manager.windows
        for table, window in zip(sequence.tables, windows, strict=True):
            first = first_held(window, sequence.computed, size)
            if sequence.computed <= sequence.restored:
                first = first_needed(window, sequence.restored, size)
            _check_held(sequence.id, table, first)
            assert len(table) >= ceil_div(covered, size), f"{sequence.id}: table too short"
            most = sequence.length + max(0, sequence.drafts - 1)
            assert len(table) <= ceil_div(most, size), f"{sequence.id}: table too long"
            live = [block for _, block in table.live()]
            assert len(set(live)) == len(live), f"{sequence.id}: a block stands twice"
            _check_writable(scheduler, table, sequence.computed)
        _check_steps(sequence, windows, size)
    for sequence in (*scheduler.waiting, *scheduler.held):
        assert sequence.state is State.WAITING
        assert not sequence.next_event, f"{sequence.id} waits and is said to step on"
        assert sequence.row == NO_ROW, f"{sequence.id} waits and has a row"
        assert not any(len(table) for table in sequence.tables), f"{sequence.id} waits and owns"


def _check_steps(sequence: Sequence, windows: Windows, size: int) -> None:
    """Its demand is what is left, and no step that is said to bring a token alone brings more."""
    left = min(sequence.length, sequence.last_position) - sequence.scheduled
    demand = 0 if sequence.unsettled else min(left, sequence.longest_chunk)
    assert sequence.demand == demand, f"{sequence.id}: demand"
    steps = range(sequence.computed + 1, sequence.next_event)
    if steps:
        assert sequence.computed > sequence.common, f"{sequence.id}: a sibling may be due"
        assert sequence.pinned == len(sequence.request.pins), f"{sequence.id}: a pin may be due"
        assert len(sequence.tokens) < steps.stop <= sequence.last_position, f"{sequence.id}: end"
        assert not any(count % size == 0 for count in steps), f"{sequence.id}: a block is filled"
    for window in windows:
        held = {first_held(window, count, size) for count in (sequence.computed, *steps)}
        assert len(held) == 1, f"{sequence.id}: a block leaves its window"


def _check_followers(scheduler: Scheduler) -> None:
    """Who follows waits, and whom it waits for runs and is not there yet."""
    for leader, upto, follower in scheduler.followers:
        assert leader.state is State.RUNNING, f"{follower.id} waits for {leader.id}, which is gone"
        assert leader.computed < upto, f"{follower.id} waits for {leader.id}, which is there"
        assert not leader.private, f"{follower.id} waits for {leader.id}, which publishes nothing"
        assert follower.state in (State.WAITING, State.FINISHED), f"{follower.id} follows and runs"


def _check_held(owner: str, table: BlockTable, first: int) -> None:
    """Nothing was given back too early or too late."""
    absent = [index for index, block in enumerate(table.blocks) if block == ABSENT]
    assert absent == list(range(first)), (
        f"{owner}: entries {absent} are absent, not the first {first}"
    )
    assert table.first == first, f"{owner}: the first live entry is not {table.first}"


def _check_writable(scheduler: Scheduler, table: BlockTable, computed: int) -> None:
    """Blocks that will still be written to have one owner and are not published.

    All but the one that holds the next position in its middle: after a fork it is shared until one
    of its owners writes to it.
    """
    for index, block in table.live():
        if index >= ceil_div(computed, scheduler.manager.block_size):
            _check_exclusive(scheduler, block)


def _check_exclusive(scheduler: Scheduler, block: int) -> None:
    manager = scheduler.manager
    assert manager.pool.references(block) == 1, f"block {block} is shared and written to"
    assert manager.cache is None or not manager.cache.publishes(block), (
        f"block {block} is published and written to"
    )


def _check_cache(scheduler: Scheduler) -> None:
    cache = scheduler.manager.cache
    _, cached, _ = scheduler.manager.pool.states()
    published = {} if cache is None else cache.published()
    for block, (node, group) in published.items():
        assert cache is not None
        assert node.blocks[group] == block != ABSENT, f"block {block} and its prefix disagree"
        found = cache.begins_like(node.parent, node.tokens)
        assert ABSENT in node.blocks or found == (node, len(node.tokens)), (
            f"block {block} is not found by how it begins"
        )
    assert cached <= set(published), "a cached block is published nowhere"


def _check_arena(scheduler: Scheduler) -> None:
    """Who is swapped waits, and has slots for all that it had computed; nobody else has any."""
    arena = scheduler.manager.arena
    if arena is None:
        assert not scheduler.moving, "moves without an arena"
        return
    waiting = {sequence.id: sequence for sequence in scheduler.waiting}
    held = arena.held()
    assert held.keys() <= waiting.keys(), f"{sorted(held)} hold slots, {sorted(waiting)} wait"
    for name, swapped in held.items():
        assert swapped.tokens < waiting[name].length, f"{name}: more is swapped than there is"
    owners = Counter(slot for swapped in held.values() for slot in swapped.live())
    owners.update(move.slot for move in scheduler.moving)
    for slot in range(arena.total):
        assert arena.references(slot) == owners[slot], (
            f"slot {slot} has {arena.references(slot)} references, {owners[slot]} owners"
        )
