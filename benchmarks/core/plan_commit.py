"""What the scheduler costs: µs of plan and of commit, in decode steady state and in mixed traffic.

    python benchmarks/core/plan_commit.py [--steps 300]

The last lines compare 256 sequences in pools of 20,480 and of a million blocks, in turn by step.
No model runs: a stand-in answers every span that samples with one token. Figures are medians of
processor time, so that neighbours on the machine count little.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
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


def scheduler_for(sequences: int, blocks: int = 0) -> Scheduler:
    """One with 80 blocks a sequence, or as many as are asked for."""
    cache = PrefixCache(block_size=BLOCK_SIZE)
    manager = BlockManager(blocks=blocks or sequences * 80, block_size=BLOCK_SIZE, cache=cache)
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


def ratio_to_a_million(traffic: Callable[[Scheduler], Times], steps: int) -> float:
    """What a step costs in a pool of a million blocks, over what it costs in one of 20,480."""
    pools = [traffic(scheduler_for(256, blocks)) for blocks in (20_480, 1_000_000)]
    pairs = [[sum(next(times)) for times in pools] for _ in range(steps)]
    return statistics.median(many / few for few, many in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    print(
        f"{'traffic':8} {'sequences':>9} {'plan µs':>9} {'commit µs':>9} {'both µs':>9} {'each':>6}"
    )
    for name, traffic in (("decode", steady), ("mixed", mixed)):
        for sequences in SIZES:
            times = list(islice(traffic(scheduler_for(sequences)), steps))
            plan, commit, both = (
                statistics.median(column)
                for column in ([p for p, _ in times], [c for _, c in times], map(sum, times))
            )
            print(
                f"{name:8} {sequences:9} {plan:9.0f} {commit:9.0f} {both:9.0f}"
                f" {both / sequences:9.1f}"
            )
    for name, traffic in (("decode", steady), ("mixed", mixed)):
        ratio = ratio_to_a_million(traffic, steps)
        print(f"{name:8} {256:9} in a pool of a million blocks: {ratio:.2f} times the cost")


if __name__ == "__main__":
    main()
