"""Bad values are dropped and counted; nothing raises, no counter falls."""

import math
from dataclasses import fields, replace

import pytest

from octavo.core.events import Receipt
from octavo.engine.engine import EngineStatus
from octavo.observe.metrics import Metrics

GOOD = Receipt(
    prompt_tokens=10,
    completion_tokens=5,
    cached_tokens=0,
    recomputed_tokens=0,
    preemptions=0,
    arrival_s=1.0,
    admitted_s=2.0,
    first_token_s=3.0,
    finished_s=7.0,
    peak_blocks=1,
)
STATUS = EngineStatus(
    **{name: 4 + n for n, name in enumerate(field.name for field in fields(EngineStatus))}
)


def value_of(metrics: Metrics, name: str, status: EngineStatus = STATUS) -> float:
    lines = metrics.render(status).decode().splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))


def test_a_receipt_feeds_all_histograms() -> None:
    metrics = Metrics()
    metrics.finished("stop", GOOD)
    assert value_of(metrics, "octavo_request_queue_seconds_sum") == 1.0
    assert value_of(metrics, "octavo_time_to_first_token_seconds_sum") == 2.0
    assert value_of(metrics, "octavo_time_per_output_token_seconds_sum") == 1.0
    assert value_of(metrics, "octavo_request_seconds_sum") == 6.0
    assert value_of(metrics, 'octavo_requests_total{finish_reason="stop"}') == 1
    assert value_of(metrics, "octavo_metrics_errors_total") == 0


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf])
def test_bad_receipts_are_dropped_and_counted(bad: float) -> None:
    metrics = Metrics()
    metrics.finished("stop", GOOD)
    metrics.finished("stop", replace(GOOD, prompt_tokens=bad, finished_s=bad))
    assert value_of(metrics, "octavo_prompt_tokens_total") == 10
    assert value_of(metrics, "octavo_request_seconds_count") == 1
    assert value_of(metrics, "octavo_metrics_errors_total") == 3


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf])
def test_a_bad_status_leaves_the_last_good_one(bad: float) -> None:
    metrics = Metrics()
    name = "octavo_tokens_computed_total"
    assert value_of(metrics, name) == STATUS.tokens_computed
    assert value_of(metrics, name, replace(STATUS, tokens_computed=bad)) == STATUS.tokens_computed
    assert value_of(metrics, "octavo_metrics_errors_total") == 1


def test_a_request_without_a_token() -> None:
    metrics = Metrics()
    metrics.finished("length", replace(GOOD, completion_tokens=0, first_token_s=None))
    assert value_of(metrics, "octavo_time_to_first_token_seconds_count") == 0
    assert value_of(metrics, "octavo_request_seconds_count") == 1
