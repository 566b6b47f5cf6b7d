"""What an answer must be, in the words of each API."""

from collections.abc import Collection, Mapping
from typing import Any

from octavo.errors import InvalidRequest
from octavo.text.structured import Structured

Json = Mapping[str, Any]

FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
GUIDED = {
    **{f"guided_{form}": form for form in FORMS if form != "structural_tag"},
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""vLLM's names before it had `structured_outputs`."""


def structured_of(fields: dict[str, Any]) -> Structured | None:
    """Of the fields of a body, which are taken out; at most one may ask for something."""
    found = []
    if (value := fields.pop("response_format", None)) is not None:
        found.append(of_response_format(value))
    if (value := fields.pop("structured_outputs", None)) is not None:
        found.append(of_structured_outputs(value))
    guided = {name: fields.pop(name) for name in GUIDED if name in fields}
    if guided:
        called = next((name for name in guided if name != "guided_whitespace_pattern"), None)
        own = {GUIDED[name]: value for name, value in guided.items()}
        found.append(Structured(**own, called=called or "guided_whitespace_pattern"))
    asked = [one for one in found if one is not None]
    if len(asked) > 1:
        names = " and ".join(one.called for one in asked)
        raise InvalidRequest(
            f"{names} both say what the answer must be; send one", param=asked[1].called
        )
    return asked[0] if asked else None


def of_response_format(value: Json) -> Structured | None:
    """OpenAI's `response_format` of completions. A schema is kept to, `strict` or not."""
    called = "response_format"
    match value.get("type"):
        case "json_schema":
            _check_known(value, ("type", "json_schema"), called)
            return _of_schema(value.get("json_schema"), f"{called}.json_schema")
        case "structural_tag":
            return Structured(structural_tag=value, called=called)
    return _of_bare_type(value, called, "text, json_object, json_schema or structural_tag")


def of_text_format(value: Json) -> Structured | None:
    """`text.format` of OpenAI's responses, which has the schema in itself."""
    called = "text.format"
    if value.get("type") == "json_schema":
        return _of_schema({k: v for k, v in value.items() if k != "type"}, called)
    return _of_bare_type(value, called, "text, json_object or json_schema")


def _of_bare_type(value: Json, called: str, known: str) -> Structured | None:
    """A format that says its type and nothing else."""
    kind = value.get("type")
    if kind not in ("text", "json_object"):
        raise _wrong_type(value, called, known)
    _check_known(value, ("type",), called)
    return Structured(json_object=True, called=called) if kind == "json_object" else None


def of_output_format(value: Json, called: str) -> Structured:
    """Anthropic's format of an output."""
    if value.get("type") != "json_schema":
        raise _wrong_type(value, called, "json_schema")
    return _of_schema({k: v for k, v in value.items() if k != "type"}, called, names=())


def of_format(value: str | Json) -> Structured | None:
    """Ollama's `format`: a schema, or "json" for any object."""
    if value == "":
        return None
    if isinstance(value, str) and value != "json":
        raise InvalidRequest(
            f'format must be "json" or a JSON schema, not {value!r}', param="format"
        )
    if isinstance(value, str):
        return Structured(json_object=True, called="format")
    return Structured(json=value, called="format")


def of_structured_outputs(value: Json) -> Structured:
    """vLLM's `structured_outputs`."""
    called = "structured_outputs"
    _check_known(value, (*FORMS, *OPTIONS), called)
    given = {name: one for name, one in value.items() if one is not None}
    asked = [name for name in FORMS if given.get(name) not in (None, False)]
    if len(asked) == 1:
        called = f"{called}.{asked[0]}"
    return Structured(**given, called=called)


def _of_schema(
    value: object, called: str, names: Collection[str] = ("name", "description", "strict")
) -> Structured:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{called} must be an object with a schema", param=called)
    _check_known(value, (*names, "schema"), called)
    for name, kind in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(value.get(name), kind | None):
            raise InvalidRequest(
                f"{called}.{name} must be {'text' if kind is str else 'true or false'}",
                param=f"{called}.{name}",
            )
    schema = value.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{called}.schema must be a JSON schema", param=f"{called}.schema")
    return Structured(json=schema, called=f"{called}.schema")


def _check_known(value: Json, known: Collection[str], called: str) -> None:
    for name in value:
        if name not in known:
            raise InvalidRequest(
                f"{called}.{name} is not known here; there are {', '.join(known)}",
                param=f"{called}.{name}",
            )


def _wrong_type(value: Json, called: str, types: str) -> InvalidRequest:
    return InvalidRequest(
        f"{called}.type is {value.get('type')!r}; it must be {types}", param=f"{called}.type"
    )
