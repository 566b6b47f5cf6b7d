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
        sequence.length += 8
        sequence.demand += 7
        sequence.tables[0].grow((block,))
    shared = one.tables[0][3]
    scheduler.manager.pool.release(two.tables[0].replace(3, shared), keep=False)
    scheduler.manager.pool.share(shared)


def hold_a_sibling_that_owns(scheduler: Scheduler) -> None:
    request = Request(id="new", prompt=(1, 2), max_tokens=1, branches=3)
    scheduler.submit(request, 0.0)
    assert len(scheduler.held) == 2
    scheduler.held[1].row = 5


def demand_too_much(scheduler: Scheduler) -> None:
    scheduler.running[0].demand += 1


def step_over_a_full_block(scheduler: Scheduler) -> None:
    sequence = scheduler.running[0]
    sequence.next_event = sequence.computed // 4 * 4 + 5


def step_over_the_end(scheduler: Scheduler) -> None:
    sequence = scheduler.running[0]
    sequence.next_event = sequence.last_position + 1


def step_over_a_sibling(scheduler: Scheduler) -> None:
    sequence = scheduler.running[1]
    sequence.common = sequence.computed


def step_over_a_pin(scheduler: Scheduler) -> None:
    scheduler.running[1].pinned = -1


def step_while_waiting(scheduler: Scheduler) -> None:
    scheduler.waiting[0].next_event = 3


@pytest.mark.parametrize(
    ("falsify", "found"),
    [
        (lose_a_block, "not a partition"),
        (free_an_owned_block, "not a partition"),
        (count_an_owner_twice, "2 references, 1 owners"),
        (run_ahead, "^one"),
        (share_a_row, "rows"),
        (cut_a_table, "table too short"),
        (grow_a_table_too_far, "table too long"),
        (own_while_waiting, "waits and owns"),
        (publish_what_is_written_in_the_second_group, "and its prefix disagree"),
        (disagree_about_a_prefix, "and its prefix disagree"),
        (cache_what_is_published_nowhere, "published nowhere"),
        (share_the_next_block_but_one, "is shared and written to"),
        (hold_a_sibling_that_owns, "waits and has a row"),
        (demand_too_much, "demand"),
        (step_over_a_full_block, "a block is filled"),
        (step_over_the_end, "end"),
        (step_over_a_sibling, "a sibling may be due"),
        (step_over_a_pin, "a pin may be due"),
        (step_while_waiting, "is said to step on"),
    ],
)
def test_a_falsified_book_is_found(falsify: Falsify, found: str) -> None:
    scheduler = busy()
    falsify(scheduler)
    with pytest.raises(AssertionError, match=found):
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
