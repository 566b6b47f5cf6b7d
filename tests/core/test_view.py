"""The view says what the books say: in random runs, block by block."""

from collections import Counter
from random import Random
from struct import unpack

import pytest
from tests.core.serving import Serving, Setup, pinning, random_follower, random_setup

from octavo.core.block_table import ABSENT
from octavo.core.request import Pin, Request
from octavo.core.scheduler import Scheduler
from octavo.core.view import (
    CACHED,
    FENCED,
    FREE,
    HELD,
    MOVING,
    OWNED,
    PINNED,
    SHARED,
    STATE_BITS,
    HoldView,
    SequenceView,
    cells,
    view_block,
    view_pool,
)

RUNS = 60
MOST = 1000


def expected_cells(scheduler: Scheduler) -> bytes:
    """From tables, holds and moves, one block at a time."""
    free, cached, _ = scheduler.manager.pool.states()
    sequences, holds = Counter(), Counter()
    for owners, counts in ((scheduler.running, sequences), (scheduler.holds, holds)):
        for owner in owners:
            counts.update(block for table in owner.tables for _, block in table.live())
    moving = {move.block for move in scheduler.moving if move.kind == "out"}
    pinned = {
        block
        for hold in scheduler.holds
        if hold not in scheduler.holds.sessions
        for block in hold.blocks()
    }
    told = []
    for block in range(scheduler.manager.pool.total):
        if block in free:
            state = FREE
        elif block in cached:
            state = CACHED
        elif sequences[block]:
            state = OWNED if sequences[block] == 1 else SHARED
        else:
            state = HELD if holds[block] else FENCED
        told.append(state | PINNED * (block in pinned) | MOVING * (block in moving))
    return bytes(told)


def tables_of(view: SequenceView | HoldView) -> list[list[int]]:
    return [
        [ABSENT] * table.first + list(unpack(f"<{len(table.blocks) // 4}i", table.blocks))
        for table in view.tables
    ]


def check_view(scheduler: Scheduler) -> Counter[int]:
    """Against the books; returns how many cells of each kind there are."""
    view, pool = view_pool(scheduler, most=MOST), scheduler.manager.pool
    assert view.cells == expected_cells(scheduler) == bytes(cells(scheduler))
    states = Counter(cell & STATE_BITS for cell in view.cells)
    assert sum(states.values()) == pool.total
    assert states[FREE] == pool.available - pool.cached
    assert states[CACHED] == pool.cached
    assert states[OWNED] + states[SHARED] == pool.owned - pool.yielding
    assert states[HELD] == pool.yielding
    assert states[FENCED] == pool.fenced
    assert sum(bool(cell & PINNED) for cell in view.cells) == scheduler.holds.pinned_blocks
    for shown, owners in ((view.running, scheduler.running), (view.holds, scheduler.holds)):
        own = {one.id: [list(table.blocks) for table in one.tables] for one in owners}
        assert {one.id: tables_of(one) for one in shown} == own
    waiting = {one.id for one in (*scheduler.waiting, *scheduler.held)}
    assert {one.id for one in view.waiting} == waiting
    assert not any(one.tables for one in view.waiting)
    assert view.waiting_total == len(waiting) == len(view.waiting)
    return Counter(view.cells)


def check_blocks(scheduler: Scheduler) -> None:
    """Each block has the owners that the tables say, and is evicted in its turn."""
    pool = scheduler.manager.pool
    cached = list(pool.books().cached)
    for block in range(pool.total):
        view = view_block(scheduler, block)
        assert len(view.owners) == pool.references(block) - pool.transfers(block)
        for owner in view.owners:
            names = {one.id: one for one in (*scheduler.running, *scheduler.holds)}
            assert names[owner.id].tables[owner.group][owner.index] == block
        assert view.epoch == pool.epoch(block)
        rank = view.evicted_after
        assert rank == (cached.index(block) if pool.is_cached(block) else None)
        cache = scheduler.manager.cache
        assert bool(view.key) == (cache is not None and cache.publishes(block))
        assert (view.prefix_tokens > 0) == bool(view.key)


def test_the_view_is_what_the_books_say(seed: int) -> None:
    random, seen = Random(seed), Counter()
    for _ in range(RUNS):
        run = Serving(random_setup(random))
        for number in range(random.randint(1, 10)):
            request = random_follower(random, run, f"r{number}")
            run.submit(pinning(random, request) if random.random() < 0.5 else request)
            for _ in range(random.randint(0, 4)):
                run.step()
                seen += check_view(run.scheduler)
            if random.random() < 0.2:
                check_blocks(run.scheduler)
        run.finish()
        seen += check_view(run.scheduler)
    states = {cell & STATE_BITS for cell in seen}
    assert states == {FREE, CACHED, OWNED, SHARED, HELD, FENCED}, "some state was never tried"
    assert any(cell & PINNED for cell in seen)
    assert any(cell & MOVING for cell in seen)


@pytest.mark.parametrize("more", [253, 254, 255, 300])
def test_a_block_of_very_many_owners(more: int) -> None:
    run = Serving(Setup())
    run.submit(Request(id="a", prompt=(1, 2, 3, 4, 5), max_tokens=2))
    run.step()
    [table] = run.scheduler.running[0].tables
    shared, own = table.blocks
    for _ in range(more):
        run.scheduler.manager.pool.share(shared)
    assert cells(run.scheduler)[shared] == SHARED
    assert cells(run.scheduler)[own] == OWNED


def test_only_the_foremost_are_listed() -> None:
    run = Serving(Setup(sequences=1))
    for number, priority in enumerate((0, 5, -3, 0, 2)):
        run.submit(
            Request(
                id=f"r{number}", prompt=(number, 1), max_tokens=3, priority=priority, branches=2
            )
        )
    run.step()
    view = view_pool(run.scheduler, most=3)
    assert [one.id for one in view.running] == ["r2"]
    assert [one.id for one in view.waiting] == ["r2#1", "r0", "r3"]
    assert view.waiting_total == 9
    everyone = view_pool(run.scheduler, most=MOST).waiting
    assert {one.id: one.behind for one in everyone if one.behind} == {
        f"r{number}#1": f"r{number}" for number in (0, 1, 3, 4)
    }


def test_a_pin_and_a_session_are_told_apart() -> None:
    run = Serving(Setup(pinned_blocks=8))
    prompt = tuple(range(1000, 1010))
    run.submit(Request(id="a", prompt=prompt, max_tokens=2, pins=(Pin(8, 60.0),), keep=True))
    run.finish()
    holds = {hold.kind: hold for hold in view_pool(run.scheduler, most=MOST).holds}
    assert holds["session"].id == "a"
    assert holds["session"].until_s is None
    assert holds["session"].tokens == 11
    assert holds["pin"].tokens == 8
    assert holds["pin"].until_s is not None
    [kept] = tables_of(holds["session"])
    assert [view_block(run.scheduler, block).cell for block in kept] == [
        HELD | PINNED,
        HELD | PINNED,
        HELD,
    ]
    kinds = [(owner.id, owner.kind) for owner in view_block(run.scheduler, kept[0]).owners]
    assert sorted(kinds) == [("a", "session"), (holds["pin"].id, "pin")]
