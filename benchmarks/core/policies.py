"""The same overload under each policy, and the same crowd under each rule of admission.

    python benchmarks/core/policies.py [--load 1.5] [--seconds 1200] [--seed 1]

Virtual time: the real scheduler and block manager, and a runner that says how long each step takes
on this machine. Arrivals are open-loop: nobody waits for an answer before the next request comes.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import get_args

from octavo.core.budget import AdmissionRule, Limits, Policy
from octavo.core.calls import CoreSetup
from octavo.core.events import Finished, Receipt, Refused
from octavo.core.fairness import ANSWER_WEIGHT, PROMPT_WEIGHT
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.setup import scheduler_of
from octavo.simulate.cost import STOP, Cost, CostRunner

COST = Cost(base_s=0.020, token_s=0.0045)
"""SmolLM2-135M on two cores: 64 decodes a step take 0.31 s, which is W1's 200 tokens/s."""
STEP_TOKENS = 40
"""Of a step that lasts as long as the TPOT target; load 1 is what steps of this size compute."""
LIMITS = Limits(sequences=64, tokens=512, aging_s=300.0, ttft_target_s=6.0, tpot_target_s=0.200)
BLOCKS = 1000
"""16,000 tokens: about forty of these requests."""
FEW_BLOCKS = 400
WATERMARKS = (0.0, 0.01, 0.05)
"""Shares of the pool."""
CROWD = 400
"""Requests that all come at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    at_s: float
    request: Request
    answer: int


@dataclass(slots=True)
class Outcome:
    """What became of one run."""

    scheduler: Scheduler
    requests: dict[str, Request]
    demand: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Weighted tokens each tenant asked for."""
    receipts: dict[str, Receipt] = field(default_factory=dict)
    service: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Weighted tokens each tenant got while requests came."""
    owned: list[float] = field(default_factory=list)
    """The share of the pool that sequences own, at each step."""
    ended_s: float = 0.0


def arrivals(load: float, seconds: float, random: Random) -> list[Arrival]:
    """A flood in bursts of half the load, and three tenants that each bring a sixth of it.

    One request in eight is of high priority. Load 1 is what the engine can compute.
    """
    rate = load * capacity(random)
    found: list[Arrival] = []
    for tenant, share, burst in (("flood", 3, 4), ("a", 1, 1), ("b", 1, 1), ("c", 1, 1)):
        at_s = 0.0
        while (at_s := at_s + random.expovariate(rate * share / 6 / burst)) < seconds:
            for _ in range(random.randint(1, 2 * burst - 1)):
                found.append(arrival(at_s, f"{tenant}{len(found)}", tenant, random))
    return sorted(found, key=lambda one: one.at_s)


def arrival(at_s: float, name: str, tenant: str, random: Random) -> Arrival:
    prompt, answer = lengths(random)
    request = Request(
        id=name,
        prompt=tuple(random.choices(range(2, 40_000), k=prompt)),
        max_tokens=512,
        stop_token_ids=frozenset({STOP}),
        priority=0 if random.random() < 0.125 else 1,
        tenant=tenant,
    )
    return Arrival(at_s=at_s, request=request, answer=answer)


def lengths(random: Random) -> tuple[int, int]:
    """Prompt and answer tokens of a chat: many short ones, few long ones."""
    prompt = min(1024, max(16, round(random.lognormvariate(5.2, 0.8))))
    answer = min(512, max(4, round(random.lognormvariate(4.3, 0.7))))
    return prompt, answer


def capacity(random: Random) -> float:
    """Requests a second that the engine computes."""
    sizes = [sum(lengths(random)) for _ in range(5000)]
    return STEP_TOKENS / COST.seconds(STEP_TOKENS) / statistics.fmean(sizes)


def serve(limits: Limits, incoming: Sequence[Arrival], seconds: float, blocks: int) -> Outcome:
    scheduler = scheduler_of(CoreSetup(blocks=blocks, block_size=16, limits=limits))
    runner = CostRunner(COST, {one.request.id: one.answer for one in incoming})
    outcome = Outcome(scheduler, {one.request.id: one.request for one in incoming})
    for one in incoming:
        asked = PROMPT_WEIGHT * len(one.request.prompt) + ANSWER_WEIGHT * one.answer
        outcome.demand[one.request.tenant] += asked
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
        outcome.owned.append(scheduler.manager.pool.owned / blocks)
        for event in scheduler.commit(plan, runner.execute(plan), runner.now):
            assert not isinstance(event, Refused)
            if isinstance(event, Finished):
                outcome.receipts[event.request_id] = event.receipt
            elif runner.now <= seconds:
                request = outcome.requests[event.request_id]
                served = 0 if event.number else PROMPT_WEIGHT * len(request.prompt)
                outcome.service[request.tenant] += ANSWER_WEIGHT + served
    outcome.ended_s = runner.now
    return outcome


def ttft(receipt: Receipt) -> float:
    assert receipt.first_token_s is not None
    return receipt.first_token_s - receipt.arrival_s


def tpot(receipt: Receipt) -> float:
    assert receipt.first_token_s is not None
    gaps = receipt.completion_tokens - 1
    return (receipt.finished_s - receipt.first_token_s) / gaps if gaps else 0.0


def is_good(receipt: Receipt) -> bool:
    ttft_s, tpot_s = LIMITS.ttft_target_s, LIMITS.tpot_target_s
    assert ttft_s is not None
    assert tpot_s is not None
    return ttft(receipt) <= ttft_s and tpot(receipt) <= tpot_s


def at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def fairness(service: Mapping[str, float], demand: Mapping[str, float]) -> float:
    """Jain's index of what each tenant got of its max-min fair share of what all got: 1 when each
    got the same part, 1 / n when one got all."""
    shares, left = {}, sum(service.values())
    for rank, tenant in enumerate(sorted(demand, key=lambda one: demand[one])):
        shares[tenant] = min(demand[tenant], left / (len(demand) - rank))
        left -= shares[tenant]
    parts = [service[tenant] / shares[tenant] for tenant in demand]
    return sum(parts) ** 2 / (len(parts) * sum(part * part for part in parts))


def policy_row(outcome: Outcome, seconds: float) -> list[str]:
    receipts = list(outcome.receipts.values())
    good = [name for name, one in outcome.receipts.items() if is_good(one)]
    high = [name for name, one in outcome.requests.items() if one.priority == 0]
    ttfts, tpots = [ttft(one) for one in receipts], [1e3 * tpot(one) for one in receipts]
    return [
        f"{60 * len(good) / seconds:.1f}",
        f"{100 * len(good) / len(receipts):.0f} %",
        f"{100 * len({*good} & {*high}) / len(high):.0f} %",
        f"{at(ttfts, 0.5):.1f}",
        f"{at(ttfts, 0.99):.0f}",
        f"{at(tpots, 0.5):.0f}",
        f"{at(tpots, 0.99):.0f}",
        f"{outcome.scheduler.counters.preemptions}",
        f"{fairness(outcome.service, outcome.demand):.3f}",
    ]


def admission_row(outcome: Outcome) -> list[str]:
    counters = outcome.scheduler.counters
    return [
        f"{counters.preemptions}",
        f"{counters.tokens_recomputed:,}",
        f"{100 * statistics.median(outcome.owned):.0f} %",
        f"{counters.tokens_sampled / outcome.ended_s:.1f}",
        f"{outcome.ended_s:.0f}",
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", type=float, default=1.5)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    incoming = arrivals(asked.load, asked.seconds, Random(asked.seed))
    rows = []
    for policy in get_args(Policy):
        limits = replace(LIMITS, policy=policy, watermark_blocks=BLOCKS // 100)
        outcome = serve(limits, incoming, asked.seconds, BLOCKS)
        rows.append([policy, *policy_row(outcome, asked.seconds)])
    print(f"{len(incoming)} requests in {asked.seconds:g} s, {asked.load:g} times the capacity\n")
    head = "policy, good/min, good, of high priority, TTFT p50 s, p99, TPOT p50 ms, p99"
    print(table([*head.split(", "), "preemptions", "fairness"], rows))
    crowd = [replace(one, at_s=0.0) for one in incoming[:CROWD]]
    rows = []
    for rule in get_args(AdmissionRule):
        for share in WATERMARKS if rule == "full" else (0.01,):
            watermark = int(share * FEW_BLOCKS)
            limits = replace(LIMITS, policy="fcfs", admission=rule, watermark_blocks=watermark)
            outcome = serve(limits, crowd, asked.seconds, FEW_BLOCKS)
            rows.append([rule, f"{share:.0%}", *admission_row(outcome)])
    print(f"\n{len(crowd)} requests at once, {16 * FEW_BLOCKS:,} tokens of KV\n")
    head = "admission, watermark, preemptions, recomputed tokens, pool owned, tokens/s, seconds"
    print(table(head.split(", "), rows))


if __name__ == "__main__":
    main()
