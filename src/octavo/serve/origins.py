"""Pages of other origins: what a browser may ask of this server on behalf of one.

A browser sends some requests to any address whatever page asks for them, and says from which origin
in a header; that it hides the answer does not undo what the request did. So a request of another
origin that is not allowed is refused before anything is done.
"""

import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import ConfigError, Forbidden
from octavo.serve.errors import on_octavo_error

EVERY = "*"


class OwnOrigin:
    """An application around another, for pages of its own address, and of those in `allowed`."""

    def __init__(self, app: ASGIApp, *, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may(Headers(scope=scope)):
            error = Forbidden("pages of this origin may not use this server; see allowed_origins")
            response = await on_octavo_error(Request(scope), error)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may(self, headers: Headers) -> bool:
        origins = headers.getlist("origin")
        return EVERY in self._allowed or all(
            origin in self._allowed or _address(origin) == headers.get("host") for origin in origins
        )


def _address(origin: str) -> str | None:
    """Host and port of an origin; whoever ends TLS before this server changes the scheme."""
    scheme, found, address = origin.partition("://")
    return address if found and scheme in ("http", "https") else None


def check_origins(origins: Collection[str]) -> None:
    """Raises  ConfigError: one is no origin."""
    for origin in origins:
        if origin != EVERY and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ConfigError(
                f"allowed_origins: {origin!r} is no origin; give scheme and host, as"
                " https://chat.example.org, or *"
            )
