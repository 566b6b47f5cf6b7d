"""What watching costs: µs a step and bytes a step, of journal, lives and meter, in decode.

    python benchmarks/core/observers.py [--steps 300]

No model runs: a stand-in answers every span with a random token. Medians of processor time.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from random import Random

from octavo.core.budget import Limits
from octavo.core.calls import Commit, CoreSetup, Plan, Submit
from octavo.core.plan import Sampled, StepResult
from octavo.core.request import Request
from octavo.core.setup import scheduler_of
from octavo.engine.engine import Observer
from octavo.observe.journal import Journal
from octavo.observe.lives import Lives
from octavo.observe.meter import Meter

SIZES = (64, 256)


def setup_for(sequences: int) -> CoreSetup:
    limits = Limits(sequences=sequences, tokens=sequences * 64)
    return CoreSetup(blocks=sequences * 80, block_size=16, limits=limits)


def step_us(observer: Observer, sequences: int, steps: int) -> float:
    """The median cost of being told a plan and its commit."""
    random, scheduler = Random(1), scheduler_of(setup_for(sequences))
    for _ in range(sequences):
        prompt = tuple(random.choices(range(40_000), k=64))
        name = f"{random.getrandbits(128):032x}"
        submit = Submit(0.0, Request(id=name, prompt=prompt, max_tokens=1000))
        observer.observe(submit, scheduler.submit(submit.request, 0.0))
    times = []
    for step in range(1, steps + 1):
        now = step * 0.1
        plan = scheduler.plan(now)
        assert plan is not None
        outcomes = tuple(
            Sampled(span.row, random.randrange(40_000), -0.5) for span in plan.spans if span.samples
        )
        result = StepResult(plan.id, outcomes)
        events = scheduler.commit(plan, result, now)
        started = time.process_time()
        observer.observe(Plan(now), plan)
        observer.observe(Commit(now, result), events)
        times.append(1e6 * (time.process_time() - started))
    return statistics.median(times[10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    for sequences in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "journal"
            journal = Journal(path, setup_for(sequences), octavo="bench", started_at=0.0)
            journal_us = step_us(journal, sequences, steps)
            size = path.stat().st_size // steps
        lives_us = step_us(Lives(), sequences, steps)
        meter_us = step_us(Meter(), sequences, steps)
        print(
            f"{sequences:5} sequences: journal {journal_us:6.1f} µs and {size:,} bytes a step,"
            f" lives {lives_us:6.1f} µs, meter {meter_us:6.1f} µs"
        )


if __name__ == "__main__":
    main()
