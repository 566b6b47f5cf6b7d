"""A span of OpenTelemetry for each request, made when it has ended from what its receipts say.

    chat demo ├──────────────────────────────────────────────────┤
                   │ octavo.admitted   │ octavo.preempted …  │ octavo.first_token

Attributes are those of the semantic conventions for generative AI, vLLM's latencies beside them,
and our own under `octavo.`; no prompt and no answer is among them. The library is an extra:
`pip install 'octavo[otel]'`.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from octavo.core.events import Interruption, Receipt
from octavo.core.request import Request
from octavo.errors import ConfigError
from octavo.observe.slo import time_per_output_token

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

SEND_S = 3
"""How long a collector may take for a batch of spans; they are lost then. The end of the server
waits no longer for the last."""

Attributes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Caller:
    """What the HTTP request says that the engine's does not: the operation by its address, and the
    headers that tell of the caller's own trace."""

    operation: str = "text_completion"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended: the reason and the receipt of each of its answers that did, and an error
    by its code, if it failed or its client went."""

    began_s: float
    reasons: tuple[str, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    error: str = ""


class Tracing:
    """Makes spans. Times are on `clock`, the engine's; `provider` takes them from there.

    Cost     some 50 µs a request, when it has ended; the network is another thread's.
    """

    def __init__(
        self,
        provider: "TracerProvider",
        model_name: str,
        *,
        version: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode

        self._provider = provider
        self._tracer = provider.get_tracer("octavo", version)
        self._extract = extract
        self._kind = SpanKind.SERVER
        self._failed = StatusCode.ERROR
        self._model_name = model_name
        self._clock = clock

    def ended(self, caller: Caller, request: Request, outcome: Outcome) -> None:
        """A request has ended, one way or another. Trouble here is none of the request's."""
        try:
            self._span(caller, request, outcome)
        except Exception:
            logger.debug("no span for a request", exc_info=True, extra={"request_id": request.id})

    def close(self) -> None:
        """Send what was not sent yet."""
        self._provider.force_flush(1000 * SEND_S)
        self._provider.shutdown()

    def _span(self, caller: Caller, request: Request, outcome: Outcome) -> None:
        receipts = outcome.receipts
        to_wall_ns = time.time_ns() - int(1e9 * self._clock())

        def wall_ns(at_s: float) -> int:
            return to_wall_ns + int(1e9 * at_s)

        began_s = min((one.arrival_s for one in receipts), default=outcome.began_s)
        ended_s = max((one.finished_s for one in receipts), default=self._clock())
        span = self._tracer.start_span(
            f"{caller.operation} {self._model_name}",
            context=self._extract(caller.headers),
            kind=self._kind,
            start_time=wall_ns(began_s),
            attributes={
                **asked(request),
                "gen_ai.operation.name": caller.operation,
                "gen_ai.provider.name": "octavo",
                "gen_ai.request.model": self._model_name,
                "gen_ai.response.model": self._model_name,
                "gen_ai.response.id": request.id,
            },
        )
        if receipts:
            span.set_attributes(cost(receipts))
            span.set_attribute("gen_ai.response.finish_reasons", outcome.reasons)
        for at_s, name, attributes in events(receipts):
            span.add_event(name, attributes, timestamp=wall_ns(at_s))
        if outcome.error:
            span.set_attribute("error.type", outcome.error)
            span.set_status(self._failed)
        span.end(wall_ns(max(began_s, ended_s)))


def asked(request: Request) -> Attributes:
    """What the request asks for; its words are not told."""
    sampling = request.sampling
    attributes: dict[str, Any] = {
        "gen_ai.request.id": request.id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.choice.count": request.branches,
        "octavo.priority": request.priority,
    }
    if request.tenant:
        attributes["octavo.tenant"] = request.tenant
    return attributes


