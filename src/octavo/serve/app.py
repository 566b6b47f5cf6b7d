"""The HTTP application: which path leads where."""

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.engine.door import Door
from octavo.observe.metrics import Facts, Metrics
from octavo.observe.tracing import Tracing
from octavo.serve import ollama, ollama_models
from octavo.serve.admin import change_limits, flush_cache, show_limits
from octavo.serve.cache import explain_cache
from octavo.serve.chat import create_chat_completion
from octavo.serve.completions import create_completion
from octavo.serve.debug import list_requests, show_request
from octavo.serve.errors import HANDLERS
from octavo.serve.guard import Guard, visit_of
from octavo.serve.health import show_health, show_live, show_metrics, show_ready, show_version
from octavo.serve.messages import count_tokens, create_message
from octavo.serve.models import list_models, show_model
from octavo.serve.responses import create_response
from octavo.serve.service import Client, ServeSettings, Service
from octavo.serve.tokenize import detokenize, tokenize
from octavo.serve.tracing import CallerKept

Handler = Callable[[Service, Request], Awaitable[Response]]


def create_app(
    client: Client, door: Door, settings: ServeSettings, *, tracing: Tracing | None = None
) -> Starlette:
    """An ASGI application that answers from `client`. Starting and closing that is the caller's.

    `tracing` makes a span of each request.
    """
    metrics = Metrics(
        Facts(
            model_name=settings.model_names[0],
            version=settings.version,
            max_model_len=door.max_model_len,
            cache=settings.cache_facts,
        )
    )
    service = Service(client, door, settings, metrics, tracing=tracing)
    endpoints = (
        ("/v1/chat/completions", "POST", create_chat_completion),
        ("/v1/completions", "POST", create_completion),
        ("/v1/messages", "POST", create_message),
        ("/v1/messages/count_tokens", "POST", count_tokens),
        ("/v1/responses", "POST", create_response),
        ("/v1/models", "GET", list_models),
        ("/v1/models/{name:path}", "GET", show_model),
        ("/tokenize", "POST", tokenize),
        ("/detokenize", "POST", detokenize),
        ("/api/chat", "POST", ollama.chat),
        ("/api/generate", "POST", ollama.generate),
        ("/api/tags", "GET", ollama_models.list_tags),
        ("/api/ps", "GET", ollama_models.list_running),
        ("/api/show", "POST", ollama_models.show_model),
        ("/api/version", "GET", ollama_models.show_version),
        ("/health", "GET", show_health),
        ("/health/live", "GET", show_live),
        ("/health/ready", "GET", show_ready),
        ("/metrics", "GET", show_metrics),
        ("/version", "GET", show_version),
        ("/admin/limits", "GET", show_limits),
        ("/admin/limits", "PATCH", change_limits),
        ("/admin/cache/flush", "POST", flush_cache),
        ("/debug/cache", "POST", explain_cache),
        ("/debug/requests", "GET", list_requests),
        ("/debug/requests/{id}", "GET", show_request),
    )
    routes = [
        Route(place, _endpoint(service, handler), methods=[method])
        for path, method, handler in endpoints
        for place in _places(path)
    ]
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.state.metrics = metrics
    if tracing is not None:
        app.add_middleware(CallerKept)
    if settings.keyring is not None:
        app.add_middleware(Guard, keyring=settings.keyring, routes=routes)
    return app


def _endpoint(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service.for_visit(visit_of(request.scope)), request)

    return endpoint


def _places(path: str) -> tuple[str, ...]:
    """Where a path is served: also without its /v1, which clients are often told to leave out."""
    return (path, path.removeprefix("/v1")) if path.startswith("/v1/") else (path,)
