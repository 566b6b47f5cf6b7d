"""What a client reads when something went wrong, whatever raised it, in the dialect of the path."""

import logging
import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.errors import (
    MethodNotAllowed,
    OctavoError,
    RequestError,
    Unauthorized,
    UnknownRoute,
)
from octavo.serve.dialect import Dialect, dialect_of

logger = logging.getLogger(__name__)


def json_response(content: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def on_octavo_error(request: Request, error: Exception) -> Response:
    """An error raised on purpose; those that are the caller's are counted."""
    assert isinstance(error, OctavoError)
    if isinstance(error, RequestError):
        request.app.state.metrics.refused(error.code or error.kind)
    response = json_response(_dialect(request).error(error), error.status)
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        response.headers["www-authenticate"] = "Bearer"
    return response


async def on_http_exception(request: Request, error: Exception) -> Response:
    """No route, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return await on_octavo_error(request, UnknownRoute(f"there is no {request.url.path} here"))
    refusal = MethodNotAllowed(f"{request.url.path} does not take {request.method}")
    response = await on_octavo_error(request, refusal)
    response.headers.update(error.headers or {})
    return response


async def on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; the status is for the access log."""
    return Response(status_code=499)


async def on_any(request: Request, error: Exception) -> Response:
    """An error nobody foresaw; the server logs it after this."""
    return json_response(_dialect(request).error(error), 500)


def _dialect(request: Request) -> Dialect:
    """That of the path below the root at which a proxy shows this server."""
    root: str = request.scope.get("root_path", "")
    return dialect_of(request.scope["path"].removeprefix(root))


HANDLERS = {
    OctavoError: on_octavo_error,
    HTTPException: on_http_exception,
    ClientDisconnect: on_client_gone,
    Exception: on_any,
}
