"""/admin/limits and /admin/cache/flush: what an operator may change while the server runs."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.budget import Limits
from octavo.engine.limits import named
from octavo.errors import InvalidRequest
from octavo.serve.errors import json_response
from octavo.serve.requests import json_object, read_body
from octavo.serve.service import Service


class LimitsInForce(msgspec.Struct, frozen=True, kw_only=True):
    """The limits by the names of their settings, and how far those that have a ceiling can be
    raised."""

    limits: dict[str, Any]
    ceilings: dict[str, int]


class Flushed(msgspec.Struct, frozen=True, kw_only=True):
    """How many blocks the prefix cache held, in use or not, until now."""

    blocks_flushed: int


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


def _in_force(service: Service, limits: Limits) -> Response:
    ceilings = named(service.client.status().ceilings)
    return json_response(LimitsInForce(limits=named(limits), ceilings=ceilings))
