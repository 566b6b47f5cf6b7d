"""The entry: the application that stands at the address while the model loads.

/health         503, `loading`, and which phase it is in
/health/ready   503
/health/live    200: another server would take as long
all others      503 with Retry-After
"""

import math

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import EngineLoading
from octavo.serve.dialect import dialect_of
from octavo.serve.errors import json_response
from octavo.serve.health import Health


class Entry:
    """Says that the model is loading until it is `opened` to the application that has it."""

    def __init__(self) -> None:
        self.phase = "tokenizer"
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        """From now on `app` answers."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._loading(Request(scope)) if self._app is None else self._app
        await answer(scope, receive, send)

    def _loading(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if path in ("/health", "/health/ready", "/health/live"):
            live = path == "/health/live"
            return json_response(Health(status="loading", phase=self.phase), 200 if live else 503)
        error = EngineLoading(f"the model is loading ({self.phase}); try again in a moment")
        response = json_response(dialect_of(path).error(error), error.status)
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s or 1))
        return response
