"""GET /api/tags and /api/ps, POST /api/show: what Ollama's clients ask first."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.serve.errors import json_response
from octavo.serve.ollama import served_name
from octavo.serve.requests import Body, Neutral, parse, read_body
from octavo.serve.service import Service
from octavo.units import human_count

NEVER = "9999-12-31T23:59:59Z"
SHOW_NEUTRAL: Neutral = {"options": ({},), "system": ("",), "template": ("",)}


class Details(msgspec.Struct, frozen=True, kw_only=True):
    parent_model: str = ""
    family: str
    families: tuple[str, ...]
    parameter_size: str
    quantization_level: str


class Tag(msgspec.Struct, frozen=True, kw_only=True):
    """`size` is of the weights in memory, in bytes."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    models: tuple[Tag, ...]


class Running(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str = NEVER
    size_vram: int = 0
    context_length: int


class RunningModels(msgspec.Struct, frozen=True, kw_only=True):
    models: tuple[Running, ...]


class ShowRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`name` is what `model` was called before. All there is is told, `verbose` or not."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


SHOW_BODY = Body(shape=ShowRequest, neutral=SHOW_NEUTRAL)


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    modelfile: str
    parameters: str = ""
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: tuple[str, ...] = ("completion",)
    modified_at: str


async def list_tags(service: Service, request: Request) -> Response:
    """Every name under which the model is served."""
    about = service.settings.about
    tags = tuple(
        Tag(
            name=name,
            model=name,
            modified_at=_started(service),
            size=about.weights_bytes,
            digest=about.fingerprint,
            details=_details(service),
        )
        for name in map(_tagged, service.settings.model_names)
    )
    return json_response(Tags(models=tags))


async def list_running(service: Service, request: Request) -> Response:
    """The same names: the model is always there."""
    about = service.settings.about
    running = tuple(
        Running(
            name=name,
            model=name,
            size=about.weights_bytes,
            digest=about.fingerprint,
            details=_details(service),
            context_length=service.door.max_model_len,
        )
        for name in map(_tagged, service.settings.model_names)
    )
    return json_response(RunningModels(models=running))


async def show_model(service: Service, request: Request) -> Response:
    body = await read_body(request, service.settings.max_body_bytes)
    asked, _ = parse(body, SHOW_BODY, service.settings.defaults)
    served_name(service, asked.name if asked.model is None else asked.model)
    about = service.settings.about
    kind = about.architecture
    return json_response(
        Shown(
            modelfile=f"FROM {about.reference}\n",
            template=service.door.tokenizer.chat_template or "",
            details=_details(service),
            model_info={
                "general.architecture": kind,
                "general.parameter_count": about.parameters,
                f"{kind}.context_length": service.door.max_model_len,
            },
            modified_at=_started(service),
        )
    )


def _details(service: Service) -> Details:
    about = service.settings.about
    return Details(
        family=about.architecture,
        families=(about.architecture,),
        parameter_size=human_count(about.parameters),
        quantization_level=about.stored_as,
    )


def _tagged(name: str) -> str:
    """The name with a tag, which Ollama's names always have."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _started(service: Service) -> str:
    started = datetime.fromtimestamp(service.started_at, UTC)
    return started.isoformat().replace("+00:00", "Z")
