"""GET /health with its probes, /metrics and /version: for operators and their machines."""

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.observe.metrics import CONTENT_TYPE
from octavo.serve.errors import json_response
from octavo.serve.service import Service


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is loading (with what the server loads just now as its `phase`), ok, draining,
    stalled (work, but no steps), restarting (the engine has died, and another is on its way; what
    it had to do goes on there) or dead (it will not come again). The numbers are for those who may
    read the metrics."""

    status: str
    phase: str | UnsetType = UNSET
    running: int | UnsetType = UNSET
    waiting: int | UnsetType = UNSET
    blocks_free: int | UnsetType = UNSET
    blocks_cached: int | UnsetType = UNSET
    """Blocks of the prefix cache that no request holds: as good as free when blocks run out."""
    blocks_total: int | UnsetType = UNSET


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str


async def show_health(service: Service, request: Request) -> Response:
    """200 while new requests are taken and the engine makes progress, else 503."""
    state = service.client.status()
    status = status_of(service)
    code = 200 if status == "ok" else 503
    if "metrics" not in service.visit.permit.rights:
        return json_response(Health(status=status), code)
    health = Health(
        status=status,
        running=state.running,
        waiting=state.waiting,
        blocks_free=state.blocks_free,
        blocks_cached=state.blocks_cached,
        blocks_total=state.blocks_total,
    )
    return json_response(health, code)


async def show_live(service: Service, request: Request) -> Response:
    """503 when only another server would help: the engine is stuck, or will not come again."""
    status = status_of(service)
    return json_response(Health(status=status), 503 if status in ("dead", "stalled") else 200)


async def show_ready(service: Service, request: Request) -> Response:
    """503 when requests should go elsewhere for now."""
    status = status_of(service)
    return json_response(Health(status=status), 200 if status == "ok" else 503)


def status_of(service: Service) -> str:
    """`Health.status` as it is now."""
    if service.client.draining:
        return "draining"
    if not service.client.alive:
        return "dead"
    if service.client.restarting:
        return "restarting"
    return "stalled" if service.stalled else "ok"


async def show_metrics(service: Service, request: Request) -> Response:
    body = service.metrics.render(service.client.status())
    return Response(body, media_type=CONTENT_TYPE)


async def show_version(service: Service, request: Request) -> Response:
    return json_response(Version(version=service.settings.version))
