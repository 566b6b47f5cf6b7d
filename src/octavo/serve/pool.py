"""GET /debug/pool and what belongs to it: the pool as it is now, for the page and for scripts.

No token of a prompt or an answer is in any of it, only ids of requests and numbers of blocks.
"""

import gzip
import ipaddress

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.view import MOVING, PINNED, STATE_BITS, STATES, OwnerView
from octavo.engine.showing import PoolShown
from octavo.errors import InvalidRequest
from octavo.serve.errors import json_response
from octavo.serve.frame import document, frame
from octavo.serve.health import status_of
from octavo.serve.history import EVERY_S, Point
from octavo.serve.service import Service
from octavo.serve.stream import while_connected

KEY_CHARACTERS = 16
"""Of the key of a prefix: enough to tell it from others."""
FRAME_TYPE = "application/x-octavo-pool"
_NO_STORE = {"cache-control": "no-store", "vary": "accept-encoding"}


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One block.

    `key` is that of the prefix of `prefix_tokens` tokens that it ends, `evicted_after` how many
    cached blocks go before it. It was last given to a request `given_ago_s` ago.
    """

    block: int
    state: str
    pinned: bool
    moving: bool
    epoch: int
    owners: tuple[OwnerView, ...]
    key: str
    prefix_tokens: int
    evicted_after: int | None
    given_ago_s: float | None


class Recent(msgspec.Struct, frozen=True, kw_only=True):
    """Points of the history, `every_s` apart, and the state of the server as /health says it."""

    status: str
    every_s: float
    fields: tuple[str, ...] = Point.__struct_fields__
    points: tuple[Point, ...]


async def show_pool(service: Service, request: Request) -> Response:
    picture = await service.watch.picture()
    body = await picture.form(document)
    return Response(body, headers=_NO_STORE, media_type="application/json")


async def show_frame(service: Service, request: Request) -> Response:
    """The first picture after the one that the page has, `?after=N`, when there is one."""
    after = _whole(request.query_params.get("after", "0"), "after")
    picture = await while_connected(request.receive, service.watch.picture(after))
    if _is_far(request):
        body = await picture.form(_packed_frame)
        headers = {**_NO_STORE, "content-encoding": "gzip"}
        return Response(body, headers=headers, media_type=FRAME_TYPE)
    return Response(await picture.form(frame), headers=_NO_STORE, media_type=FRAME_TYPE)


def _packed_frame(number: int, shown: PoolShown) -> bytes:
    return gzip.compress(frame(number, shown), 1)


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise InvalidRequest(f"{name} must be a whole number, not {text!r}", param=name)
    return int(text)


def _is_far(request: Request) -> bool:
    """Whether bytes cost more than the time to pack them: not on the same machine."""
    if "gzip" not in request.headers.get("accept-encoding", "") or request.client is None:
        return False
    try:
        return not ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


async def show_block(service: Service, request: Request) -> Response:
    shown = await service.client.show_block(_whole(request.path_params["block"], "block"))
    view = shown.view
    return json_response(
        Block(
            block=view.block,
            state=STATES[view.cell & STATE_BITS],
            pinned=bool(view.cell & PINNED),
            moving=bool(view.cell & MOVING),
            epoch=view.epoch,
            owners=view.owners,
            key=view.key[:KEY_CHARACTERS],
            prefix_tokens=view.prefix_tokens,
            evicted_after=view.evicted_after,
            given_ago_s=shown.given_ago_s,
        )
    )


async def show_history(service: Service, request: Request) -> Response:
    """The points after `?after=S`, in seconds since 1970; all that are kept without it."""
    after = request.query_params.get("after", "0")
    try:
        after_s = float(after)
    except ValueError as error:
        raise InvalidRequest(f"after must be a number, not {after!r}", param="after") from error
    service.history.take(service.client.status())
    points = service.history.since(after_s)
    return json_response(Recent(status=status_of(service), every_s=EVERY_S, points=points))
