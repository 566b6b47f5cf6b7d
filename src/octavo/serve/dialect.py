"""Dialects: how each family of APIs writes its errors and its streams."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from octavo.errors import EngineError, OctavoError, Overloaded

MAX_MESSAGE_CHARACTERS = 500
"""Messages quote what the client sent; an answer must not grow with it."""

_EVENTS = b"text/event-stream; charset=utf-8"
_LINES = b"application/x-ndjson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """`frame` writes one chunk of a stream, `end` is the last of it. `error` makes the body of a
    response that says what went wrong; a stream that fails ends with the same, as a chunk, or with
    what `failure` makes. `alive` says that there is nothing to say yet; empty if it cannot be said.
    """

    media_type: bytes
    frame: Callable[[msgspec.Struct], bytes]
    error: Callable[[Exception], msgspec.Struct]
    failure: Callable[[Exception], tuple[msgspec.Struct, ...]] | None = None
    end: bytes = b""
    alive: bytes = b""

    def last_words(self, error: Exception) -> bytes:
        """What a stream that fails still says."""
        chunks = (self.error(error),) if self.failure is None else self.failure(error)
        return b"".join(map(self.frame, chunks))


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None
    queue_position: int | UnsetType = UNSET
    predicted_queue_s: float | UnsetType = UNSET


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """An error as OpenAI writes it. One that comes of overload says where in the queue the request
    would have been, from 1, and how long it would have waited there, if that can be said."""

    error: ErrorDetail


class MessageErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    error_code: str | None
    param: str | None


class MessageErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    message: str
    details: MessageErrorDetails


class MessageError(msgspec.Struct, frozen=True, kw_only=True):
    """An error as Anthropic writes it."""

    type: str = "error"
    error: MessageErrorDetail


class PlainError(msgspec.Struct, frozen=True, kw_only=True):
    """An error as Ollama writes it."""

    error: str


def openai_error(error: Exception) -> ErrorBody:
    told = known(error)
    detail = ErrorDetail(
        message=shortened(told.message),
        type=told.kind,
        param=told.param and shortened(told.param),
        code=told.code,
    )
    if isinstance(told, Overloaded) and told.queue_position is not None:
        predicted_s = told.predicted_queue_s
        detail = msgspec.structs.replace(
            detail,
            queue_position=told.queue_position,
            predicted_queue_s=UNSET if predicted_s is None else predicted_s,
        )
    return ErrorBody(error=detail)


def anthropic_error(error: Exception) -> MessageError:
    told = known(error)
    return MessageError(
        error=MessageErrorDetail(
            type=_ANTHROPIC_KINDS.get(told.status, "invalid_request_error"),
            message=shortened(told.message),
            details=MessageErrorDetails(
                error_code=told.code, param=told.param and shortened(told.param)
            ),
        )
    )


def ollama_error(error: Exception) -> PlainError:
    return PlainError(error=shortened(known(error).message))


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def known(error: Exception) -> OctavoError:
    """An error nobody foresaw says nothing about our insides."""
    return error if isinstance(error, OctavoError) else EngineError("the server failed")


def shortened(text: str) -> str:
    if len(text) <= MAX_MESSAGE_CHARACTERS:
        return text
    half = MAX_MESSAGE_CHARACTERS // 2
    return f"{text[:half]} … {text[-half:]}"


def data_event(chunk: msgspec.Struct) -> bytes:
    """A server-sent event without a name."""
    return b"data: %b\n\n" % msgspec.json.encode(chunk)


def named_event(chunk: msgspec.Struct) -> bytes:
    """A server-sent event under the name that stands in its `type`."""
    kind: str = chunk.type  # type: ignore[attr-defined]
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(chunk))


def json_line(chunk: msgspec.Struct) -> bytes:
    return msgspec.json.encode(chunk) + b"\n"


OPENAI = Dialect(
    media_type=_EVENTS,
    frame=data_event,
    error=openai_error,
    end=b"data: [DONE]\n\n",
    alive=b": nothing yet\n\n",
)
ANTHROPIC = Dialect(
    media_type=_EVENTS,
    frame=named_event,
    error=anthropic_error,
    alive=b'event: ping\ndata: {"type":"ping"}\n\n',
)
OLLAMA = Dialect(media_type=_LINES, frame=json_line, error=ollama_error)


def dialect_of(path: str) -> Dialect:
    """The dialect in which a path answers, whether there is such a path or not."""
    if path.removeprefix("/v1").startswith("/messages"):
        return ANTHROPIC
    return OLLAMA if path.startswith("/api/") else OPENAI
