"""Errors in OpenAI's shape, whatever raised them."""

import logging

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.errors import (
    EngineError,
    EngineStopped,
    OctavoError,
    Overloaded,
    RequestError,
    UnknownRoute,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1

MAX_MESSAGE_CHARACTERS = 500
"""Messages quote what the client sent; an answer must not grow with it."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail


def body_of(error: Exception) -> ErrorBody:
    """What the client reads. An error nobody foresaw says nothing about our insides."""
    known = error if isinstance(error, OctavoError) else EngineError("the server failed")
    detail = ErrorDetail(
        message=_shortened(known.message),
        type=known.kind,
        param=known.param and _shortened(known.param),
        code=known.code,
    )
    return ErrorBody(error=detail)


def _shortened(text: str) -> str:
    if len(text) <= MAX_MESSAGE_CHARACTERS:
        return text
    half = MAX_MESSAGE_CHARACTERS // 2
    return f"{text[:half]} … {text[-half:]}"


def json_response(content: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def on_octavo_error(request: Request, error: Exception) -> Response:
    """An error raised on purpose; those that are the caller's are counted."""
    assert isinstance(error, OctavoError)
    if isinstance(error, RequestError):
        request.app.state.metrics.refused(error.code or error.kind)
    response = json_response(body_of(error), error.status)
    if isinstance(error, Overloaded | EngineStopped):
        response.headers["retry-after"] = str(RETRY_AFTER_S)
    return response


async def on_http_exception(request: Request, error: Exception) -> Response:
    """No route, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return await on_octavo_error(request, UnknownRoute(f"there is no {request.url.path} here"))
    detail = ErrorDetail(
        message=_shortened(f"{request.url.path} does not take {request.method}"),
        type="invalid_request_error",
        param=None,
        code="method_not_allowed",
    )
    response = json_response(ErrorBody(error=detail), error.status_code)
    response.headers.update(error.headers or {})
    return response


async def on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; the status is for the access log."""
    return Response(status_code=499)


async def on_any(request: Request, error: Exception) -> Response:
    """An error nobody foresaw; the server logs it after this."""
    return json_response(body_of(error), 500)


HANDLERS = {
    OctavoError: on_octavo_error,
    HTTPException: on_http_exception,
    ClientDisconnect: on_client_gone,
    Exception: on_any,
}
