"""What an answer must be, in the words of each API: the same grammar reaches the engine."""

import json
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from tests.serve.scripted import Served, byte_tokenizer

from octavo.core.request import Grammar
from octavo.text.structured import Structured

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
}
HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETION = (
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/completions", {"prompt": "a"}),
)
RESPONSE = ("/v1/responses", {"input": "Hello"})
MESSAGE = ("/v1/messages", {"messages": HELLO, "max_tokens": 9})
OLLAMA = ("/api/chat", {"messages": HELLO, "stream": False})
OLLAMA_GENERATE = ("/api/generate", {"prompt": "a", "stream": False})

BY_SCHEMA = Structured(json=SCHEMA)
ANY_OBJECT = Structured(json_object=True)
NAMED = {"name": "person", "strict": True, "schema": SCHEMA}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


def post(http: httpx.Client, endpoint: tuple[str, dict[str, Any]], **fields: Any) -> httpx.Response:
    path, body = endpoint
    return http.post(path, json={"model": "scripted"} | body | fields)


@pytest.mark.parametrize(
    ("endpoint", "fields", "meant"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, BY_SCHEMA),
        (CHAT, {"response_format": {"type": "json_object"}}, ANY_OBJECT),
        (CHAT, {"response_format": {"type": "text"}}, None),
        (CHAT, {"response_format": TAG}, Structured(structural_tag=TAG)),
        (CHAT, {"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
        (CHAT, {"structured_outputs": {"json": json.dumps(SCHEMA)}}, BY_SCHEMA),
        (CHAT, {"structured_outputs": {"structural_tag": TAG}}, Structured(structural_tag=TAG)),
        (CHAT, {"structured_outputs": {"choice": ["a", "b"], "json": None}}, ["a", "b"]),
        (CHAT, {"guided_choice": ["a", "b"]}, ["a", "b"]),
        (COMPLETION, {"response_format": {"type": "json_object"}}, ANY_OBJECT),
        (COMPLETION, {"structured_outputs": {"regex": "a+"}}, Structured(regex="a+")),
        (COMPLETION, {"guided_regex": "a+"}, Structured(regex="a+")),
        (
            COMPLETION,
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
            Structured(json_object=True, whitespace_pattern=" ?"),
        ),
        (RESPONSE, {"text": {"format": {"type": "json_schema", **NAMED}}}, BY_SCHEMA),
        (RESPONSE, {"text": {"format": {"type": "json_object"}}}, ANY_OBJECT),
        (RESPONSE, {"text": {"format": {"type": "text"}}}, None),
        (RESPONSE, {"text": {}}, None),
        (RESPONSE, {"structured_outputs": {"choice": ["a", "b"]}}, ["a", "b"]),
        (MESSAGE, {"output_config": {"format": FORMAT}}, BY_SCHEMA),
        (MESSAGE, {"output_format": FORMAT}, BY_SCHEMA),
        (MESSAGE, {"output_config": {}}, None),
        (MESSAGE, {"structured_outputs": {"choice": ["a", "b"]}}, ["a", "b"]),
        (OLLAMA, {"format": "json"}, ANY_OBJECT),
        (OLLAMA, {"format": SCHEMA}, BY_SCHEMA),
        (OLLAMA, {"format": ""}, None),
        (OLLAMA_GENERATE, {"format": SCHEMA}, BY_SCHEMA),
    ],
)
def test_every_form_reaches_the_engine(
    http: httpx.Client,
    served: Served,
    endpoint: tuple[str, dict[str, Any]],
    fields: dict[str, Any],
    meant: Structured | list[str] | None,
) -> None:
    response = post(http, endpoint, **fields)
    assert response.status_code == 200, response.text
    if isinstance(meant, list):
        meant = Structured(choice=meant)
    grammar = None if meant is None else Grammar(*meant.definition)
    assert served.client.tickets[0].request.sampling.grammar == grammar


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format.json_schema.schema",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"x": 1}}},
            "response_format.json_schema.x",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (CHAT, {"structured_outputs": {"xml": 1}}, "structured_outputs.xml"),
        (CHAT, {"structured_outputs": {}}, "structured_outputs"),
        (COMPLETION, {"guided_regex": "("}, "guided_regex"),
        (
            RESPONSE,
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            "text.format.schema",
        ),
        (RESPONSE, {"response_format": {"type": "json_object"}}, "response_format"),
        (
            RESPONSE,
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "text.format",
        ),
        (MESSAGE, {"output_config": {"format": {"type": "x"}}}, "output_config.format.type"),
        (
            MESSAGE,
            {"output_config": {"format": FORMAT}, "output_format": FORMAT},
            "output_format",
        ),
        (MESSAGE, {"output_format": FORMAT | {"schema": {"type": "x"}}}, "output_format.schema"),
        (OLLAMA, {"format": "xml"}, "format"),
        (OLLAMA, {"format": {"type": "x"}}, "format"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(
    http: httpx.Client,
    served: Served,
    endpoint: tuple[str, dict[str, Any]],
    fields: dict[str, Any],
    param: str,
) -> None:
    response = post(http, endpoint, **fields)
    assert response.status_code == 400, response.text
    assert param in response.text
    assert not served.client.tickets


def test_a_response_says_what_format_was_asked(http: httpx.Client) -> None:
    asked = {"type": "json_schema", **NAMED}
    assert post(http, RESPONSE, text={"format": asked}).json()["text"] == {"format": asked}
    assert post(http, RESPONSE).json()["text"] == {"format": {"type": "text"}}


def test_log_probabilities_take_every_token_through_the_model(
    http: httpx.Client, served: Served
) -> None:
    for fields in ({}, {"logprobs": 0}, {"bad_words": ["x"]}, {"allowed_token_ids": [5]}):
        post(http, COMPLETION, structured_outputs={"regex": "a+"}, **fields)
    grammars = [ticket.request.sampling.grammar for ticket in served.client.tickets]
    assert [one.forced for one in grammars if one is not None] == [True, False, False, False]


class Person(BaseModel):
    name: str


def test_the_openai_client_parses_what_comes(served: Served) -> None:
    import openai

    served.client.script.text = '{"name": "Ann"}'  # type: ignore[union-attr]
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    chat = client.chat.completions.parse(
        model="scripted", messages=[{"role": "user", "content": "a"}], response_format=Person
    )
    assert chat.choices[0].message.parsed == Person(name="Ann")
    response = client.responses.parse(model="scripted", input="a", text_format=Person)
    assert response.output_parsed == Person(name="Ann")
    first, second = (ticket.request.sampling.grammar for ticket in served.client.tickets)
    assert first == second
    assert first is not None
    assert json.loads(first.text)["properties"]["name"]["type"] == "string"


def test_a_tokenizer_reads_choices_as_they_are() -> None:
    tokenizer = byte_tokenizer()
    (end, *_) = tokenizer.eos_ids
    text = tokenizer.token_bytes(end).decode()
    tokens = tokenizer.encode(text, parse_special=False, add_special=False)
    assert end not in tokens
