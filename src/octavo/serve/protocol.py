"""HTTP/1.1 on a connection, with a bound on what a request may say before its body."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection that sends more than `MAX_HEAD_BYTES` which are not of a body.

    The parser keeps an unfinished line or header for as long as it grows. What arrives in one read
    together with a body is not counted, so a head may be up to one read larger.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.logger.warning("A request whose head is too large.")
            self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()
