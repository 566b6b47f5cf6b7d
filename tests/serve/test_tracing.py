"""Spans of a server: one a request, whatever API it came by."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.serve.scripted import Script, Served, scripted_server

from octavo import __version__
from octavo.config import EngineConfig
from octavo.core.request import Request
from octavo.errors import ConfigError, EngineStopped
from octavo.observe.tracing import Caller, Outcome, Tracing, tracing_to
from octavo.serve import main

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Traced:
    served: Served
    http: httpx.Client
    exporter: InMemorySpanExporter

    def span(self, path: str, body: dict[str, Any], **headers: str) -> ReadableSpan:
        """The one span that a request leads to."""
        self.exporter.clear()
        self.http.post(path, json=body, headers=headers)
        (span,) = self.exporter.get_finished_spans()
        return span


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with (
        scripted_server(tracing=Tracing(provider, "scripted")) as served,
        httpx.Client(base_url=served.url, timeout=60) as http,
    ):
        yield Traced(served, http, exporter)


@pytest.fixture(autouse=True)
def _fresh(traced: Traced) -> None:
    traced.served.client.script = Script()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/chat/completions", CHAT, "chat"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 99}, "text_completion"),
        ("/v1/messages", CHAT | {"model": "scripted", "max_tokens": 99}, "chat"),
        ("/api/chat", CHAT | {"model": "scripted"}, "chat"),
    ],
)
def test_every_request_is_a_span_of_its_caller(
    traced: Traced, path: str, body: dict[str, Any], operation: str, stream: bool
) -> None:
    span = traced.span(path, body | {"stream": stream}, traceparent=PARENT)
    assert span.name == f"{operation} scripted"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT[36:52]
    told = dict(span.attributes or {})
    assert told["gen_ai.usage.output_tokens"] > 40
    assert told["gen_ai.server.time_to_first_token"] == 1.0
    assert told["gen_ai.response.finish_reasons"] == ("stop",)


def test_the_next_request_has_its_own_caller(traced: Traced) -> None:
    assert traced.span("/v1/completions", {"prompt": "hi"}, traceparent=PARENT).parent is not None
    assert traced.span("/v1/completions", {"prompt": "hi"}).parent is None


def test_all_answers_of_a_request_are_in_its_span(traced: Traced) -> None:
    told = dict(
        traced.span("/v1/completions", {"prompt": "hi", "n": 3, "max_tokens": 99}).attributes or {}
    )
    assert told["gen_ai.response.finish_reasons"] == ("stop",) * 3
    assert told["gen_ai.usage.input_tokens"] == 2


def test_a_failure_is_in_the_span(traced: Traced) -> None:
    traced.served.client.script = Script(error=EngineStopped("it stopped"), fail_at=3)
    told = dict(traced.span("/v1/completions", {"prompt": "hi"}).attributes or {})
    assert told["error.type"] == "engine_stopped"


def test_a_body_that_is_refused_is_no_request(traced: Traced) -> None:
    traced.exporter.clear()
    assert traced.http.post("/v1/completions", json={"prompt": 7}).status_code == 400
    assert not traced.exporter.get_finished_spans()


class _Collector(BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    got: list[tuple[str, bytes]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.got.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_spans_arrive_at_a_collector() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    _Collector.got.clear()
    with HTTPServer(("127.0.0.1", 0), _Collector) as collector:
        Thread(target=collector.serve_forever, daemon=True).start()
        tracing = tracing_to(f"http://127.0.0.1:{collector.server_port}", "demo", "1.2.3")
        request = Request(id="r1", prompt=(1,), max_tokens=1)
        tracing.ended(Caller("chat", {}), request, Outcome(began_s=0.0, error="abort"))
        tracing.close()
        collector.shutdown()
    ((path, body),) = _Collector.got
    assert path == "/v1/traces"
    assert b"chat demo" in body
    assert b"octavo" in body


def test_the_setting_says_where_spans_go(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(main, "tracing_to", lambda *words: told.append(words))
    assert main._tracing(EngineConfig()) is None
    assert not told
    main._tracing(EngineConfig(otlp_endpoint="http://collector:4318", served_model_name="mine"))
    assert told == [("http://collector:4318", "mine", __version__)]


def test_without_the_extra_no_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setattr(main, "prepare", lambda _: pytest.fail("the model is not even looked at"))
    config = EngineConfig(otlp_endpoint="http://collector:4318", port=0)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[otel\]'"):
        main.run_server(config, {})
