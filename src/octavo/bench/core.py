"""What the scheduler costs: µs of plan and of commit, in decode steady state and in mixed traffic.

No model runs: a stand-in answers every span that samples with one token. Figures are medians of
processor time, so that neighbours on the machine count little. What Python itself takes is measured
in the same run: a slow machine, or a slow minute of it, shows there.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from octavo.core.block_manager import BlockManager
from octavo.core.budget import Limits
from octavo.core.plan import Sampled, StepPlan, StepResult
from octavo.core.prefix_cache import PrefixCache
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler

BLOCK_SIZE = 16
SIZES = (64, 256, 1024)
LEAST_BLOCKS = 1300
"""Of a prompt of 600 tokens and an answer of 20,000."""
FEW_BLOCKS, MANY_BLOCKS = 20_480, 1_000_000


def scheduler_for(sequences: int, blocks: int = 0) -> Scheduler:
    """One with 80 blocks a sequence, but room for any request; or as many as are asked for."""
    cache = PrefixCache(block_size=BLOCK_SIZE)
    manager = BlockManager(
        blocks=blocks or max(80 * sequences, LEAST_BLOCKS), block_size=BLOCK_SIZE, cache=cache
    )
    return Scheduler(manager, Limits(sequences=sequences, tokens=sequences + 512))


def requests(random: Random, answer: int) -> Iterator[Request]:
    """Prompts of 200 to 600 tokens, half of them after one of four preambles of 300."""
    preambles = [tuple(random.choices(range(40_000), k=300)) for _ in range(4)]
    number = 0
    while True:
        tail = tuple(random.choices(range(40_000), k=random.randint(200, 300)))
        prompt = random.choice(preambles) + tail if random.random() < 0.5 else tail
        yield Request(id=str(number), prompt=prompt, max_tokens=random.randint(answer, 2 * answer))
        number += 1


def answered(plan: StepPlan) -> StepResult:
    return StepResult(plan.id, tuple(Sampled(s.row, 7, -0.5) for s in plan.spans if s.samples))


def timed_step(scheduler: Scheduler, now: float) -> tuple[float, float]:
    """Microseconds of one plan and of its commit."""
    start = time.process_time()
    plan = scheduler.plan(now)
    planned = time.process_time()
    assert plan is not None
    result = answered(plan)
    received = time.process_time()
    scheduler.commit(plan, result, now)
    return 1e6 * (planned - start), 1e6 * (time.process_time() - received)


Times = Iterator[tuple[float, float]]
"""Of plan and of commit, a step each, without end."""


def steady(scheduler: Scheduler) -> Times:
    """Every sequence decodes; nobody comes or goes."""
    sequences, wanted = scheduler.limits.sequences, requests(Random(1), 10_000)
    for _ in range(sequences):
        scheduler.submit(next(wanted), 0.0)
    while len(scheduler.running) < sequences or any(s.demand > 1 for s in scheduler.running):
        timed_step(scheduler, 0.0)
    for step in count():
        yield timed_step(scheduler, float(step))


def mixed(scheduler: Scheduler) -> Times:
    """Short answers: a full house, in which prompts are chunked beside decodes and prefixes hit."""
    wanted = requests(Random(2), 60)
    for step in count():
        while len(scheduler.waiting) < 8:
            scheduler.submit(next(wanted), float(step))
        times = timed_step(scheduler, float(step))
        if step >= 200:
            yield times


Traffic = Callable[[Scheduler], Times]
TRAFFIC: dict[str, Traffic] = {"decode": steady, "mixed": mixed}


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRow:
    """Medians of one run. Units: microseconds of processor time a step; `each_us` a sequence."""

    traffic: str
    sequences: int
    plan_us: float
    commit_us: float
    both_us: float
    each_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """`times` what a step costs in a pool of `many` blocks, over what it costs in one of `few`."""

    traffic: str
    sequences: int
    few: int
    many: int
    times: float


@dataclass(slots=True)
class Visited:
    """What a plan must look at in each sequence, at the least."""

    computed: int
    length: int


def object_ns(objects: int = 1024, rounds: int = 200) -> float:
    """Nanoseconds that Python takes here to visit one object: two attributes are read and compared,
    the object is appended to a list. Median of so many rounds, processor time.

    No plan that looks at each sequence takes less for one: `each_us` of a `CoreRow` is a number of
    such visits.
    """
    visited = [Visited(number, number + 1) for number in range(objects)]
    times = []
    for _ in range(rounds):
        found: list[Visited] = []
        started = time.process_time_ns()
        for one in visited:
            if one.computed < one.length:
                found.append(one)
        times.append(time.process_time_ns() - started)
        assert len(found) == objects
    return statistics.median(times) / objects


def measure_sizes(sizes: Sequence[int], steps: int) -> list[CoreRow]:
    """Both kinds of traffic with so many sequences at once."""
    return [
        _row(name, traffic, sequences, steps)
        for name, traffic in TRAFFIC.items()
        for sequences in sizes
    ]


def measure_pools(sequences: int, few: int, many: int, steps: int) -> list[PoolRow]:
    """The same traffic in a small and in a large pool, in turn by step."""
    rows = []
    for name, traffic in TRAFFIC.items():
        pools = [traffic(scheduler_for(sequences, blocks)) for blocks in (few, many)]
        pairs = [[sum(next(times)) for times in pools] for _ in range(steps)]
        times = statistics.median(large / small for small, large in pairs)
        rows.append(PoolRow(traffic=name, sequences=sequences, few=few, many=many, times=times))
    return rows


def _row(name: str, traffic: Traffic, sequences: int, steps: int) -> CoreRow:
    times = list(islice(traffic(scheduler_for(sequences)), steps))
    both_us = statistics.median(plan + commit for plan, commit in times)
    return CoreRow(
        traffic=name,
        sequences=sequences,
        plan_us=statistics.median(plan for plan, _ in times),
        commit_us=statistics.median(commit for _, commit in times),
        both_us=both_us,
        each_us=both_us / sequences,
    )
