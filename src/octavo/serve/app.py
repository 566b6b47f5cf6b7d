"""The HTTP application: which path leads where."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.engine.door import Door
from octavo.observe.metrics import Facts, Metrics
from octavo.observe.tracing import Tracing
from octavo.serve import (
    admin,
    cache,
    chat,
    completions,
    debug,
    frame,
    health,
    messages,
    models,
    ollama,
    ollama_models,
    page,
    pool,
    responses,
    tokenize,
)
from octavo.serve.dialect import ANTHROPIC, OLLAMA, OPENAI
from octavo.serve.errors import HANDLERS
from octavo.serve.guard import Guard, visit_of
from octavo.serve.openapi import Endpoint, Handler, shown
from octavo.serve.origins import OwnOrigin
from octavo.serve.service import Client, ServeSettings, Service
from octavo.serve.tracing import CallerKept

ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions",
        method="POST",
        handler=chat.create_chat_completion,
        reads=[chat.BODY],
        answers=chat.ChatCompletion,
        streams=OPENAI,
    ),
    Endpoint(
        path="/v1/completions",
        method="POST",
        handler=completions.create_completion,
        reads=[completions.BODY],
        answers=completions.Completion,
        streams=OPENAI,
    ),
    Endpoint(
        path="/v1/responses",
        method="POST",
        handler=responses.create_response,
        reads=[responses.BODY],
        answers=responses.Response,
        streams=OPENAI,
    ),
    Endpoint(path="/v1/models", handler=models.list_models, answers=models.ModelList),
    Endpoint(path="/v1/models/{name:path}", handler=models.show_model, answers=models.ModelCard),
    Endpoint(
        path="/v1/messages",
        method="POST",
        handler=messages.create_message,
        reads=[messages.BODY],
        answers=messages.Message,
        streams=ANTHROPIC,
    ),
    Endpoint(
        path="/v1/messages/count_tokens",
        method="POST",
        handler=messages.count_tokens,
        reads=[messages.COUNT_BODY],
        answers=messages.TokenCount,
    ),
    Endpoint(
        path="/api/chat",
        method="POST",
        handler=ollama.chat,
        reads=[ollama.CHAT_BODY],
        answers=ollama.Part,
        streams=OLLAMA,
    ),
    Endpoint(
        path="/api/generate",
        method="POST",
        handler=ollama.generate,
        reads=[ollama.GENERATE_BODY],
        answers=ollama.Part,
        streams=OLLAMA,
    ),
    Endpoint(path="/api/tags", handler=ollama_models.list_tags, answers=ollama_models.Tags),
    Endpoint(
        path="/api/ps", handler=ollama_models.list_running, answers=ollama_models.RunningModels
    ),
    Endpoint(
        path="/api/show",
        method="POST",
        handler=ollama_models.show_model,
        reads=[ollama_models.SHOW_BODY],
        answers=ollama_models.Shown,
    ),
    Endpoint(path="/api/version", handler=health.show_version, answers=health.Version),
    Endpoint(
        path="/tokenize",
        method="POST",
        handler=tokenize.tokenize,
        reads=[tokenize.TOKENIZE_BODY],
        answers=tokenize.Tokens,
    ),
    Endpoint(
        path="/detokenize",
        method="POST",
        handler=tokenize.detokenize,
        reads=[tokenize.DETOKENIZE_BODY],
        answers=tokenize.Text,
    ),
    Endpoint(path="/health", handler=health.show_health, answers=health.Health),
    Endpoint(path="/health/live", handler=health.show_live, answers=health.Health),
    Endpoint(path="/health/ready", handler=health.show_ready, answers=health.Health),
    Endpoint(path="/metrics", handler=health.show_metrics, answers=None),
    Endpoint(path="/version", handler=health.show_version, answers=health.Version),
    Endpoint(path="/admin/limits", handler=admin.show_limits, answers=admin.LimitsInForce),
    Endpoint(
        path="/admin/limits",
        method="PATCH",
        handler=admin.change_limits,
        free_form=True,
        answers=admin.LimitsInForce,
    ),
    Endpoint(
        path="/admin/cache/flush",
        method="POST",
        handler=admin.flush_cache,
        answers=admin.Flushed,
    ),
    Endpoint(path="/admin/drain", handler=admin.show_drain, answers=admin.Drained),
    Endpoint(
        path="/admin/drain",
        method="POST",
        handler=admin.drain,
        reads=[admin.DRAIN_BODY],
        answers=admin.Drained,
    ),
    Endpoint(path="/admin/drain", method="DELETE", handler=admin.end_drain, answers=admin.Drained),
    Endpoint(
        path="/debug/cache",
        method="POST",
        handler=cache.explain_cache,
        reads=[chat.BODY, completions.BODY],
        answers=cache.Explained,
    ),
    Endpoint(path="/debug/history", handler=pool.show_history, answers=pool.Recent),
    Endpoint(path="/debug/pool", handler=pool.show_pool, answers=frame.Pool),
    Endpoint(path="/debug/pool/blocks/{block}", handler=pool.show_block, answers=pool.Block),
    Endpoint(path="/debug/requests", handler=debug.list_requests, answers=debug.Accounts),
    Endpoint(path="/debug/requests/{id}", handler=debug.show_request, answers=debug.Told),
)

"""What an OpenAPI document describes."""

PAGE = (
    Endpoint(path="/", handler=page.show_page, answers=None),
    Endpoint(path="/web/{name}", handler=page.show_file, answers=None),
    Endpoint(path="/debug/pool/frame", handler=pool.show_frame, answers=None),
)
"""What only browsers ask for."""


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
    described = Endpoint(
        path="/openapi.json", handler=shown(ENDPOINTS, settings.version), answers=dict[str, Any]
    )
    routes = [
        Route(place, _endpoint(service, one.handler), methods=[one.method])
        for one in (*ENDPOINTS, described, *(PAGE if settings.web else ()))
        for place in _places(one.path)
    ]
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.state.metrics = metrics
    app.state.service = service
    app.state.history = service.history
    if tracing is not None:
        app.add_middleware(CallerKept)
    if settings.keyring is not None:
        app.add_middleware(Guard, keyring=settings.keyring, routes=routes)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST", "PATCH", "DELETE"),
            allow_headers=("*",),
        )
    app.add_middleware(OwnOrigin, allowed=settings.allowed_origins)
    return app


def _endpoint(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service.for_visit(visit_of(request.scope)), request)

    return endpoint


def _places(path: str) -> tuple[str, ...]:
    """Where a path is served: also without its /v1, which clients are often told to leave out."""
    return (path, path.removeprefix("/v1")) if path.startswith("/v1/") else (path,)
