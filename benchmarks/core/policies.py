"""The same overload under each policy: who is served in time, how long others wait, how fairly.

    python benchmarks/core/policies.py [--load 1.5] [--seconds 600] [--seed 1]

Virtual time: the real scheduler and block manager, and a runner that says how long each step takes
on this machine. Arrivals are open-loop: nobody waits for an answer before the next request comes.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from octavo.core.budget import Limits
from octavo.core.calls import CoreSetup
from octavo.core.events import Finished, Receipt, Refused
from octavo.core.fairness import ANSWER_WEIGHT, PROMPT_WEIGHT
from octavo.core.request import Request
from octavo.core.setup import scheduler_of
from octavo.simulate.cost import STOP, Cost, CostRunner

COST = Cost(base_s=0.020, token_s=0.0045)
"""SmolLM2-135M on two cores: 64 decodes a step take 0.31 s, which is W1's 200 tokens/s."""
TTFT_TARGET_S = 6.0
TPOT_TARGET_S = 0.200
LIMITS = Limits(
    sequences=64,
    tokens=512,
    watermark_blocks=10,
    aging_s=300.0,
    ttft_target_s=TTFT_TARGET_S,
    tpot_target_s=TPOT_TARGET_S,
)
BLOCKS = 1000
"""16,000 tokens: about forty of these requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    at_s: float
    request: Request
    answer: int


@dataclass(slots=True)
class Outcome:
    """What became of one run."""

    requests: dict[str, Request]
    receipts: dict[str, Receipt] = field(default_factory=dict)
    service: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Weighted tokens each tenant got while requests came."""
    preemptions: int = 0


def arrivals(load: float, seconds: float, random: Random) -> list[Arrival]:
    """A flood in bursts of half the load, and three tenants that each bring a sixth of it.

    One request in four is of high priority. Load 1 is what the engine can compute.
    """
    rate = load * capacity(random)
    found: list[Arrival] = []
    for tenant, share, burst in (
        ("flood", 1 / 2, 4),
        ("a", 1 / 6, 1),
        ("b", 1 / 6, 1),
        ("c", 1 / 6, 1),
    ):
        at_s = 0.0
        while (at_s := at_s + random.expovariate(rate * share / burst)) < seconds:
            for _ in range(random.randint(1, 2 * burst - 1)):
                prompt, answer = lengths(random)
                number = len(found)
                request = Request(
                    id=f"{tenant}{number}",
                    prompt=tuple(random.choices(range(2, 40_000), k=prompt)),
                    max_tokens=512,
                    stop_token_ids=frozenset({STOP}),
                    priority=0 if random.random() < 0.25 else 1,
                    tenant=tenant,
                )
                found.append(Arrival(at_s=at_s, request=request, answer=answer))
    return sorted(found, key=lambda one: one.at_s)


def lengths(random: Random) -> tuple[int, int]:
    """Prompt and answer tokens of a chat: many short ones, few long ones."""
    prompt = min(1024, max(16, round(random.lognormvariate(5.2, 0.8))))
    answer = min(512, max(4, round(random.lognormvariate(4.3, 0.7))))
    return prompt, answer


def capacity(random: Random) -> float:
    """Requests a second that the engine computes when steps hold 30 tokens."""
    sizes = [sum(lengths(random)) for _ in range(5000)]
    return 30 / COST.seconds(30) / statistics.fmean(sizes)


def serve(limits: Limits, incoming: Sequence[Arrival], seconds: float) -> Outcome:
    scheduler = scheduler_of(CoreSetup(blocks=BLOCKS, block_size=16, limits=limits))
    runner = CostRunner(COST, {one.request.id: one.answer for one in incoming})
    outcome = Outcome({one.request.id: one.request for one in incoming})
    coming = list(reversed(incoming))
    while coming or not scheduler.idle:
        if scheduler.idle:
            runner.now = max(runner.now, coming[-1].at_s)
        while coming and coming[-1].at_s <= runner.now:
            one = coming.pop()
            refused = scheduler.submit(one.request, one.at_s)
            assert not refused, refused
        plan = scheduler.plan(runner.now)
        assert plan is not None
        for event in scheduler.commit(plan, runner.execute(plan), runner.now):
            assert not isinstance(event, Refused)
            tenant = outcome.requests[event.request_id].tenant
            if isinstance(event, Finished):
                outcome.receipts[event.request_id] = event.receipt
            elif runner.now <= seconds:
                outcome.service[tenant] += ANSWER_WEIGHT
                if event.index == 0:
                    prompt = len(outcome.requests[event.request_id].prompt)
                    outcome.service[tenant] += PROMPT_WEIGHT * prompt
    outcome.preemptions = scheduler.counters.preemptions
    return outcome


def row(name: str, outcome: Outcome, seconds: float) -> str:
    receipts = outcome.receipts.values()
    ttfts = sorted(ttft(one) for one in receipts)
    tpots = sorted(tpot(one) for one in receipts)
    good = sum(ttft(one) <= TTFT_TARGET_S and tpot(one) <= TPOT_TARGET_S for one in receipts)
    high = [
        ttft(one) <= TTFT_TARGET_S and tpot(one) <= TPOT_TARGET_S
        for name, one in outcome.receipts.items()
        if outcome.requests[name].priority == 0
    ]
    service = list(outcome.service.values())
    return (
        f"{name:16} {len(ttfts):6} {60 * good / seconds:8.1f} {100 * good / len(ttfts):5.0f} %"
        f" {100 * statistics.fmean(high):5.0f} %"
        f" {at(ttfts, 0.5):8.1f} {at(ttfts, 0.99):8.1f} {1e3 * at(tpots, 0.5):8.0f}"
        f" {1e3 * at(tpots, 0.99):8.0f} {outcome.preemptions:7} {jain(service):6.3f}"
        f" {sum(service) / seconds:7.0f}"
    )


def ttft(receipt: Receipt) -> float:
    assert receipt.first_token_s is not None
    return receipt.first_token_s - receipt.arrival_s


def tpot(receipt: Receipt) -> float:
    assert receipt.first_token_s is not None
    spans = receipt.completion_tokens - 1
    return (receipt.finished_s - receipt.first_token_s) / spans if spans else 0.0


def at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def jain(service: Sequence[float]) -> float:
    """1 when all got the same, 1 / n when one got all."""
    return sum(service) ** 2 / (len(service) * sum(one * one for one in service))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", type=float, default=1.5)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", nargs="+", default=["fcfs", "priority", "fair", "slo"])
    asked = parser.parse_args()
    incoming = arrivals(asked.load, asked.seconds, Random(asked.seed))
    print(
        f"{'policy':16} {'served':>6} {'good/min':>8} {'good':>7} {'high':>7} {'TTFT p50':>8}"
        f" {'p99 s':>8} {'TPOT p50':>8} {'p99 ms':>8} {'preempt':>7} {'Jain':>6} {'service':>7}"
    )
    for policy in asked.policy:
        outcome = serve(replace(LIMITS, policy=policy), incoming, asked.seconds)
        print(row(policy, outcome, asked.seconds), flush=True)


if __name__ == "__main__":
    main()
