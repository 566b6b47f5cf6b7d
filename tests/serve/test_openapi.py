"""The served OpenAPI document, and what schemathesis makes of it."""

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.serve.scripted import Served

from octavo.serve.app import ENDPOINTS

OPERATIONS = [
    (mode, one.method, one.path.replace(":path", ""))
    for one in ENDPOINTS
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or one.reads or one.free_form
]
ASKED = {"messages", "prompt", "input", "max_tokens", "tokens"}
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
"""Of what fits the document not all is taken: ranges are not in it."""


@pytest.fixture(scope="module")
def document(_server: Served) -> Any:
    return schemathesis.openapi.from_url(f"{_server.url}/openapi.json")


@pytest.mark.parametrize(("mode", "method", "path"), OPERATIONS)
def test_no_request_breaks_the_server(
    document: Any, served: Served, mode: GenerationMode, method: str, path: str
) -> None:
    """Requests that fit the document, and such that do not: each gets an answer that does."""
    operation = document[path][method]

    @given(case=operation.as_strategy(generation_mode=mode), data=strategies.data())
    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    def answered(case: schemathesis.Case, data: strategies.DataObject) -> None:
        if isinstance(case.body, dict):
            case.body = few_of(case.body, data)
        case.call_and_validate(checks=CHECKS)

    answered()


def few_of(body: dict[str, Any], data: strategies.DataObject) -> dict[str, Any]:
    """What is asked, with three other fields at most: hardly any request with all of them would
    come further."""
    others = sorted(body.keys() - ASKED)
    kept = (
        data.draw(strategies.lists(strategies.sampled_from(others), max_size=3)) if others else []
    )
    fields = {name: value for name, value in body.items() if name in ASKED or name in kept}
    return fields | ({"model": "scripted"} if "model" in fields else {})


def test_every_path_is_in_the_document(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert document["info"]["version"] == "1.2.3"
    told = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    assert told == {(method, path) for _, method, path in OPERATIONS}
    names = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(names) == len(set(names))


def test_every_field_is_in_the_document(http: httpx.Client) -> None:
    """Those of the body, under the names of the API, and those that are not supported."""
    document = http.get("/openapi.json").json()
    for one in ENDPOINTS:
        if len(one.reads) != 1:
            continue
        (body,) = one.reads
        operation = document["paths"][one.path][one.method.lower()]
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = document["components"]["schemas"][name.rpartition("/")[2]]
        properties = schema["properties"]
        assert properties.keys() == {*body.shape.__struct_fields__, *body.names, *body.neutral}
        assert schema["additionalProperties"] is False
        for field, values in body.neutral.items():
            assert properties[field]["enum"] == [None, *values]
        for field in properties.keys() - body.neutral.keys() - set(schema["required"]):
            assert {"type": "null"} in properties[field]["anyOf"]
