"""Prometheus metrics of a server, under `octavo_…` and once more under vLLM's names.

    answers   what became of requests, counted when each ends
    status    what the engine says of itself, read when somebody asks
    meter     beside the engine: distributions of steps and tokens; they come with the status

Gauges are read from the state as it is when somebody asks; counters move when an answer ends or a
step is committed, and never fall. Nothing here raises into what it measures: a value that cannot be
counted (negative, not a number) is dropped and counted in `octavo_metrics_errors_total`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from octavo.core.budget import Limits
from octavo.core.events import FinishReason, Receipt
from octavo.core.request import Request
from octavo.observe import vllm
from octavo.observe.answers import Answers, distributions
from octavo.observe.histogram import Counted, cumulative
from octavo.observe.slo import VERDICTS
from octavo.observe.status import BLOCKS, DISTRIBUTIONS, GAUGES, TOTALS, Kept, Status, ratio
from octavo.observe.tenants import Spans, label_of

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What stays as it is while the server runs. `cache` describes the pool, for people."""

    model_name: str = "default"
    version: str = ""
    max_model_len: int = 4096
    cache: Mapping[str, str] = field(default_factory=dict)


class Metrics:
    """Counts what became of requests, and shows the engine's status beside it. Not thread-safe.

    Cost     20 µs an answer that ends; nothing a token; some milliseconds to render.
    """

    def __init__(self, facts: Facts | None = None) -> None:
        self.answers = Answers((facts or Facts()).max_model_len)
        self.kept = Kept()
        self._refused: Counter[str] = Counter()
        self._failures = 0
        self._registry = CollectorRegistry()
        self._registry.register(_Families(self, facts or Facts()))
        ProcessCollector(registry=self._registry)

    def finished(self, reason: str, request: Request, receipt: Receipt, limits: Limits) -> None:
        """One answer has ended as it should."""
        self._safely(lambda: self.answers.finished(reason, request, receipt, limits))

    def lost(self, reason: str, request: Request, answers: int, limits: Limits) -> None:
        """So many answers of an accepted request have ended without one."""
        self._safely(lambda: self.answers.lost(reason, request, answers, limits))

    def refused(self, code: str) -> None:
        """One request was turned away, for the reason `code`."""
        self._refused[code] += 1

    def take(self, status: Status) -> None:
        """Keep what the engine says of itself; all that is shown is what was kept last."""
        self._safely(lambda: self.kept.take(status))

    def render(self, status: Status) -> bytes:
        """All metrics in Prometheus' text format."""
        self.take(status)
        return generate_latest(self._registry)

    @property
    def refusals(self) -> Mapping[str, int]:
        return self._refused

    @property
    def errors(self) -> int:
        return self._failures + self.answers.dropped + self.kept.dropped

    def _safely(self, count: Callable[[], None]) -> None:
        try:
            count()
        except Exception:
            self._failures += 1
            logger.debug("something could not be counted", exc_info=True)


