"""vLLM's names for what Octavo counts, so that dashboards made for it show Octavo as well.

Names, types, labels and bounds are those of vLLM 0.32. What Octavo has nothing for is left out:
a panel says "no data" then, not something untrue.
"""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from octavo.config import EngineConfig
from octavo.observe import buckets
from octavo.observe.answers import Answers, Distribution
from octavo.observe.histogram import Counted, cumulative
from octavo.observe.status import DISTRIBUTIONS, Kept
from octavo.resolve import Resolved


def cache_facts(config: EngineConfig, resolved: Resolved) -> dict[str, str]:
    """How the pool was sized, under the labels of vLLM's `cache_config_info`."""
    window = min((window for window in resolved.windows if window is not None), default=None)
    facts = {
        "block_size": resolved.block_size,
        "cache_dtype": resolved.kv_cache_dtype,
        "enable_prefix_caching": resolved.enable_prefix_caching,
        "gpu_memory_utilization": config.memory_fraction,
        "kv_cache_max_concurrency": resolved.full_requests,
        "kv_cache_memory_bytes": resolved.pool_bytes,
        "kv_cache_size_tokens": resolved.pool_tokens,
        "num_cpu_blocks": resolved.swap_blocks,
        "num_gpu_blocks": resolved.blocks,
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": window,
        "swap_space_bytes": resolved.swap_bytes,
    }
    return {name: str(value) for name, value in facts.items()}


FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")

_COUNTERS = (
    ("num_preemptions", "preemptions", "octavo_preemptions_total"),
    ("spec_decode_num_draft_tokens", "tokens_drafted", "octavo_tokens_drafted_total"),
    ("spec_decode_num_accepted_tokens", "tokens_accepted", "octavo_tokens_accepted_total"),
    ("prompt_tokens", "prompt_tokens", "octavo_tokens_prompt_total"),
    ("prompt_tokens_cached", "prompt_tokens_cached", "octavo_tokens_prompt_cached_total"),
    ("generation_tokens", "tokens_sampled", "octavo_tokens_sampled_total"),
    ("prefix_cache_queries", "prefix_tokens_queried", "octavo_prefix_cache_tokens_queried_total"),
    ("prefix_cache_hits", "prefix_tokens_hit", "octavo_prefix_cache_tokens_hit_total"),
)
"""(name, field of the status, our name)."""

_COUNTED = (
    ("iteration_tokens_total", "step_tokens", buckets.VLLM_STEP_TOKENS, "octavo_step_tokens"),
    (
        "inter_token_latency_seconds",
        "token_gaps_s",
        buckets.VLLM_TOKEN_S,
        "octavo_inter_token_seconds",
    ),
)


def families(
    kept: Kept,
    answers: Answers,
    distributions: Sequence[Distribution],
    *,
    model_name: str,
    cache: Mapping[str, str],
) -> Iterator[Metric]:
    """Everything under `vllm:`, for the one engine that there is."""
    labels = {"model_name": model_name, "engine": "0"}
    gauges = kept.gauges
    yield _gauge("num_requests_running", gauges.get("running", 0), labels, "requests_running")
    yield _gauge("num_requests_waiting", gauges.get("waiting", 0), labels, "requests_waiting")
    yield _gauge("kv_cache_usage_perc", kept.occupancy, labels, "kv_pool_occupancy")
    yield _gauge("cache_config_info", 1, {"engine": "0", **cache}, "cache_info")
    for name, field, ours in _COUNTERS:
        family = CounterMetricFamily(f"vllm:{name}", f"The same as {ours}", labels=list(labels))
        family.add_metric(list(labels.values()), kept.total(field))
        yield family
    yield _by_source(kept, labels)
    yield _by_reason(answers, labels)
    for name, field, shown, ours in _COUNTED:
        yield _histogram(name, kept.counted(field), DISTRIBUTIONS[field], shown, labels, ours)
    for one in distributions:
        counted = answers.histograms[one.name].counted()
        for alias in one.aliases:
            ours = f"octavo_{one.name}"
            yield _histogram(alias, counted, one.bounds, one.alias_bounds, labels, ours)


def _gauge(name: str, value: float, labels: Mapping[str, str], ours: str) -> Metric:
    family = GaugeMetricFamily(f"vllm:{name}", f"The same as octavo_{ours}", labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _by_source(kept: Kept, labels: Mapping[str, str]) -> Metric:
    cached = kept.total("prompt_tokens_cached")
    sources = {
        "local_compute": kept.total("prompt_tokens") - cached,
        "local_cache_hit": cached,
        "external_kv_transfer": 0.0,
    }
    family = CounterMetricFamily(
        "vllm:prompt_tokens_by_source",
        "octavo_tokens_prompt_total by where their KV comes from",
        labels=[*labels, "source"],
    )
    for source, tokens in sources.items():
        family.add_metric([*labels.values(), source], tokens)
    return family


def _by_reason(answers: Answers, labels: Mapping[str, str]) -> Metric:
    family = CounterMetricFamily(
        "vllm:request_success",
        "The same as octavo_requests_total",
        labels=[*labels, "finished_reason"],
    )
    for reason in FINISHED_REASONS:
        family.add_metric([*labels.values(), reason], answers.ended[reason])
    return family


def _histogram(
    name: str,
    counted: Counted,
    bounds: buckets.Bounds,
    shown: buckets.Bounds,
    labels: Mapping[str, str],
    ours: str,
) -> Metric:
    family = HistogramMetricFamily(f"vllm:{name}", f"The same as {ours}", labels=list(labels))
    family.add_metric(list(labels.values()), cumulative(counted, bounds, shown), counted.total)
    return family
