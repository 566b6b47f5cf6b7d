"""Metrics against a model that knows nothing of them but the log of what the core was told and
answered. What they count must also agree with itself."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

import pytest
from tests.core.serving import Setup, pinning, random_limits, random_request
from tests.observe.exposition import Samples, buckets_of, samples_of, value
from tests.observe.recording import Kept, core_setup, small_setup

from octavo.core.budget import Limits
from octavo.core.calls import Answer, Call, Commit, Plan, SetLimits, Submit
from octavo.core.events import Admitted, Evicted, Finished, Preempted, Refused, Token
from octavo.core.plan import Sampled, StepPlan
from octavo.core.request import Request
from octavo.core.setup import scheduler_of
from octavo.engine.engine import Engine
from octavo.observe.metrics import Facts, Metrics

MODEL_LENGTH = 40
WORLDS = 8


@dataclass
class World:
    """An engine of the oracle, books beside it as a server has them, and a log."""

    random: Random
    setup: Setup
    now: float = 0.0
    metrics: Metrics = field(default_factory=lambda: Metrics(Facts(max_model_len=MODEL_LENGTH)))
    log: Kept = field(default_factory=Kept)
    requests: dict[str, Request] = field(default_factory=dict)
    limits_at_end: dict[tuple[str, int], Limits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scheduler, self.oracle = scheduler_of(core_setup(self.setup)), self.setup.oracle()
        self.engine = Engine(scheduler, self.oracle, clock=self._clock, observers=[self.log])

    def _clock(self) -> float:
        self.now += self.random.choice([0.0, 0.001, 0.03, 2.0])
        return self.now

    def run(self) -> None:
        """Requests that come, are cancelled, refused, preempted and broken, until none is left."""
        random = self.random
        names = [f"r{number}" for number in range(random.randint(6, 20))]
        self.oracle.failing = {name: random.randint(1, 9) for name in names[::7]}
        for name in names:
            request = random_request(random, name)
            self.requests[name] = pinning(random, request) if random.random() < 0.2 else request
            self._count(self.engine.submit(self.requests[name]))
            for _ in range(random.randint(0, 3)):
                self._count(self.engine.step())
            self._look()
            if random.random() < 0.2:
                reason = random.choice(["abort", "stop"])
                self._count(self.engine.cancel(random.choice(names), reason=reason))
            if random.random() < 0.1:
                self.engine.flush()
            if random.random() < 0.2:
                limits = random_limits(random, self.setup)
                self.engine.change_limits(
                    {
                        name: limits[name]
                        for name in limits.keys() & {"policy", "admission", "preemption"}
                    }
                )
        while not self.engine.idle:
            self._count(self.engine.step())

    def _count(self, events: Iterable[object]) -> None:
        """As the front does: who went, and what failed, leaves no receipt."""
        limits = self.engine.scheduler.limits
        for event in events:
            if isinstance(event, Refused):
                self.metrics.refused(event.limit)
            elif isinstance(event, Finished):
                request = self.requests[event.request_id]
                self.limits_at_end[event.request_id, event.branch] = limits
                if event.reason in ("stop", "length"):
                    self.metrics.finished(event.reason, request, event.receipt, limits)
                else:
                    self.metrics.lost(event.reason, request, 1, limits)

    def _look(self) -> None:
        """Gauges are what is there, whenever somebody asks."""
        samples, scheduler = self.samples(), self.engine.scheduler
        check_names(samples)
        running = scheduler.running
        entries = sum(len(list(table.live())) for one in running for table in one.tables)
        waiting = len(scheduler.waiting) + len(scheduler.held)
        assert value(samples, "octavo_requests_running") == len(running)
        assert value(samples, "octavo_requests_waiting") == waiting
        assert value(samples, "octavo_kv_table_entries") == entries
        depth = entries / len(running) if running else 0.0
        assert value(samples, "octavo_kv_table_depth_blocks") == depth
        assert states(samples).total() == value(samples, "octavo_kv_blocks_total")

    def samples(self) -> Samples:
        return samples_of(self.metrics.render(self.engine.status()))


def states(samples: Samples) -> Counter[str]:
    return by_label(samples, "octavo_kv_blocks", "state")


def by_label(samples: Samples, name: str, label: str) -> Counter[str]:
    """The values of one name, summed by one label."""
    found: Counter[str] = Counter()
    for (sample, labels), number in samples.items():
        if sample == name:
            found[dict(labels)[label]] += int(number)
    return found


@dataclass
class Model:
    """What the log says, counted plainly: every value on its own, in lists."""

    counts: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    lists: dict[str, list[float]] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    admitted: dict[str, Admitted] = field(default_factory=dict)
    newest: dict[tuple[str, int], float] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    planned: float = 0.0
    positions: dict[int, int] = field(default_factory=dict)
    caching: bool = True

    def note(self, name: str, number: float) -> None:
        self.lists.setdefault(name, []).append(number)

    def hear(self, call: Call, answer: Answer) -> None:
        match call, answer:
            case Submit(now, request), _:
                self.requests.setdefault(request.id, request)
                self.arrived.setdefault(request.id, now)
            case Plan(now), StepPlan() as plan:
                self.planned = now
                self.plan(plan)
            case Commit(now, result), _:
                self.note("step_seconds", now - self.planned)
                drafted = sum(one.drafted for one in result.outcomes if isinstance(one, Sampled))
                self.counts["tokens_computed"] += drafted
                self.counts["tokens_drafted"] += drafted
                self.note("step_tokens", self.positions.pop(result.plan_id) + drafted)
        if isinstance(answer, tuple) and not isinstance(call, SetLimits):
            for event in answer:
                self.event(event, call.now)

    def plan(self, plan: StepPlan) -> None:
        positions = sum(span.stop - span.start for span in plan.spans)
        self.counts["steps"] += 1
        self.counts["tokens_computed"] += positions
        self.positions[plan.id] = positions
        for decision in plan.decisions:
            match decision:
                case Evicted():
                    self.counts["prefix_cache_evictions"] += 1
                case Preempted(mode=mode):
                    self.counts["preemptions"] += 1
                    self.counts["preemptions_swapped"] += mode == "swap"
                case Admitted(resumed=False) as admitted:
                    self.admit(admitted)

    def admit(self, admitted: Admitted) -> None:
        self.counts["admissions"] += 1
        self.admitted[admitted.request_id] = admitted
        first = "#" not in admitted.request_id
        looks = self.caching and first and admitted.parent is None
        if looks and self.requests[admitted.request_id].reads_cache:
            self.counts["prefix_cache_tokens_queried"] += admitted.tokens
            self.counts["prefix_cache_tokens_hit"] += admitted.cached_tokens

    def event(self, event: object, now: float) -> None:
        if isinstance(event, Token):
            self.token(event, now)
        elif isinstance(event, Finished):
            self.end(event)

    def token(self, token: Token, now: float) -> None:
        key, request = (token.request_id, token.branch), self.requests[token.request_id]
        self.counts["tokens_sampled"] += 1
        if key in self.newest:
            self.note("inter_token_seconds", now - self.newest[key])
        elif token.branch == request.sampling.branch:
            self.counts["tokens_prompt"] += len(request.prompt)
            found = self.admitted[token.request_id].cached_tokens
            self.counts["tokens_prompt_cached"] += min(found, len(request.prompt))
        self.newest[key] = now

    def end(self, event: Finished) -> None:
        request, receipt = self.requests[event.request_id], event.receipt
        self.ended[event.reason] += 1
        self.counts["tokens_recomputed"] += receipt.recomputed_tokens
        if event.reason not in ("stop", "length"):
            return
        arrived = self.arrived[event.request_id]
        self.counts["completion_tokens"] += receipt.completion_tokens
        self.note("request_completion_tokens", receipt.completion_tokens)
        self.note("request_seconds", receipt.finished_s - arrived)
        if receipt.first_token_s is not None:
            self.note("time_to_first_token_seconds", receipt.first_token_s - arrived)
        if receipt.completion_tokens > 1:
            assert receipt.first_token_s is not None
            each = (receipt.finished_s - receipt.first_token_s) / (receipt.completion_tokens - 1)
            self.note("time_per_output_token_seconds", each)
        if event.branch == request.sampling.branch:
            self.counts["prompt_tokens"] += len(request.prompt)
            self.note("request_prompt_tokens", len(request.prompt))
            self.note("request_branches", request.branches)
            self.note("request_max_tokens", request.max_tokens)


ALIASES = {
    "step_tokens": "iteration_tokens_total",
    "inter_token_seconds": "inter_token_latency_seconds",
    "request_seconds": "e2e_request_latency_seconds",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "request_completion_tokens": "request_generation_tokens",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_branches": "request_params_n",
    "request_max_tokens": "request_params_max_tokens",
}


def check_against(model: Model, samples: Samples) -> None:
    for name, count in model.counts.items():
        assert value(samples, f"octavo_{name}_total") == count, name
    reasons = by_label(samples, "octavo_requests_total", "finish_reason")
    assert +reasons == +model.ended
    assert +by_label(samples, "vllm:request_success_total", "finished_reason") == +model.ended
    for name, numbers in model.lists.items():
        for shown in (f"octavo_{name}", f"vllm:{ALIASES[name]}" if name in ALIASES else ""):
            if shown:
                check_histogram(samples, shown, numbers)


def check_histogram(samples: Samples, name: str, numbers: list[float]) -> None:
    buckets = buckets_of(samples, name)
    assert buckets[float("inf")] == len(numbers), name
    for bound, count in buckets.items():
        assert count == sum(number <= bound for number in numbers), (name, bound)
    (total,) = [v for (sample, _), v in samples.items() if sample == f"{name}_sum"]
    assert total == pytest.approx(sum(numbers)), name


def check_itself(samples: Samples) -> None:
    """Sums that must agree, whatever happened."""
    total = {name: number for (name, labels), number in samples.items() if not labels}
    assert total["octavo_step_seconds_count"] == total["octavo_steps_total"]
    assert total["octavo_step_tokens_count"] == total["octavo_steps_total"]
    assert total["octavo_step_tokens_sum"] == total["octavo_tokens_computed_total"]
    assert total["octavo_request_prompt_tokens_sum"] == total["octavo_prompt_tokens_total"]
    tokens = total["octavo_completion_tokens_total"]
    assert total["octavo_request_completion_tokens_sum"] == tokens
    assert tokens <= total["octavo_tokens_sampled_total"]
    cached = total["octavo_tokens_prompt_cached_total"]
    assert cached <= total["octavo_tokens_prompt_total"]
    assert (
        sum(by_label(samples, "vllm:prompt_tokens_by_source_total", "source").values())
        == (total["octavo_tokens_prompt_total"])
    )
    reasons = by_label(samples, "octavo_requests_total", "finish_reason")
    assert reasons["stop"] + reasons["length"] == total["octavo_request_seconds_count"]
    ended = by_label(samples, "octavo_tenant_requests_total", "finish_reason")
    assert +ended == +reasons
    for name in ("prompt_tokens", "completion_tokens"):
        shares = by_label(samples, f"octavo_tenant_{name}_total", "tenant")
        assert shares.total() == total[f"octavo_{name}_total"]
    verdicts = by_label(samples, "octavo_slo_answers_total", "verdict")
    assert +by_label(samples, "octavo_tenant_slo_answers_total", "verdict") == +verdicts
    if verdicts.total():
        assert total["octavo_goodput_ratio"] == verdicts["met"] / verdicts.total()
    assert total["octavo_metrics_errors_total"] == 0


def check_names(samples: Samples) -> None:
    """What has two names has one value."""
    values = {name: number for (name, _), number in samples.items()}
    for theirs, ours in SAME.items():
        assert values[f"vllm:{theirs}"] == values[f"octavo_{ours}"], theirs
    sources = by_label(samples, "vllm:prompt_tokens_by_source_total", "source")
    assert sources["local_cache_hit"] == values["octavo_tokens_prompt_cached_total"]


SAME = {
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "kv_cache_usage_perc": "kv_pool_occupancy",
    "num_preemptions_total": "preemptions_total",
    "prompt_tokens_total": "tokens_prompt_total",
    "prompt_tokens_cached_total": "tokens_prompt_cached_total",
    "generation_tokens_total": "tokens_sampled_total",
    "prefix_cache_queries_total": "prefix_cache_tokens_queried_total",
    "prefix_cache_hits_total": "prefix_cache_tokens_hit_total",
}


def check_rest(samples: Samples) -> None:
    for gauge in ("requests_running", "requests_waiting", "kv_table_entries", "swap_blocks_used"):
        assert value(samples, f"octavo_{gauge}") == 0, gauge
    at_rest = states(samples)
    assert at_rest["owned"] == at_rest["fenced"] == 0
    assert value(samples, "octavo_kv_pool_occupancy") == 0


@pytest.mark.parametrize("world", range(WORLDS))
def test_all_that_is_counted_is_what_the_log_says(world: int, seed: int) -> None:
    random = Random(f"{seed} {world}")
    one = World(random, small_setup(random))
    one.run()
    model = Model(caching=one.setup.cached)
    for call, answer in one.log.told:
        model.hear(call, answer)
    samples = one.samples()
    check_against(model, samples)
    check_itself(samples)
    check_names(samples)
    check_rest(samples)
