"""The guard: before anything else happens, who calls, and whether they may.

Everything is denied unless it is listed: a path that has no right here needs that of an admin.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import Forbidden, OctavoError, Unauthorized
from octavo.serve.errors import on_octavo_error
from octavo.serve.keys import Keyring, Permit, Right, Visit, offered

RIGHTS: Mapping[str, Right] = {
    "/": "open",
    "/web/{name}": "open",
    "/health": "open",
    "/health/live": "open",
    "/health/ready": "open",
    "/v1/chat/completions": "use",
    "/v1/completions": "use",
    "/v1/messages": "use",
    "/v1/messages/count_tokens": "use",
    "/v1/responses": "use",
    "/v1/models": "use",
    "/v1/models/{name:path}": "use",
    "/openapi.json": "use",
    "/tokenize": "use",
    "/detokenize": "use",
    "/version": "use",
    "/api/chat": "use",
    "/api/generate": "use",
    "/api/tags": "use",
    "/api/ps": "use",
    "/api/show": "use",
    "/api/version": "use",
    "/metrics": "metrics",
    "/admin/limits": "admin",
    "/admin/cache/flush": "admin",
    "/admin/drain": "admin",
    "/debug/cache": "admin",
    "/debug/history": "admin",
    "/debug/pool": "admin",
    "/debug/pool/blocks/{block}": "admin",
    "/debug/pool/frame": "admin",
    "/debug/requests": "admin",
    "/debug/requests/{id}": "admin",
}
"""What each path needs while keys are in force; one without its /v1 needs the same."""

ANYBODY = Visit()
STRANGER = Visit(Permit(rights=frozenset(("open",))))

_VISIT = "octavo.visit"


class Guard:
    """An application around another, which lets in only who has a key with the right for the path.

    `routes` are those of the application: the path is found as the application finds it.
    """

    def __init__(self, app: ASGIApp, *, keyring: Keyring, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._keyring = keyring
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            try:
                await self._let_in(self._admitted(scope), scope, receive, send)
            except OctavoError as error:  # raised here: the application answers its own
                response = await on_octavo_error(Request(scope), error)
                await response(scope, receive, send)

    async def _let_in(self, visit: Visit, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_VISIT] = visit
        with ExitStack() as under_way:
            if visit.meter is not None:
                under_way.enter_context(visit.meter.request())

            async def sent(message: Message) -> None:
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    under_way.close()  # whoever has read all of it may ask again at once
                await send(message)

            await self._app(scope, receive, sent)

    def _admitted(self, scope: Scope) -> Visit:
        """Raises  Unauthorized, Forbidden."""
        right = right_for(scope, self._routes)
        secrets = offered(scope["headers"])
        visit = self._keyring.find(secrets)
        if right == "open":
            return STRANGER if visit is None else Visit(visit.permit)
        if visit is None:
            what = "this API key is not known here" if secrets else "an API key is needed"
            raise Unauthorized(
                f"{what}; send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
        if right not in visit.permit.rights:
            raise Forbidden(f"this path needs an API key with the right {right!r}")
        return visit if right == "use" else Visit(visit.permit)


def visit_of(scope: Scope) -> Visit:
    """Whoever makes this request; anybody when there is no guard."""
    visit: Visit = scope.get(_VISIT, ANYBODY)
    return visit


def right_for(scope: Scope, routes: Sequence[BaseRoute]) -> Right:
    """What the path needs. To learn that there is none, any key will do."""
    matches = [(route.matches(scope)[0], route) for route in routes]
    for wanted in (Match.FULL, Match.PARTIAL):
        for match, route in matches:
            if match is wanted:
                return listed_right(getattr(route, "path", ""))
    return "use"


def listed_right(path: str) -> Right:
    """What a route needs, by its path as it is written."""
    return RIGHTS.get(path) or RIGHTS.get(f"/v1{path}", "admin")
