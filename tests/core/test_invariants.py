"""The audit can fail: each book that is falsified is found."""

from collections.abc import Callable

import pytest
from tests.core.serving import Serving, Setup

from octavo.core.invariants import check, check_writes
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler

Falsify = Callable[[Scheduler], object]


def busy() -> Scheduler:
    """Two that run and share a prefix, one that waits, a cached prefix nobody owns."""
    serving = Serving(Setup(blocks=20, windows=(None, None), sequences=2))
    for name, start in (("gone", 60), ("one", 1), ("two", 1), ("waits", 30)):
        tokens = (*range(start, start + 9),)
        serving.submit(Request(id=name, prompt=tokens, max_tokens=1 if name == "gone" else 9))
        serving.step()
    check(serving.scheduler)
    return serving.scheduler


def lose_a_block(scheduler: Scheduler) -> None:
    scheduler.manager.pool._free.pop()


def free_an_owned_block(scheduler: Scheduler) -> None:
    scheduler.manager.pool._free.append(scheduler.running[0].tables[0][0])


def count_an_owner_twice(scheduler: Scheduler) -> None:
    scheduler.manager.pool._references[scheduler.running[0].tables[1][2]] += 1


def run_ahead(scheduler: Scheduler) -> None:
    scheduler.running[0].computed = scheduler.running[0].scheduled + 1


def share_a_row(scheduler: Scheduler) -> None:
    scheduler.running[0].row = scheduler.running[1].row


def cut_a_table(scheduler: Scheduler) -> None:
    table = scheduler.running[0].tables[1]
    scheduler.manager.pool.release(table._blocks.pop(), keep=False)


def grow_a_table_too_far(scheduler: Scheduler) -> None:
    taken = scheduler.manager.pool.take(1)
    scheduler.running[0].tables[0].grow(taken.blocks)


def own_while_waiting(scheduler: Scheduler) -> None:
    scheduler.waiting[0].tables[0].grow((0,))


def publish_what_is_written_in_the_second_group(scheduler: Scheduler) -> None:
    manager, sequence = scheduler.manager, scheduler.running[0]
    manager.cache._by_block[sequence.tables[1][2]] = (sequence.prefixes[0], 1)


def disagree_about_a_prefix(scheduler: Scheduler) -> None:
    cache = scheduler.manager.cache
    block = next(iter(cache.published()))
    node, group = cache.published()[block]
    node.blocks[group] = block + 1


def cache_what_is_published_nowhere(scheduler: Scheduler) -> None:
    pool = scheduler.manager.pool
    pool._cached[pool._free.pop()] = None


def share_the_next_block_but_one(scheduler: Scheduler) -> None:
    """Only the block that holds the next position may have two owners."""
    one, two = scheduler.running
    taken = scheduler.manager.pool.take(2)
    for sequence, block in ((one, taken.blocks[0]), (two, taken.blocks[1])):
        sequence.tokens += range(8)
        sequence.tables[0].grow((block,))
    scheduler.manager.pool.share(two.tables[0].replace(3, one.tables[0][3]))


def hold_a_sibling_that_owns(scheduler: Scheduler) -> None:
    request = Request(id="new", prompt=(1, 2), max_tokens=1, branches=3)
    scheduler.submit(request, 0.0)
    assert len(scheduler.held) == 2
    scheduler.held[1].row = 5


@pytest.mark.parametrize(
    "falsify",
    [
        lose_a_block,
        free_an_owned_block,
        count_an_owner_twice,
        run_ahead,
        share_a_row,
        cut_a_table,
        grow_a_table_too_far,
        own_while_waiting,
        publish_what_is_written_in_the_second_group,
        disagree_about_a_prefix,
        cache_what_is_published_nowhere,
        share_the_next_block_but_one,
        hold_a_sibling_that_owns,
    ],
)
def test_a_falsified_book_is_found(falsify: Falsify) -> None:
    scheduler = busy()
    falsify(scheduler)
    with pytest.raises(AssertionError):
        check(scheduler)


def test_a_plan_that_writes_to_what_others_own_or_find_is_found() -> None:
    scheduler = busy()
    plan = scheduler.plan(9.0)
    assert plan is not None
    check_writes(scheduler, plan)
    sequence = scheduler.running[0]
    block = sequence.tables[1][plan.spans[0].start // 4]
    scheduler.manager.pool.share(block)
    with pytest.raises(AssertionError, match="shared"):
        check_writes(scheduler, plan)
    scheduler.manager.pool.release(block, keep=False)
    scheduler.manager.cache._by_block[block] = (sequence.prefixes[0], 1)
    with pytest.raises(AssertionError, match="published"):
        check_writes(scheduler, plan)
