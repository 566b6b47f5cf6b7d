"""The page at /: a chat and the live pool, in plain modules that need nothing from elsewhere."""

import hashlib
from pathlib import Path
from types import MappingProxyType

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import UnknownRoute
from octavo.serve.service import Service

FOLDER = Path(__file__).parent / "web"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES = MappingProxyType({file.name: file for file in FOLDER.iterdir() if file.suffix in _TYPES})

HEADERS = MappingProxyType(
    {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
            " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
)
"""The page may load from this server, and from nowhere else; no other page may hold it."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the page says and does depends on this. `chat`: the model has a chat template."""

    model: str
    version: str
    chat: bool
    max_model_len: int
    architecture: str
    parameters: int
    weights_bytes: int


async def show_page(service: Service, request: Request) -> Response:
    return _file(request, "index.html")


async def show_file(service: Service, request: Request) -> Response:
    """One of the files of the page, or what it wants to know of the server."""
    name = request.path_params["name"]
    if name == "about.json":
        return _about(service)
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    """Raises  UnknownRoute."""
    file = FILES.get(name)
    if file is None:
        raise UnknownRoute(f"there is no {request.url.path} here")
    content = file.read_bytes()
    headers = {**HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[file.suffix])


def _about(service: Service) -> Response:
    settings, door = service.settings, service.door
    about = About(
        model=settings.model_names[0],
        version=settings.version,
        chat=door.has_chat_template,
        max_model_len=door.max_model_len,
        architecture=settings.about.architecture,
        parameters=settings.about.parameters,
        weights_bytes=settings.about.weights_bytes,
    )
    return Response(
        msgspec.json.encode(about), headers=dict(HEADERS), media_type="application/json"
    )
