"""GET /openapi.json: the endpoints as an OpenAPI document, made from the records that they use.

Field by field it says what is taken: a field that is not supported is listed with the values that
ask for nothing. Ranges are not in it; what is out of range is refused by name.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.serve.dialect import Dialect, dialect_of
from octavo.serve.requests import Body, JsonObject, SamplingFields
from octavo.serve.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]

_REFERENCE = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path. Of several `reads` a body is one or the other; `answers` is what a
    response holds, None for plain text. `streams` says in which form an answer may be streamed."""

    path: str
    handler: Handler
    method: str = "GET"
    reads: Sequence[Body[Any]] = ()
    free_form: bool = False
    """The body is an object with keys that are not listed here."""
    answers: type | None
    streams: Dialect | None = None


def document(endpoints: Iterable[Endpoint], version: str) -> JsonObject:
    """The OpenAPI document."""
    endpoints = tuple(endpoints)
    errors = [_error_of(one.path) for one in endpoints]
    shapes = [body.shape for one in endpoints for body in one.reads]
    answers = [one.answers for one in endpoints if one.answers is not None]
    kinds = list(dict.fromkeys((*shapes, *answers, *errors, SamplingFields)))
    references, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    named = {kind: _name(reference) for kind, reference in zip(kinds, references, strict=True)}
    sampling: JsonObject = components.pop(named[SamplingFields])["properties"]
    for body in (body for one in endpoints for body in one.reads):
        components[named[body.shape]] = _body(components[named[body.shape]], body, sampling)
    paths: dict[str, JsonObject] = {}
    for one in endpoints:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, path, named)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }


def shown(endpoints: Iterable[Endpoint], version: str) -> Handler:
    """A handler that shows the document, which is made when it is first asked for."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(document(endpoints, version))

    async def show_document(service: Service, request: Request) -> Response:
        return Response(encoded(), media_type="application/json")

    return show_document


def _operation(one: Endpoint, path: str, named: Mapping[type, str]) -> JsonObject:
    operation: JsonObject = {
        "operationId": "_".join([one.method.lower(), *re.findall(r"\w+", path)]),
        "summary": (one.handler.__doc__ or path).partition("\n")[0],
        "responses": {
            "200": {"description": "The answer", "content": _contents(one, named)},
            "default": {
                "description": "What went wrong",
                "content": _json(_reference(named[_error_of(path)])),
            },
        },
    }
    if names := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if one.reads:
        bodies = [_reference(named[body.shape]) for body in one.reads]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        operation["requestBody"] = {"required": True, "content": _json(schema)}
    elif one.free_form:
        operation["requestBody"] = {"required": True, "content": _json({"type": "object"})}
    return operation


def _error_of(path: str) -> type:
    kind: type = get_type_hints(dialect_of(path).error)["return"]
    return kind


def _contents(one: Endpoint, named: Mapping[type, str]) -> JsonObject:
    contents = (
        {"text/plain": {"schema": {"type": "string"}}}
        if one.answers is None
        else _json(_reference(named[one.answers]))
    )
    if one.streams is not None:
        media_type = one.streams.media_type.decode().partition(";")[0]
        contents[media_type] = {}
    return contents


def _body(own: JsonObject, body: Body[Any], sampling: JsonObject) -> JsonObject:
    """The schema of a body: its own fields, those that say how to answer, and the neutral ones.
    Null is the same as absent."""
    required = own.get("required", [])
    properties = own["properties"] | body.details
    properties |= {name: sampling[ours] for name, ours in body.names.items()}
    return {
        "type": "object",
        "title": own["title"],
        "properties": {
            **{
                name: schema if name in required else {"anyOf": [schema, {"type": "null"}]}
                for name, schema in sorted(properties.items())
            },
            **{
                name: {"enum": [None, *values], "description": "Not supported."}
                for name, values in sorted(body.neutral.items())
            },
        },
        "required": required,
        "additionalProperties": False,
    }


def _json(schema: JsonObject) -> JsonObject:
    return {"application/json": {"schema": schema}}


def _reference(name: str) -> JsonObject:
    return {"$ref": _REFERENCE.format(name=name)}


def _name(reference: JsonObject) -> str:
    return str(reference["$ref"]).rpartition("/")[2]
