"""What a step costs does not depend on how many blocks there are: counted in lines, not in time.

What a line does inside C is not counted: so whoever walks over all blocks is stopped at once.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

import pytest

from octavo.core.block_manager import BlockManager
from octavo.core.block_pool import BlockPool, Taken
from octavo.core.budget import Limits
from octavo.core.plan import Sampled, StepResult
from octavo.core.prefix_cache import PrefixCache
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler

MILLION = 1_000_000


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of Python run."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def _walks(name: str) -> Callable[..., Any]:
    def refuses(*arguments: object) -> Any:
        raise AssertionError(f"{name} over all blocks")

    return refuses


class _Unwalked(list):
    """A list that gives and takes entries one by one."""

    def __getitem__(self, index: Any) -> Any:
        assert isinstance(index, int), "a slice of all blocks"
        return super().__getitem__(index)


class _UnwalkedDict(OrderedDict):
    """A mapping that is asked for one key at a time."""


for _name in ("__iter__", "__reversed__", "__contains__", "__add__", "__eq__", "__repr__", "copy"):
    setattr(_Unwalked, _name, _walks(_name))
for _name in ("index", "count", "remove", "insert", "sort", "reverse"):
    setattr(_Unwalked, _name, _walks(_name))
for _name in ("__iter__", "__reversed__", "__eq__", "__repr__", "copy", "keys", "values", "items"):
    setattr(_UnwalkedDict, _name, _walks(_name))


def unwalked(pool: BlockPool) -> BlockPool:
    """The same pool; it is an error to go through its blocks."""
    for name, held in vars(pool).items():
        if type(held) is list:
            setattr(pool, name, _Unwalked(held))
        elif type(held) is OrderedDict:
            setattr(pool, name, _UnwalkedDict(held))
    return pool


def serve(scheduler: Scheduler, requests: list[Request], steps: int) -> None:
    """A request a step comes, and all that run go on."""
    for step in range(steps):
        if requests:
            scheduler.submit(requests.pop(), float(step))
        plan = scheduler.plan(float(step))
        if plan is not None:
            drawn = tuple(Sampled(span.row, 7, 0.0) for span in plan.spans if span.samples)
            scheduler.commit(plan, StepResult(plan.id, drawn), float(step))


def requests_of(random: Random, count: int) -> list[Request]:
    """Half of them begin alike."""
    start = tuple(random.choices(range(1000), k=40))
    return [
        Request(
            id=str(number),
            prompt=start * random.randint(0, 1) + tuple(random.choices(range(1000), k=30)),
            max_tokens=random.randint(1, 30),
        )
        for number in range(count)
    ]


def lines_to_serve(seed: int, blocks: int, *, warm: int) -> int:
    """The lines of sixty steps, after `warm` steps more; no block is walked over meanwhile."""
    manager = BlockManager(blocks=blocks, block_size=4, cache=PrefixCache(block_size=4))
    unwalked(manager.pool)
    scheduler = Scheduler(manager, Limits(sequences=32, tokens=64))
    serve(scheduler, requests_of(Random(f"{seed} warm"), warm), warm)
    requests = [
        Request(id=f"{one.id}!", prompt=one.prompt, max_tokens=one.max_tokens)
        for one in requests_of(Random(seed), 40)
    ]
    return lines_of(lambda: serve(scheduler, requests, 60))


def test_a_step_costs_the_same_whatever_the_pool(seed: int) -> None:
    once, few, many = (lines_to_serve(seed, n, warm=0) for n in (2_000, 2_000, MILLION))
    assert few == many, f"the first time it was {once}"


def test_a_step_that_evicts_costs_the_same_however_much_is_cached(seed: int) -> None:
    """Both pools are full: each new block was another prompt's."""
    few, many = (lines_to_serve(seed, blocks, warm=blocks // 8) for blocks in (1_000, 4_000))
    assert many <= 1.1 * few


@pytest.mark.parametrize("cached", [False, True])
def test_a_block_is_handed_out_at_one_cost(cached: bool) -> None:
    def lines(blocks: int, count: int) -> int:
        pool = unwalked(BlockPool(blocks))
        if cached:
            taken = pool.take(blocks)
            assert isinstance(taken, Taken)
            for block in taken.blocks:
                pool.release(block, keep=True)
        return lines_of(lambda: pool.take(count))

    assert lines(10, 1) == lines(MILLION // 10, 1)
    one, two, nine = (lines(1_000, count) for count in (1, 2, 9))
    assert nine - one == 8 * (two - one)


def test_going_back_costs_the_same(seed: int) -> None:
    def lines(blocks: int, keep: bool) -> int:
        pool = unwalked(BlockPool(blocks))
        taken = pool.take(blocks)
        assert isinstance(taken, Taken)
        block = Random(seed).choice(taken.blocks)
        return lines_of(lambda: pool.release(block, keep=keep))

    for keep in (False, True):
        assert lines(10, keep) == lines(MILLION // 10, keep)


def test_walking_over_the_blocks_is_found() -> None:
    pool = unwalked(BlockPool(3))
    for walk in (pool.states, lambda: 2 in pool._free, lambda: pool._references[1:]):
        with pytest.raises(AssertionError, match="all blocks"):
            walk()


@pytest.mark.parametrize("blocks_each", [1, 3])
def test_looking_for_who_yields_costs_in_proportion_to_those_that_run(blocks_each: int) -> None:
    """All blocks are taken, half of them by a lower class, when one comes that needs `blocks_each`
    for each that runs: a half of those lower suffices, or all are not enough. It was tried with
    one more each time, and each time all their blocks were counted."""

    def lines(running: int) -> int:
        manager = BlockManager(blocks=4 * running, block_size=4)
        limits = Limits(sequences=running + 1, tokens=16 * running, watermark_blocks=0)
        scheduler = Scheduler(manager, limits)
        for number in range(running):
            one = Request(id=str(number), prompt=(7,) * 13, max_tokens=4, priority=number % 2)
            scheduler.submit(one, 0.0)
        serve(scheduler, [], 1)
        scheduler.submit(
            Request(id="high", prompt=(7,) * blocks_each * 4 * running, max_tokens=1), 1.0
        )
        count = lines_of(lambda: scheduler.plan(1.0))
        assert scheduler.counters.preemptions == (running // 4 if blocks_each == 1 else 0)
        return count

    assert lines(160) <= 2.5 * lines(80)
