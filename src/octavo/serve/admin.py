"""/admin/limits, /admin/cache/flush, /admin/drain: what an operator may change while it runs."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.budget import Limits
from octavo.engine.limits import named
from octavo.errors import InvalidRequest
from octavo.serve.errors import json_response
from octavo.serve.requests import Body, json_object, parse, read_body
from octavo.serve.service import Service


class LimitsInForce(msgspec.Struct, frozen=True, kw_only=True):
    """The limits by the names of their settings, and how far those that have a ceiling can be
    raised."""

    limits: dict[str, Any]
    ceilings: dict[str, int]


class Flushed(msgspec.Struct, frozen=True, kw_only=True):
    """How many blocks the prefix cache held, in use or not, until now."""

    blocks_flushed: int


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """With `exit` the server ends when all answers are complete, or after its drain timeout."""

    exit: bool = False


DRAIN_BODY = Body(shape=DrainRequest)


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the server takes no new requests, whether it ends, and how many are under way."""

    draining: bool
    exit: bool
    under_way: int


async def show_limits(service: Service, request: Request) -> Response:
    return _in_force(service, service.client.status().limits)


async def change_limits(service: Service, request: Request) -> Response:
    """Set the limits that the body names, all or none; the answer has all that hold now."""
    changes = json_object(await read_body(request, service.settings.max_body_bytes))
    if not changes:
        raise InvalidRequest("the body names no limit; GET shows which there are")
    return _in_force(service, await service.client.change_limits(changes))


async def flush_cache(service: Service, request: Request) -> Response:
    """Let no later request find what was computed before; those under way go on."""
    return json_response(Flushed(blocks_flushed=await service.client.flush()))


async def drain(service: Service, request: Request) -> Response:
    """Take no new requests; those under way are finished."""
    body = await read_body(request, service.settings.max_body_bytes)
    asked, _ = parse(body or b"{}", DRAIN_BODY, service.settings.defaults)
    service.client.drain()
    if asked.exit:
        service.settings.stop_asked.set()
    return _drained(service)


async def end_drain(service: Service, request: Request) -> Response:
    """Take requests again."""
    if service.settings.stop_asked.is_set():
        raise InvalidRequest("the server is about to end; start another")
    service.client.drain(False)
    return _drained(service)


async def show_drain(service: Service, request: Request) -> Response:
    return _drained(service)


def _drained(service: Service) -> Response:
    return json_response(
        Drained(
            draining=service.client.draining,
            exit=service.settings.stop_asked.is_set(),
            under_way=service.open_answers,
        )
    )


def _in_force(service: Service, limits: Limits) -> Response:
    ceilings = named(service.client.status().ceilings)
    return json_response(LimitsInForce(limits=named(limits), ceilings=ceilings))
