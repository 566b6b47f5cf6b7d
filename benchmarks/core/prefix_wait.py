"""Equal beginnings that arrive together: compute twice, always wait, or wait when it is worth it.

    python benchmarks/core/prefix_wait.py

Virtual time: a step takes a base and so much a token. Bursts of requests that begin alike, beside
nothing else; ratios to computing twice, of TTFT (mean and p99), time to the end, tokens computed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from statistics import mean

from octavo.core import policy
from octavo.core.budget import Limits
from octavo.core.calls import CoreSetup
from octavo.core.events import Finished, Receipt
from octavo.core.plan import Sampled, StepResult
from octavo.core.request import Request
from octavo.core.setup import scheduler_of

RULES: dict[str, Callable[..., bool]] = {
    "twice": lambda *_: False,
    "always": lambda alike, *_: alike > 0,
    "worth it": policy.worth_following,
}
MACHINES = {
    "CPU, 0.1 B: 8 ms + 0.6 ms a token": (0.008, 0.0006),
    "CPU, 8 B: 400 ms + 8 ms a token": (0.4, 0.008),
    "GPU: 10 ms + 0.02 ms a token": (0.01, 0.00002),
}
BURSTS = ((1024, 50, 8), (480, 20, 2), (256, 50, 8), (64, 50, 8), (32, 200, 4), (16, 200, 2))
"""Tokens alike, tokens of each one's own, requests."""


@dataclass(frozen=True, slots=True)
class Outcome:
    ttft_s: float
    p99_s: float
    end_s: float
    tokens: int


def arrivals(alike: int, own: int, count: int) -> Iterator[tuple[float, Request]]:
    """Others first, from which the pace is learned; then a burst each four seconds."""
    random = Random(1)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(random.choices(range(9000), k=number))

    for number in range(12):
        prompt = tokens(random.randint(20, 400))
        yield 0.05 * number, Request(id=f"w{number}", prompt=prompt, max_tokens=16)
    for burst in range(6):
        start = tokens(alike)
        for number in range(count):
            name = f"{burst}-{number}"
            yield 5.0 + 4.0 * burst, Request(id=name, prompt=start + tokens(own), max_tokens=16)


def serve(base_s: float, token_s: float, coming: list[tuple[float, Request]]) -> Outcome:
    limits = Limits(sequences=64, tokens=512)
    scheduler = scheduler_of(CoreSetup(blocks=4000, block_size=16, limits=limits))
    receipts: list[Receipt] = []
    now = 0.0
    while coming or not scheduler.idle:
        while coming and coming[0][0] <= now:
            at_s, request = coming.pop(0)
            scheduler.submit(request, at_s)
        plan = scheduler.plan(now)
        if plan is None:
            now = coming[0][0]
            continue
        now += base_s + token_s * sum(span.stop - span.start for span in plan.spans)
        drawn = tuple(Sampled(span.row, 1, 0.0) for span in plan.spans if span.samples)
        for event in scheduler.commit(plan, StepResult(plan.id, drawn), now):
            if isinstance(event, Finished) and not event.request_id.startswith("w"):
                receipts.append(event.receipt)
    waits = sorted((r.first_token_s or now) - r.arrival_s for r in receipts)
    return Outcome(
        mean(waits),
        waits[int(0.99 * len(waits))],
        mean(r.finished_s - r.arrival_s for r in receipts),
        scheduler.counters.tokens_computed,
    )


def main() -> None:
    for machine, (base_s, token_s) in MACHINES.items():
        print(machine)
        for burst in BURSTS:
            outcomes = {}
            for name, rule in RULES.items():
                policy.worth_following = rule
                outcomes[name] = serve(base_s, token_s, list(arrivals(*burst)))
            twice = outcomes.pop("twice")
            print("  {:5} alike + {:3} own, {}:".format(*burst), end="")
            for name, one in outcomes.items():
                print(
                    f"   {name}: TTFT {one.ttft_s / twice.ttft_s:.2f} p99"
                    f" {one.p99_s / twice.p99_s:.2f} end {one.end_s / twice.end_s:.2f}"
                    f" tokens {one.tokens / twice.tokens:.2f}",
                    end="",
                )
            print()


if __name__ == "__main__":
    main()
