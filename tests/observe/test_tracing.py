"""Spans say what receipts say; what happened to a request are their events."""

import sys
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from octavo.core.events import Interruption, Receipt
from octavo.core.request import Request, Sampling
from octavo.errors import ConfigError
from octavo.observe.tracing import Caller, Outcome, Tracing, traces_address, tracing_to

NOW = 1000.0
REQUEST = Request(
    id="r1", prompt=(1, 2, 3), max_tokens=9, sampling=Sampling(temperature=0.5), tenant="a"
)
RECEIPT = Receipt(
    prompt_tokens=3,
    completion_tokens=5,
    cached_tokens=2,
    recomputed_tokens=4,
    preemptions=2,
    arrival_s=990.0,
    admitted_s=991.0,
    first_token_s=993.0,
    finished_s=997.0,
    peak_blocks=3,
    interruptions=(
        Interruption(994.0, "swap", "r0", 2),
        Interruption(995.5, "engine_died"),
    ),
)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Spans:
    """A tracer whose spans stay here."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider, "demo", clock=lambda: NOW)

    def of(self, outcome: Outcome, caller: Caller | None = None) -> ReadableSpan:
        self.tracing.ended(caller or Caller(), REQUEST, outcome)
        (span,) = self._exporter.get_finished_spans()
        return span


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


GOOD = Outcome(began_s=990.0, reasons=("stop",), receipts=(RECEIPT,))


def test_a_span_has_the_attributes_of_the_conventions() -> None:
    span = Spans().of(GOOD, Caller("chat", {}))
    assert span.name == "chat demo"
    assert span.kind is SpanKind.SERVER
    assert span.status.status_code is StatusCode.UNSET
    told = attributes_of(span)
    assert told == told | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.id": "r1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.server.time_to_first_token": 3.0,
        "gen_ai.server.time_per_output_token": 1.0,
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_in_model_prefill": 2.0,
        "gen_ai.latency.time_in_model_decode": 4.0,
        "gen_ai.latency.time_in_model_inference": 6.0,
        "gen_ai.latency.e2e": 7.0,
        "octavo.preemptions": 2,
        "octavo.recomputed_tokens": 4,
        "octavo.tenant": "a",
    }


def test_it_lasts_as_long_as_the_request() -> None:
    span = Spans().of(GOOD)
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == 7 * 10**9


def test_each_preemption_is_an_event_with_its_reason() -> None:
    span = Spans().of(GOOD)
    assert span.start_time is not None
    told = [((event.timestamp - span.start_time) / 1e9, event.name) for event in span.events]
    assert told == [
        (1.0, "octavo.admitted"),
        (3.0, "octavo.first_token"),
        (4.0, "octavo.preempted"),
        (5.5, "octavo.preempted"),
    ]
    for_r0, died = (dict(event.attributes or {}) for event in span.events[2:])
    assert for_r0 == {
        "octavo.answer": 0,
        "octavo.preemption.reason": "r0 needed its blocks",
        "octavo.preemption.beneficiary": "r0",
        "octavo.preemption.mode": "swap",
        "octavo.preemption.blocks": 2,
    }
    assert died == {"octavo.answer": 0, "octavo.preemption.reason": "the engine died"}


def test_several_answers_are_one_span() -> None:
    second = replace(RECEIPT, prompt_tokens=0, cached_tokens=0, finished_s=999.0)
    outcome = Outcome(began_s=990.0, reasons=("stop", "length"), receipts=(RECEIPT, second))
    told = attributes_of(Spans().of(outcome))
    assert told["gen_ai.usage.input_tokens"] == 3
    assert told["gen_ai.usage.output_tokens"] == 10
    assert told["gen_ai.response.finish_reasons"] == ("stop", "length")
    assert told["gen_ai.latency.e2e"] == 9.0


def test_an_answer_without_tokens_says_what_is_known() -> None:
    empty = replace(RECEIPT, completion_tokens=0, admitted_s=None, first_token_s=None)
    told = attributes_of(Spans().of(replace(GOOD, receipts=(empty,))))
    assert "gen_ai.server.time_to_first_token" not in told
    assert told["gen_ai.latency.e2e"] == 7.0


def test_a_request_that_failed_says_how() -> None:
    span = Spans().of(Outcome(began_s=996.0, error="engine_stopped"))
    assert span.status.status_code is StatusCode.ERROR
    assert attributes_of(span)["error.type"] == "engine_stopped"
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == 4 * 10**9


def test_the_parent_is_that_of_the_caller() -> None:
    span = Spans().of(GOOD, Caller("chat", {"traceparent": PARENT}))
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == PARENT[3:35]
    assert f"{span.parent.span_id:016x}" == PARENT[36:52]


@pytest.mark.parametrize("header", ["", "00-zz-zz-00", "x" * 10_000])
def test_a_broken_parent_is_none(header: str) -> None:
    assert Spans().of(GOOD, Caller("chat", {"traceparent": header})).parent is None


def test_no_token_of_prompt_or_answer_is_in_it() -> None:
    told = attributes_of(Spans().of(GOOD))
    assert REQUEST.prompt not in told.values()


def test_trouble_with_a_span_is_not_the_requests() -> None:
    Spans().tracing.ended(Caller(), REQUEST, None)  # type: ignore[arg-type]


# --- where they go


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("https://collector/own/place", "https://collector/own/place"),
    ],
)
def test_spans_go_to_the_usual_place(endpoint: str, address: str) -> None:
    assert traces_address(endpoint) == address


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://collector", "http://", "x"])
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint is .* must be an address"):
        tracing_to(endpoint, "demo", "1")


def test_a_password_has_no_place_in_a_setting_that_is_logged() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        traces_address("https://user:4711@collector")
    assert "4711" not in str(refused.value)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[otel\]'"):
        tracing_to("http://127.0.0.1:4318", "demo", "1")
