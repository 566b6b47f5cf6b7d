"""GET /debug/requests and /debug/requests/{id}: why a request of this server took its time.

The same as `octavo explain` gives from a journal, from the last requests kept in the memory of the
engine that is at work now. No token of a prompt or an answer is in it.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import UnknownRequest
from octavo.observe.explain import Account
from octavo.serve.errors import json_response
from octavo.serve.service import Service


class Accounts(msgspec.Struct, frozen=True, kw_only=True):
    """Stories, phases and blocks over time are left out; ask for one request to see them."""

    requests: list[Account]


class Told(msgspec.Struct, frozen=True, kw_only=True):
    request: Account


async def list_requests(service: Service, request: Request) -> Response:
    """Every live request and the last that ended, in order of arrival."""
    return json_response(Accounts(requests=list(await service.client.accounts())))


async def show_request(service: Service, request: Request) -> Response:
    """The life of one request, by its id with or without the prefix of the API, or by a beginning
    of it that no other has."""
    name = request.path_params["id"]
    found = await service.client.find_account(name)
    if found is None:
        raise UnknownRequest(f"no request {name!r} among those kept; /debug/requests lists them")
    return json_response(Told(request=found))
