"""What an answer must be, from every form in which it is said; limits; what contradicts itself."""

import json
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.text.structured import (
    MAX_BYTES,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_MULTIPLE,
    MAX_PROPERTIES,
    MAX_REGEX_CHARACTERS,
    WHITESPACE,
    Structured,
)

TAG = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}


def schema_of(structured: Structured) -> dict[str, Any]:
    assert structured.definition.kind == "json"
    found: dict[str, Any] = json.loads(structured.definition.text)
    return found


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_a_schema_may_come_as_its_text() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert Structured(json=schema).definition == Structured(json=json.dumps(schema)).definition
    assert schema_of(Structured(json=schema)) == schema | {
        "x-guidance": {"whitespace_pattern": WHITESPACE}
    }


def test_any_object_is_a_schema_too() -> None:
    assert schema_of(Structured(json_object=True))["type"] == "object"


def test_whitespace_is_as_asked() -> None:
    assert schema_of(Structured(json={}, whitespace_pattern=" *"))["x-guidance"] == {
        "whitespace_pattern": " *"
    }
    tight = schema_of(Structured(json_object=True, disable_any_whitespace=True))
    assert tight["x-guidance"] == {"whitespace_flexible": False}
    own = {"x-guidance": {"item_separator": ", "}}
    assert schema_of(Structured(json=own))["x-guidance"]["item_separator"] == ", "


def test_objects_are_closed_if_asked() -> None:
    inner = {"properties": {"properties": {"type": "string"}}}
    schema = {
        "properties": {"a": inner, "b": {"properties": {}, "additionalProperties": True}},
        "$defs": {"c": {"anyOf": [inner]}},
        "const": inner,
    }
    closed = schema_of(Structured(json=schema, disable_additional_properties=True))
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"] == inner | {"additionalProperties": False}
    assert closed["properties"]["b"]["additionalProperties"] is True
    assert closed["$defs"]["c"]["anyOf"][0]["additionalProperties"] is False
    assert closed["const"] == inner


def test_choices_are_quoted() -> None:
    definition = Structured(choice=['a "b"\n', "é"]).definition
    assert definition.text == 'start: CHOICE\nCHOICE: "a \\"b\\"\\n" | "é"\n'
    assert definition.kind == "lark"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "it has none"),
        ({"json": {}, "regex": "a"}, "json and regex"),
        ({"json": "{"}, "not JSON"),
        ({"json": "[]"}, "must be a JSON object"),
        ({"json": '{"a":' * 5000}, "not JSON|nested"),
        ({"json": nested(MAX_DEPTH + 1)}, "nested"),
        ({"json": {"properties": {str(n): {} for n in range(MAX_PROPERTIES + 1)}}}, "properties"),
        ({"json": {"const": "x" * MAX_BYTES}}, "bytes"),
        ({"json": {"multipleOf": MAX_MULTIPLE + 1}}, "multiple"),
        ({"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}}, "multiple"),
        ({"json": {"multipleOf": 1e-12}}, "multiple"),
        ({"json": {"multipleOf": 1e300}}, "multiple"),
        ({"json_object": "yes"}, "true or false"),
        ({"json_object": False}, "it has none"),
        ({"json": {}, "disable_any_whitespace": 1}, "true or false"),
        ({"json": {}, "whitespace_pattern": 5}, "text"),
        ({"json": {}, "whitespace_pattern": "", "disable_any_whitespace": True}, "contradict"),
        ({"regex": "a", "disable_additional_properties": True}, "no effect on a regex"),
        ({"regex": ""}, "1 to"),
        ({"regex": "a" * (MAX_REGEX_CHARACTERS + 1)}, "1 to"),
        ({"regex": 5}, "text"),
        ({"choice": []}, "0 choices"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choices"),
        ({"choice": "abc"}, "list"),
        ({"choice": [""]}, "not empty"),
        ({"choice": [5]}, "text"),
        ({"grammar": " "}, "not empty"),
        ({"grammar": "x" * (MAX_BYTES + 1)}, "bytes"),
        ({"grammar": "start: a\na[temperature=0.5]: /b/"}, "temperature"),
        ({"structural_tag": {"triggers": ["<f="]}}, "lists"),
        ({"structural_tag": {"triggers": [], "structures": [TAG]}}, "trigger"),
        ({"structural_tag": {"triggers": [""], "structures": [TAG]}}, "trigger"),
        ({"structural_tag": {"triggers": ["<g="], "structures": [TAG]}}, "none of the triggers"),
        ({"structural_tag": {"triggers": ["<f="], "structures": [{"begin": 5}]}}, "texts"),
        ({"structural_tag": {"triggers": ["<f="], "structures": ["a"]}}, "begin"),
        ({"structural_tag": {"triggers": ["<f="], "structures": [TAG], "x": 1}}, "nothing else"),
        ({"structural_tag": {"type": "x", "triggers": ["<"], "structures": [TAG]}}, "type"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        Structured(**fields, called="their_name")
    assert caught.value.param == "their_name"
    assert caught.value.message.startswith("their_name: ")


def test_the_limits_themselves_are_allowed() -> None:
    Structured(json=nested(MAX_DEPTH))
    Structured(json={"properties": {str(n): {} for n in range(MAX_PROPERTIES)}})
    Structured(json={"multipleOf": MAX_MULTIPLE})
    Structured(json={"properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 0.5}}})
    Structured(choice=["a"] * MAX_CHOICES)
    Structured(regex="a" * MAX_REGEX_CHARACTERS)


def test_a_property_of_that_name_is_no_multiple() -> None:
    Structured(json={"properties": {"multipleOf": {"type": "integer"}}})
