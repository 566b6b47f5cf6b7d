"""Who calls, for the spans of their requests: kept for the task that answers an HTTP request, so
that no handler needs to know of it."""

from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.observe.tracing import Caller

_HEADERS = (b"traceparent", b"tracestate", b"baggage")
_CHAT = ("/chat/completions", "/messages", "/responses", "/api/chat")

_caller: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039  (it is frozen)


def caller() -> Caller:
    """Of the HTTP request that is being answered here."""
    return _caller.get()


class CallerKept:
    """An application around another, which finds `caller()` in all that it does for a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _caller.set(_caller_of(scope))
        await self._app(scope, receive, send)


def _caller_of(scope: Scope) -> Caller:
    headers = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in _HEADERS
    }
    is_chat = str(scope["path"]).endswith(_CHAT)
    return Caller("chat" if is_chat else "text_completion", headers)