class _Families(Collector):
    """All metrics as they stand when they are asked for."""

    def __init__(self, metrics: Metrics, facts: Facts) -> None:
        self._metrics = metrics
        self._facts = facts
        self._distributions = distributions(facts.max_model_len)

    def collect(self) -> Iterator[Metric]:
        kept, answers = self._metrics.kept, self._metrics.answers
        yield from self._engine(kept)
        yield from self._ratios(kept, answers)
        yield from self._answers(answers)
        yield from self._tenants(answers)
        yield _info("octavo_info", "This server", self._identity())
        yield _info("octavo_cache_info", "The KV cache of this server", self._facts.cache)
        yield from vllm.families(
            kept,
            answers,
            self._distributions,
            model_name=label_of(self._facts.model_name),
            cache=self._facts.cache,
        )

    def _identity(self) -> Mapping[str, str]:
        return {"version": self._facts.version, "model_name": label_of(self._facts.model_name)}

    def _engine(self, kept: Kept) -> Iterator[Metric]:
        for one in GAUGES:
            yield _gauge(one.name, one.help, kept.gauges.get(one.field, 0))
        blocks = GaugeMetricFamily(
            "octavo_kv_blocks", "KV blocks by state now, of which each is in one", labels=["state"]
        )
        for one in BLOCKS:
            blocks.add_metric([one.name], kept.gauges.get(one.field, 0))
        yield blocks
        for one in TOTALS:
            yield _counter(one.name, one.help, kept.total(one.field))
        yield _counter("engine_restarts", "Times another engine took over", kept.restarts)
        yield _histogram(
            "step_seconds", "Plan of a step to its commit", kept.counted("step_s"), "step_s"
        )
        yield _histogram(
            "step_tokens",
            "Positions that a step computed, counted at commit",
            kept.counted("step_tokens"),
            "step_tokens",
        )
        yield _histogram(
            "inter_token_seconds",
            "Commit of one token of an answer to commit of its next",
            kept.counted("token_gaps_s"),
            "token_gaps_s",
        )

    def _ratios(self, kept: Kept, answers: Answers) -> Iterator[Metric]:
        gauges, verdicts = kept.gauges, answers.verdicts
        yield _gauge(
            "kv_pool_occupancy",
            "Share of the KV blocks that running answers hold, transfers among them; 0 of none",
            kept.occupancy,
        )
        yield _gauge(
            "kv_table_depth_blocks",
            "KV blocks in the tables of a running answer on average; 0 if none runs",
            ratio(gauges.get("table_entries", 0), gauges.get("running", 0)),
        )
        yield _gauge(
            "prefix_cache_hit_ratio",
            "Share of the tokens looked up in the prefix cache that were there; 0 of none",
            ratio(kept.total("prefix_tokens_hit"), kept.total("prefix_tokens_queried")),
        )
        yield _gauge(
            "preemption_ratio",
            "Preemptions for each answer admitted; 0 of none",
            ratio(kept.total("preemptions"), kept.total("admissions")),
        )
        yield _gauge(
            "goodput_ratio",
            "Share of the ended answers with targets that met them; 1 of none",
            ratio(verdicts["met"], verdicts.total(), of_nothing=1.0),
        )

    def _answers(self, answers: Answers) -> Iterator[Metric]:
        yield _labelled(
            "requests",
            "Answers of accepted requests by how they ended, each counted once",
            "finish_reason",
            {reason: answers.ended[reason] for reason in get_args(FinishReason)},
        )
        yield _labelled(
            "requests_refused",
            "Requests turned away, by the code of the error",
            "code",
            self._metrics.refusals,
        )
        yield _labelled(
            "slo_answers",
            "Answers with targets for TTFT or TPOT by how they fared, counted when they end",
            "verdict",
            {verdict: answers.verdicts[verdict] for verdict in VERDICTS},
        )
        yield _counter(
            "prompt_tokens",
            "Prompt tokens of requests, counted when their first answer ends",
            answers.prompt_tokens,
        )
        yield _counter(
            "completion_tokens",
            "Tokens of answers, counted when they end",
            answers.completion_tokens,
        )
        yield _counter(
            "metrics_errors",
            "Values that could not be counted, and were left out",
            self._metrics.errors,
        )
        for one in self._distributions:
            counted = answers.histograms[one.name].counted()
            family = HistogramMetricFamily(f"octavo_{one.name}", one.help)
            family.add_metric([], cumulative(counted, one.bounds, one.bounds), counted.total)
            yield family

    def _tenants(self, answers: Answers) -> Iterator[Metric]:
        served = answers.tenants.served
        ended = CounterMetricFamily(
            "octavo_tenant_requests",
            "Answers by tenant and how they ended",
            labels=["tenant", "finish_reason"],
        )
        fared = CounterMetricFamily(
            "octavo_tenant_slo_answers",
            "Answers with targets by tenant and how they fared",
            labels=["tenant", "verdict"],
        )
        for tenant, one in served.items():
            for reason, count in one.answers.items():
                ended.add_metric([tenant, reason], count)
            for verdict, count in one.verdicts.items():
                fared.add_metric([tenant, verdict], count)
        yield ended
        yield fared
        yield _labelled(
            "tenant_prompt_tokens",
            "Prompt tokens by tenant",
            "tenant",
            {tenant: one.prompt_tokens for tenant, one in served.items()},
        )
        yield _labelled(
            "tenant_completion_tokens",
            "Answer tokens by tenant",
            "tenant",
            {tenant: one.completion_tokens for tenant, one in served.items()},
        )
        yield _labelled(
            "tenant_preemptions",
            "Preemptions of answers that ended, by tenant",
            "tenant",
            {tenant: one.preemptions for tenant, one in served.items()},
        )
        yield _summary(
            "tenant_queue_seconds",
            "Arrival to first admission, by tenant",
            {tenant: one.queue for tenant, one in served.items()},
        )
        yield _summary(
            "tenant_time_to_first_token_seconds",
            "Arrival to first token, by tenant",
            {tenant: one.first_token for tenant, one in served.items()},
        )


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"octavo_{name}", help, value)


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"octavo_{name}", help, value)


def _labelled(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"octavo_{name}", help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, help: str, counted: Counted, status_field: str) -> Metric:
    bounds = DISTRIBUTIONS[status_field]
    family = HistogramMetricFamily(f"octavo_{name}", help)
    family.add_metric([], cumulative(counted, bounds, bounds), counted.total)
    return family


def _summary(name: str, help: str, spans: Mapping[str, Spans]) -> Metric:
    family = SummaryMetricFamily(f"octavo_{name}", help, labels=["tenant"])
    for tenant, one in spans.items():
        family.add_metric([tenant], one.count, one.total_s)
    return family


def _info(name: str, help: str, labels: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily(name, help, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family
