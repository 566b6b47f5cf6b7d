"""HTTP/1.1 on a connection, with bounds on what one may say, how long it may take, and how many
there may be.

    made ──▶ a request arrives ──▶ it is complete ──▶ answered ──▶ idle ──▶ a request arrives …
       └──── within receive_s ────┘                                └ within uvicorn's keep-alive
"""

import asyncio
from asyncio.events import TimerHandle
from dataclasses import dataclass
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.errors import OctavoError, ReceiveTimeout, TooManyConnections
from octavo.serve.dialect import openai_error

MAX_HEAD_BYTES = 64 * 1024

LINGER_S = 1.0
"""How long who is still sending may take to read that nobody listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """At most so many `connections` at once; a request has arrived within `receive_s`."""

    connections: int = 1000
    receive_s: float = 60.0


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection that sends more than `MAX_HEAD_BYTES` which are not of a body, or takes too
    long to send a request; a connection beyond the most is answered with status 503 at once.

    The parser keeps an unfinished line or header for as long as it grows. What arrives in one read
    together with a body is not counted, so a head may be up to one read larger.
    """

    def __init__(self, *arguments: Any, bounds: Bounds | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bounds = bounds or Bounds()
        self._head_bytes = 0
        self._turned_away = False
        self._timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._bounds.connections:
            self.transport = transport
            self._turn_away()
            return
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._turned_away:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.logger.warning("A request whose head is too large.")
            self.send_400_response("The head of the request is too large.")
        if self._idle:
            self._expect()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._expect_nothing()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            # The rest of the request is read for nothing, and may have no end.
            self._expect_nothing()
            self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

    # --- who takes too long

    @property
    def _idle(self) -> bool:
        """Nothing is under way, and nothing would end it: empty lines came between two requests."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not self._timer and not self.timeout_keep_alive_task

    def _expect(self) -> None:
        """From now on a request has to arrive; the time of one that does already goes on."""
        if self._timer is None:
            self._timer = self.loop.call_later(self._bounds.receive_s, self._give_up)

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused or self.pipeline:  # it is we who do not read
            self._expect()
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self._say(
                ReceiveTimeout(f"the request did not arrive within {self._bounds.receive_s:g} s")
            )
        self.transport.close()

    # --- who is one too many

    def _turn_away(self) -> None:
        """Closing at once would take the answer back while the other side is still sending."""
        self._turned_away = True
        most = self._bounds.connections
        self._say(TooManyConnections(f"{most} connections are open, and no more are taken"))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.transport.close()

    def _say(self, error: OctavoError) -> None:
        body = msgspec.json.encode(openai_error(error))
        head = [
            b"HTTP/1.1 %d %s" % (error.status, _REASONS[error.status]),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        ]
        if error.retry_after_s is not None:
            head.append(b"retry-after: %d" % round(error.retry_after_s))
        self.transport.write(b"\r\n".join([*head, b"", body]))


_REASONS = {408: b"Request Timeout", 503: b"Service Unavailable"}
