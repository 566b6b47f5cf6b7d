"""Bad values are dropped and counted; nothing raises, no counter falls; ratios of nothing are
defined; vLLM's names are exact."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.observe.exposition import Samples, buckets_of, kinds_of, samples_of, value
from tests.serve.scripted import IDLE

from octavo.core.budget import Limits
from octavo.core.events import Receipt
from octavo.core.request import Request
from octavo.engine.engine import EngineStatus
from octavo.observe.buckets import TOKEN_S
from octavo.observe.histogram import Histogram
from octavo.observe.metrics import Facts, Metrics
from octavo.observe.tenants import LONGEST_NAME, MOST_TENANTS

GOOD = Receipt(
    prompt_tokens=10,
    completion_tokens=5,
    cached_tokens=4,
    recomputed_tokens=0,
    preemptions=2,
    arrival_s=1.0,
    admitted_s=2.0,
    first_token_s=3.0,
    finished_s=7.0,
    peak_blocks=3,
)
REQUEST = Request(id="r", prompt=(1,) * 10, max_tokens=6)
LIMITS = Limits(sequences=4, tokens=16)
NEW = replace(
    IDLE,
    **dict.fromkeys(("steps", "tokens_computed", "tokens_sampled", "preemptions"), 0),
    prefix_tokens_queried=0,
    prefix_tokens_hit=0,
    admissions=0,
    table_entries=0,
)


def seen(metrics: Metrics, status: EngineStatus = IDLE) -> Samples:
    return samples_of(metrics.render(status))


def finish(metrics: Metrics, receipt: Receipt = GOOD, **changes: Any) -> None:
    limits = changes.pop("limits", LIMITS)
    metrics.finished("stop", replace(REQUEST, **changes), receipt, limits)


def test_a_receipt_feeds_all_histograms() -> None:
    metrics = Metrics()
    finish(metrics)
    samples = seen(metrics)
    sums = {
        "request_queue_seconds": 1.0,
        "time_to_first_token_seconds": 2.0,
        "time_per_output_token_seconds": 1.0,
        "request_seconds": 6.0,
        "request_prefill_seconds": 1.0,
        "request_decode_seconds": 4.0,
        "request_inference_seconds": 5.0,
        "request_prompt_tokens": 10,
        "request_computed_prompt_tokens": 6,
        "request_completion_tokens": 5,
        "request_max_tokens": 6,
        "request_branches": 1,
        "request_preemptions": 2,
        "request_peak_blocks": 3,
    }
    for name, total in sums.items():
        assert value(samples, f"octavo_{name}_sum") == total, name
        assert value(samples, f"octavo_{name}_count") == 1, name
    assert value(samples, "octavo_requests_total", {"finish_reason": "stop"}) == 1
    assert value(samples, "octavo_metrics_errors_total") == 0


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf, 1e300, 10**400])
def test_bad_receipts_are_dropped_and_counted(bad: float) -> None:
    metrics = Metrics()
    finish(metrics)
    finish(metrics, replace(GOOD, prompt_tokens=bad, finished_s=bad))
    samples = seen(metrics)
    assert value(samples, "octavo_prompt_tokens_total") == 10
    assert value(samples, "octavo_request_seconds_count") == 1
    assert value(samples, "octavo_requests_total", {"finish_reason": "stop"}) == 2
    assert value(samples, "octavo_metrics_errors_total") >= 1


def test_what_cannot_be_counted_at_all_raises_nothing() -> None:
    metrics = Metrics()
    metrics.finished("stop", REQUEST, None, LIMITS)  # type: ignore[arg-type]
    metrics.lost("error", None, 1, LIMITS)  # type: ignore[arg-type]
    metrics.take(None)  # type: ignore[arg-type]
    assert value(seen(metrics), "octavo_metrics_errors_total") == 3


@pytest.mark.parametrize(
    "bad", [-1, math.nan, math.inf, 10**400, None, "7", IDLE.tokens_computed - 1]
)
def test_a_bad_status_leaves_the_last_good_one(bad: Any) -> None:
    metrics = Metrics()
    name = "octavo_tokens_computed_total"
    assert value(seen(metrics), name) == IDLE.tokens_computed
    samples = seen(metrics, replace(IDLE, tokens_computed=bad, step_s=bad, running=-1))
    assert value(samples, name) == IDLE.tokens_computed
    assert value(samples, "octavo_requests_running") == IDLE.running
    assert value(samples, "octavo_metrics_errors_total") == 3


def test_another_engine_counts_on_from_the_one_before() -> None:
    metrics, steps = Metrics(), Histogram(TOKEN_S)
    steps.add(0.02, times=7)
    seen(metrics, replace(IDLE, step_s=steps.counted()))
    fresh = replace(NEW, started_s=99.0, steps=2, running=3)
    samples = seen(metrics, fresh)
    assert value(samples, "octavo_steps_total") == IDLE.steps + 2
    assert value(samples, "octavo_tokens_computed_total") == IDLE.tokens_computed
    assert value(samples, "octavo_requests_running") == 3
    assert value(samples, "octavo_step_seconds_count") == 7
    assert value(samples, "octavo_engine_restarts_total") == 1
    samples = seen(metrics, replace(fresh, steps=5))
    assert value(samples, "octavo_steps_total") == IDLE.steps + 5
    assert value(samples, "octavo_metrics_errors_total") == 0


def test_a_request_without_a_token() -> None:
    metrics = Metrics()
    finish(metrics, replace(GOOD, completion_tokens=0, first_token_s=None))
    samples = seen(metrics)
    assert value(samples, "octavo_time_to_first_token_seconds_count") == 0
    assert value(samples, "octavo_request_decode_seconds_count") == 0
    assert value(samples, "octavo_request_seconds_count") == 1


def test_ratios_of_nothing_are_defined() -> None:
    samples = seen(Metrics(), NEW)
    assert value(samples, "octavo_prefix_cache_hit_ratio") == 0
    assert value(samples, "octavo_preemption_ratio") == 0
    assert value(samples, "octavo_goodput_ratio") == 1
    assert value(samples, "octavo_kv_table_depth_blocks") == 0
    empty = replace(NEW, blocks_total=0, blocks_free=0, blocks_cached=0, blocks_owned=0)
    assert value(seen(Metrics(), empty), "octavo_kv_pool_occupancy") == 0


def test_ratios_of_something() -> None:
    samples = seen(Metrics(), replace(IDLE, running=4, table_entries=10, blocks_fenced=5))
    assert value(samples, "octavo_prefix_cache_hit_ratio") == 256 / 400
    assert value(samples, "octavo_preemption_ratio") == 1 / 5
    assert value(samples, "octavo_kv_table_depth_blocks") == 2.5
    assert value(samples, "octavo_kv_pool_occupancy") == 15 / 100


# --- targets


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "verdict"),
    [
        (2.0, 1.0, "met"),
        (1.9, 1.0, "ttft_missed"),
        (2.0, 0.9, "tpot_missed"),
        (1.9, 0.9, "both_missed"),
        (2.0, None, "met"),
        (None, 0.9, "tpot_missed"),
        (None, None, None),
    ],
)
def test_answers_are_held_to_their_targets(
    ttft_s: float | None, tpot_s: float | None, verdict: str | None
) -> None:
    own, of_limits = Metrics(), Metrics()
    finish(own, ttft_target_s=ttft_s, tpot_target_s=tpot_s)
    limits = replace(LIMITS, ttft_target_s=ttft_s, tpot_target_s=tpot_s)
    finish(of_limits, limits=limits)
    for metrics in (own, of_limits):
        samples = seen(metrics)
        for name in ("met", "ttft_missed", "tpot_missed", "both_missed", "failed"):
            found = value(samples, "octavo_slo_answers_total", {"verdict": name})
            assert found == (name == verdict), name
        assert value(samples, "octavo_goodput_ratio") == (verdict in ("met", None))


def test_its_own_target_goes_before_that_of_the_limits() -> None:
    metrics = Metrics()
    finish(metrics, ttft_target_s=60.0, limits=replace(LIMITS, ttft_target_s=0.1))
    assert value(seen(metrics), "octavo_goodput_ratio") == 1


def test_who_goes_misses_nothing_and_what_fails_misses_all() -> None:
    metrics = Metrics()
    limits = replace(LIMITS, ttft_target_s=5.0)
    metrics.lost("abort", REQUEST, 2, limits)
    metrics.lost("error", REQUEST, 1, LIMITS)
    assert value(seen(metrics), "octavo_goodput_ratio") == 1
    metrics.lost("error", REQUEST, 3, limits)
    samples = seen(metrics)
    assert value(samples, "octavo_slo_answers_total", {"verdict": "failed"}) == 3
    assert value(samples, "octavo_goodput_ratio") == 0
    assert value(samples, "octavo_requests_total", {"finish_reason": "abort"}) == 2
    assert value(samples, "octavo_requests_total", {"finish_reason": "error"}) == 4


def test_an_answer_of_one_token_has_no_time_per_output_token() -> None:
    metrics = Metrics()
    finish(metrics, replace(GOOD, completion_tokens=1), tpot_target_s=0.001)
    samples = seen(metrics)
    assert value(samples, "octavo_goodput_ratio") == 1
    assert value(samples, "octavo_time_per_output_token_seconds_count") == 0


# --- tenants


def test_tenants_are_kept_apart() -> None:
    metrics = Metrics()
    finish(metrics, tenant="a")
    finish(metrics, replace(GOOD, completion_tokens=7), tenant="b", ttft_target_s=0.5)
    finish(metrics)
    samples = seen(metrics)
    for tenant, tokens in (("a", 5), ("b", 7), ("default", 5)):
        label = {"tenant": tenant}
        assert value(samples, "octavo_tenant_completion_tokens_total", label) == tokens
        assert value(samples, "octavo_tenant_queue_seconds_sum", label) == 1.0
        assert value(samples, "octavo_tenant_time_to_first_token_seconds_count", label) == 1
        assert value(samples, "octavo_tenant_preemptions_total", label) == 2
    late = {"tenant": "b", "verdict": "ttft_missed"}
    assert value(samples, "octavo_tenant_slo_answers_total", late) == 1


def test_clients_cannot_make_more_and_more_series() -> None:
    metrics = Metrics()
    finish(metrics, tenant="x" * (LONGEST_NAME + 1))
    for number in range(3 * MOST_TENANTS):
        finish(metrics, tenant=f"t{number}")
    finish(metrics, tenant="other")
    finish(metrics, tenant="t0")
    samples = seen(metrics)
    name = "octavo_tenant_requests_total"
    found = {dict(labels)["tenant"]: v for (each, labels), v in samples.items() if each == name}
    assert len(found) == MOST_TENANTS + 1
    assert found["t0"] == 2
    assert found["other"] == 2 * MOST_TENANTS + 2


def test_a_name_that_is_no_text_spoils_no_scrape() -> None:
    metrics = Metrics(Facts(model_name="m\udc80"))
    finish(metrics, tenant='"a\n\\\udc80')
    samples = seen(metrics)
    assert value(samples, "octavo_info", {"version": "", "model_name": "m?"}) == 1
    assert value(samples, "octavo_tenant_prompt_tokens_total", {"tenant": '"a\n\\?'}) == 10


# --- vLLM's names, with the types and bounds of its release 0.32

REQUEST_LATENCY = (
    "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
)  # fmt: skip
FIRST_TOKEN = (
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
INTER_TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000"
HISTOGRAMS = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": INTER_TOKEN,
    "request_time_per_output_token_seconds": INTER_TOKEN,
    "e2e_request_latency_seconds": REQUEST_LATENCY,
    "request_queue_time_seconds": REQUEST_LATENCY,
    "request_prefill_time_seconds": REQUEST_LATENCY,
    "request_decode_time_seconds": REQUEST_LATENCY,
    "request_inference_time_seconds": REQUEST_LATENCY,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_prefill_kv_computed_tokens": TOKENS,
    "request_params_n": "1 2 5 10 20",
    "request_num_preemptions": "1 2 3 4 5 10 20",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
)
BASE = {"model_name": "org/model", "engine": "0"}


@pytest.fixture
def exposition() -> bytes:
    cache = {"block_size": "16", "num_gpu_blocks": "100"}
    return Metrics(Facts(model_name="org/model", max_model_len=4095, cache=cache)).render(IDLE)


@pytest.mark.parametrize(("name", "bounds"), HISTOGRAMS.items())
def test_histograms_have_the_bounds_of_vllm(name: str, bounds: str, exposition: bytes) -> None:
    assert kinds_of(exposition)[f"vllm:{name}"] == "histogram"
    found = buckets_of(samples_of(exposition), f"vllm:{name}")
    assert list(found) == [*map(float, bounds.split()), math.inf]
    assert value(samples_of(exposition), f"vllm:{name}_count", BASE) == 0


def test_the_rest_has_the_names_of_vllm(exposition: bytes) -> None:
    kinds, samples = kinds_of(exposition), samples_of(exposition)
    for name in GAUGES:
        assert kinds[f"vllm:{name}"] == "gauge"
        assert value(samples, f"vllm:{name}", BASE) >= 0
    for name in COUNTERS:
        assert kinds[f"vllm:{name}"] == "counter"
        assert value(samples, f"vllm:{name}_total", BASE) >= 0
    for reason in ("stop", "length", "abort", "error", "repetition"):
        labels = BASE | {"finished_reason": reason}
        assert value(samples, "vllm:request_success_total", labels) == 0
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
        assert value(samples, "vllm:prompt_tokens_by_source_total", BASE | {"source": source}) >= 0
    facts = {"engine": "0", "block_size": "16", "num_gpu_blocks": "100"}
    assert value(samples, "vllm:cache_config_info", facts) == 1


def test_usage_does_not_count_what_is_only_cached(exposition: bytes) -> None:
    assert value(samples_of(exposition), "vllm:kv_cache_usage_perc", BASE) == 10 / 100


# --- the page about them


def test_the_docs_have_every_metric_in_its_own_words() -> None:
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(octavo_\w+)(?:\{.*\})?` \| \w+ \| (.*) \|$", page, re.MULTILINE))
    text = Metrics(Facts(cache={"block_size": "16"})).render(IDLE).decode()
    helps = dict(re.findall(r"^# HELP (octavo_\w+) (.*)$", text, re.MULTILINE))
    assert told == helps
    aliases = set(re.findall(r"`(vllm:\w+)", page))
    kinds = kinds_of(text.encode()).items()
    shown = {f"{name}_total" if kind == "counter" else name for name, kind in kinds}
    assert aliases == {name for name in shown if name.startswith("vllm:")}
