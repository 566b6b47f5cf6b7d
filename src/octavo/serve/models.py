"""GET /v1/models: what is served here."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.serve.errors import json_response
from octavo.serve.service import Service


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """`root` is where the model came from; `max_model_len` is the longest prompt and answer
    together, in tokens."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: tuple[ModelCard, ...]


async def list_models(service: Service, request: Request) -> Response:
    cards = tuple(_card(service, name) for name in service.settings.model_names)
    return json_response(ModelList(data=cards))


async def show_model(service: Service, request: Request) -> Response:
    return json_response(_card(service, service.model_named(request.path_params["name"])))


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=service.started_at,
        root=service.settings.about.reference or name,
        max_model_len=service.door.max_model_len,
    )
