"""What the scheduler costs: µs of plan and of commit, in decode steady state and in mixed traffic.

    python benchmarks/core/plan_commit.py [--steps 300]

No model runs: a stand-in answers every span that samples with one token. Figures are medians of
processor time, so that neighbours on the machine count little.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from random import Random

from octavo.core.block_manager import BlockManager
from octavo.core.budget import Limits
from octavo.core.plan import Sampled, StepPlan, StepResult
from octavo.core.prefix_cache import PrefixCache
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler

BLOCK_SIZE = 16
SIZES = (64, 256, 1024)


def scheduler_for(sequences: int) -> Scheduler:
    cache = PrefixCache(block_size=BLOCK_SIZE)
    manager = BlockManager(blocks=sequences * 80, block_size=BLOCK_SIZE, cache=cache)
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


def steady(sequences: int, steps: int) -> list[tuple[float, float]]:
    """Every sequence decodes; nobody comes or goes."""
    scheduler, wanted = scheduler_for(sequences), requests(Random(1), 10_000)
    for _ in range(sequences):
        scheduler.submit(next(wanted), 0.0)
    while len(scheduler.running) < sequences or any(s.demand > 1 for s in scheduler.running):
        timed_step(scheduler, 0.0)
    return [timed_step(scheduler, float(step)) for step in range(steps)]


def mixed(sequences: int, steps: int) -> list[tuple[float, float]]:
    """Short answers: a full house, in which prompts are chunked beside decodes and prefixes hit."""
    scheduler, wanted = scheduler_for(sequences), requests(Random(2), 60)
    times = []
    for step in range(steps + 200):
        while len(scheduler.waiting) < 8:
            scheduler.submit(next(wanted), float(step))
        times.append(timed_step(scheduler, float(step)))
    return times[200:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    print(
        f"{'traffic':8} {'sequences':>9} {'plan µs':>9} {'commit µs':>9} {'both µs':>9} {'each':>6}"
    )
    for name, traffic in (("decode", steady), ("mixed", mixed)):
        for sequences in SIZES:
            times = traffic(sequences, steps)
            plan, commit, both = (
                statistics.median(column)
                for column in ([p for p, _ in times], [c for _, c in times], map(sum, times))
            )
            print(
                f"{name:8} {sequences:9} {plan:9.0f} {commit:9.0f} {both:9.0f}"
                f" {both / sequences:9.1f}"
            )


if __name__ == "__main__":
    main()
