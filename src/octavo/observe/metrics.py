"""Prometheus metrics of a server, under `octavo_…`.

Nothing here raises into what it measures: a value that cannot be counted (negative, not a number)
is dropped and counted in `octavo_metrics_errors_total`.
"""

import logging
import math
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.core.events import Receipt

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Status(Protocol):
    """What is read from the engine's status; totals count from its start."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def blocks_total(self) -> int: ...
    @property
    def blocks_free(self) -> int: ...
    @property
    def blocks_cached(self) -> int: ...
    @property
    def blocks_owned(self) -> int: ...
    @property
    def blocks_held(self) -> int: ...
    @property
    def blocks_pinned(self) -> int: ...
    @property
    def blocks_fenced(self) -> int: ...
    @property
    def swap_blocks_total(self) -> int: ...
    @property
    def swap_blocks_used(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def tokens_computed(self) -> int: ...
    @property
    def tokens_recomputed(self) -> int: ...
    @property
    def tokens_swapped_out(self) -> int: ...
    @property
    def tokens_swapped_in(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def swaps(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    @property
    def prefix_tokens_queried(self) -> int: ...
    @property
    def prefix_tokens_hit(self) -> int: ...
    @property
    def failed_steps(self) -> int: ...
    @property
    def last_step_s(self) -> float: ...


class Metrics:
    """Counts what became of requests, and shows the engine's status beside it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests by how they ended", "finish_reason")
        self._refused = self._counter("requests_refused", "Requests not accepted", "code")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of finished requests")
        self._completion = self._counter("completion_tokens", "Tokens of finished answers")
        self._errors = self._counter("metrics_errors", "Values that could not be counted")
        self._queue = self._histogram("request_queue_seconds", "Arrival to admission")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token")
        self._tpot = self._histogram(
            "time_per_output_token_seconds", "Mean time of a token after the first", _PER_TOKEN_S
        )
        self._e2e = self._histogram("request_seconds", "Arrival to last token")
        self._status = _StatusCollector()
        self._registry.register(self._status)

    def finished(self, reason: str, receipt: Receipt) -> None:
        """One request has ended with an answer."""
        self.ended(reason)
        self._add(self._prompt, receipt.prompt_tokens)
        self._add(self._completion, receipt.completion_tokens)
        self._observe(self._e2e, receipt.finished_s - receipt.arrival_s)
        if receipt.admitted_s is not None:
            self._observe(self._queue, receipt.admitted_s - receipt.arrival_s)
        if receipt.first_token_s is not None:
            self._observe(self._ttft, receipt.first_token_s - receipt.arrival_s)
            if receipt.completion_tokens > 1:
                decoding_s = receipt.finished_s - receipt.first_token_s
                self._observe(self._tpot, decoding_s / (receipt.completion_tokens - 1))

    def ended(self, reason: str) -> None:
        """One accepted request has ended, with or without an answer."""
        self._requests.labels(reason).inc()

    def refused(self, code: str) -> None:
        """One request was turned away, for the reason `code`."""
        self._refused.labels(code).inc()

    def render(self, status: Status) -> bytes:
        """All metrics in Prometheus' text format."""
        self._status.refresh(status, self._errors)
        return generate_latest(self._registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"octavo_{name}", help, labels, registry=self._registry)

    def _histogram(
        self, name: str, help: str, buckets: tuple[float, ...] = _LATENCY_S
    ) -> Histogram:
        return Histogram(f"octavo_{name}", help, buckets=buckets, registry=self._registry)

    def _add(self, counter: Counter, value: float) -> None:
        if _countable(value):
            counter.inc(value)
        else:
            self._drop(counter, value)

    def _observe(self, histogram: Histogram, value: float) -> None:
        if _countable(value):
            histogram.observe(value)
        else:
            self._drop(histogram, value)

    def _drop(self, metric: Counter | Histogram, value: float) -> None:
        self._errors.inc()
        logger.debug("%s cannot take %r", metric, value)


def _countable(value: float) -> bool:
    return math.isfinite(value) and value >= 0


class _StatusCollector(Collector):
    """The last engine status that was countable, as gauges and counters."""

    def __init__(self) -> None:
        self._gauges: dict[str, float] = {}
        self._blocks: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def refresh(self, status: Status, errors: Counter) -> None:
        """Take over `status`; a value that is not countable leaves the one before in place."""
        for known, fresh in (
            (
                self._gauges,
                {
                    "requests_running": status.running,
                    "requests_waiting": status.waiting,
                    "kv_blocks_total": status.blocks_total,
                    "kv_blocks_pinned": status.blocks_pinned,
                    "swap_blocks_total": status.swap_blocks_total,
                    "swap_blocks_used": status.swap_blocks_used,
                    "kv_pool_occupancy": status.blocks_owned / max(status.blocks_total, 1),
                    "last_step_seconds": status.last_step_s,
                },
            ),
            (
                self._blocks,
                {
                    "free": status.blocks_free,
                    "cached": status.blocks_cached,
                    "owned": status.blocks_owned,
                    "held": status.blocks_held,
                    "fenced": status.blocks_fenced,
                },
            ),
            (
                self._totals,
                {
                    "steps": status.steps,
                    "failed_steps": status.failed_steps,
                    "tokens_computed": status.tokens_computed,
                    "tokens_recomputed": status.tokens_recomputed,
                    "tokens_swapped_out": status.tokens_swapped_out,
                    "tokens_swapped_in": status.tokens_swapped_in,
                    "preemptions": status.preemptions,
                    "preemptions_swapped": status.swaps,
                    "prefix_cache_evictions": status.evictions,
                    "prefix_cache_tokens_queried": status.prefix_tokens_queried,
                    "prefix_cache_tokens_hit": status.prefix_tokens_hit,
                },
            ),
        ):
            for name, value in fresh.items():
                if _countable(value):
                    known[name] = value
                else:
                    errors.inc()

    def collect(self) -> Iterator[Metric]:
        for name, value in self._gauges.items():
            yield GaugeMetricFamily(f"octavo_{name}", _HELP[name], value)
        blocks = GaugeMetricFamily("octavo_kv_blocks", "KV blocks by state", labels=["state"])
        for state, value in self._blocks.items():
            blocks.add_metric([state], value)
        yield blocks
        for name, value in self._totals.items():
            yield CounterMetricFamily(f"octavo_{name}", _HELP[name], value)


_HELP = {
    "requests_running": "Requests that hold KV blocks",
    "requests_waiting": "Answers that wait for blocks, a place in the batch or a sibling",
    "kv_blocks_total": "KV blocks in the pool",
    "kv_blocks_pinned": "KV blocks that stay for prompts to come because requests asked for it",
    "swap_blocks_total": "Blocks that the swap space holds",
    "swap_blocks_used": "Blocks of it that are taken",
    "kv_pool_occupancy": "Share of the KV blocks that requests hold",
    "last_step_seconds": "How long the last step took",
    "steps": "Steps of the engine",
    "failed_steps": "Steps whose work failed as a whole",
    "tokens_computed": "Positions computed, prompt and answer",
    "tokens_recomputed": "Positions computed again after a preemption",
    "tokens_swapped_out": "Positions whose KV was moved to the swap space",
    "tokens_swapped_in": "Positions whose KV was moved back",
    "preemptions": "Times a running request gave up its blocks",
    "preemptions_swapped": "Those of them whose KV was moved to the swap space",
    "prefix_cache_evictions": "Cached blocks that were reused for something else",
    "prefix_cache_tokens_queried": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_tokens_hit": "Prompt tokens found there",
}