def cost(receipts: Sequence[Receipt]) -> Attributes:
    """What the answers cost: tokens in sum, times of the slowest."""
    attributes: dict[str, Any] = {
        "gen_ai.usage.input_tokens": sum(one.prompt_tokens for one in receipts),
        "gen_ai.usage.output_tokens": sum(one.completion_tokens for one in receipts),
        "gen_ai.usage.cache_read.input_tokens": sum(one.cached_tokens for one in receipts),
        "gen_ai.latency.e2e": max(one.finished_s - one.arrival_s for one in receipts),
        "octavo.preemptions": sum(one.preemptions for one in receipts),
        "octavo.recomputed_tokens": sum(one.recomputed_tokens for one in receipts),
        "octavo.peak_blocks": max(one.peak_blocks for one in receipts),
    }
    for names, value in _SPANS:
        spans = [span for one in receipts if (span := value(one)) is not None]
        if spans:
            attributes |= dict.fromkeys(names, max(spans))
    return attributes


def _between(start_s: float | None, stop_s: float | None) -> float | None:
    return None if start_s is None or stop_s is None else stop_s - start_s


_SPANS: tuple[tuple[tuple[str, ...], Callable[[Receipt], float | None]], ...] = (
    (
        ("gen_ai.server.time_to_first_token", "gen_ai.latency.time_to_first_token"),
        lambda one: _between(one.arrival_s, one.first_token_s),
    ),
    (("gen_ai.server.time_per_output_token",), time_per_output_token),
    (("gen_ai.latency.time_in_queue",), lambda one: _between(one.arrival_s, one.admitted_s)),
    (
        ("gen_ai.latency.time_in_model_prefill",),
        lambda one: _between(one.admitted_s, one.first_token_s),
    ),
    (
        ("gen_ai.latency.time_in_model_decode",),
        lambda one: _between(one.first_token_s, one.finished_s),
    ),
    (
        ("gen_ai.latency.time_in_model_inference",),
        lambda one: _between(one.admitted_s, one.finished_s),
    ),
)
"""Names of a duration in seconds, and what it is."""


def events(receipts: Sequence[Receipt]) -> list[tuple[float, str, Attributes]]:
    """(time, name, attributes) of what happened to the answers, in order."""
    told: list[tuple[float, str, Attributes]] = []
    for number, one in enumerate(receipts):
        answer = {"octavo.answer": number}
        if one.admitted_s is not None:
            told.append((one.admitted_s, "octavo.admitted", answer))
        if one.first_token_s is not None:
            told.append((one.first_token_s, "octavo.first_token", answer))
        told += [
            (each.at_s, "octavo.preempted", {**answer, **_reason(each)})
            for each in one.interruptions
        ]
    return sorted(told, key=lambda event: event[0])


def _reason(interruption: Interruption) -> Attributes:
    if interruption.mode == "engine_died":
        return {"octavo.preemption.reason": "the engine died"}
    return {
        "octavo.preemption.reason": f"{interruption.beneficiary} needed its blocks",
        "octavo.preemption.beneficiary": interruption.beneficiary,
        "octavo.preemption.mode": interruption.mode,
        "octavo.preemption.blocks": interruption.blocks,
    }


def tracing_to(endpoint: str, model_name: str, version: str) -> Tracing:
    """Spans that go to a collector over HTTP.

    Raises   ConfigError: the extra is not installed, or this is no address.
    """
    address = traces_address(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "otlp_endpoint needs OpenTelemetry, which is not installed: pip install 'octavo[otel]'"
        ) from error
    about = Resource.create({SERVICE_VERSION: version})
    if str(about.attributes.get(SERVICE_NAME)).startswith("unknown_service"):
        about = about.merge(Resource({SERVICE_NAME: "octavo"}))
    provider = TracerProvider(resource=about)
    exporter = OTLPSpanExporter(endpoint=address, timeout=SEND_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, model_name, version=version)


def traces_address(endpoint: str) -> str:
    """Where spans are sent: to a collector's usual place, if no path is given.

    >>> traces_address("http://127.0.0.1:4318")
    'http://127.0.0.1:4318/v1/traces'
    """
    parts = urlsplit(endpoint)
    if "@" in parts.netloc:  # settings are logged, so it is not repeated here either
        raise ConfigError(
            "otlp_endpoint holds a user or a password; OTEL_EXPORTER_OTLP_HEADERS is for those"
        )
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"otlp_endpoint is {endpoint!r}: it must be an address such as http://127.0.0.1:4318"
        )
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
