"""The real `ollama` client over a socket; every option is honoured or refused."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from tests.serve.scripted import ABOUT, CONTEXT, TEMPLATE, Gate, Script, Served

from octavo.core.request import Penalty
from octavo.errors import EngineError, Overloaded
from octavo.serve import ollama as api

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TEXT = Script().text
ANSWER_TOKENS = len(TEXT.encode()) + 1
PROMPT = "<|start|>user:Hello<|other|><|start|>assistant:"


@pytest.fixture(scope="module")
def _llama(_server: Served) -> Iterator[ollama.Client]:
    with ollama.Client(host=_server.url) as client:
        yield client


@pytest.fixture
def llama(served: Served, _llama: ollama.Client) -> ollama.Client:
    return _llama


def prompt_of(served: Served) -> str:
    return served.door.tokenizer.decode(served.client.tickets[-1].request.prompt)


def test_a_chat(llama: ollama.Client, served: Served) -> None:
    answer = llama.chat(model="scripted", messages=HELLO, keep_alive="5m")
    assert (answer.message.role, answer.message.content) == ("assistant", TEXT)
    assert (answer.model, answer.done, answer.done_reason) == ("scripted", True, "stop")
    assert answer.created_at
    assert answer.created_at.endswith("Z")
    assert prompt_of(served) == PROMPT
    request = served.client.tickets[0].request
    assert answer.prompt_eval_count == len(request.prompt)
    assert answer.eval_count == ANSWER_TOKENS
    assert (answer.total_duration, answer.load_duration) == (2 * 10**9, 0)
    assert (answer.prompt_eval_duration, answer.eval_duration) == (10**9 // 2, 10**9)


def test_a_streamed_chat(llama: ollama.Client) -> None:
    *parts, last = llama.chat(model="scripted", messages=HELLO, stream=True)
    assert "".join(part.message.content or "" for part in parts) == TEXT
    assert not any(part.done or part.eval_count for part in parts)
    assert (last.message.content, last.done, last.done_reason) == ("", True, "stop")
    assert last.eval_count == ANSWER_TOKENS


def test_streams_are_lines_and_the_default(http: httpx.Client) -> None:
    response = http.post("/api/chat", json={"model": "scripted", "messages": HELLO})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert len([json.loads(line) for line in response.text.splitlines()]) > 5
    whole = http.post("/api/chat", json={"messages": HELLO, "stream": False})
    assert whole.headers["content-type"] == "application/json"


def test_generate(llama: ollama.Client, served: Served) -> None:
    answer = llama.generate(model="scripted", prompt="Hello")
    assert (answer.response, answer.done_reason) == (TEXT, "stop")
    assert prompt_of(served) == PROMPT
    *parts, last = llama.generate(model="scripted", prompt="Hello", system="Be brief.", stream=True)
    assert "".join(part.response or "" for part in parts) == TEXT
    assert (last.response, last.done) == ("", True)
    assert prompt_of(served) == f"<|start|>system:Be brief.<|other|>{PROMPT}"
    llama.generate(model="scripted", prompt="Hello", raw=True)
    assert prompt_of(served) == "Hello"


@pytest.mark.parametrize("stream", [False, True])
def test_no_prompt_asks_for_the_model_only(
    http: httpx.Client, served: Served, stream: bool
) -> None:
    for path, body in (("chat", {"messages": []}), ("generate", {"prompt": ""}), ("generate", {})):
        answer = http.post(f"/api/{path}", json=body | {"model": "scripted", "stream": stream})
        assert (answer.json()["done"], answer.json()["done_reason"]) == (True, "load")
    assert served.client.tickets == []


def test_options_reach_the_engine(llama: ollama.Client, served: Served) -> None:
    options = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.125, "seed": 42}
    options |= {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    stop = {"stop": ["never", "the"], "repeat_last_n": -1}
    answer = llama.chat(model="scripted", messages=HELLO, options=options | stop)
    assert (answer.message.content, answer.done_reason) == ("Hello from ", "stop")
    sampling = served.client.tickets[0].request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.25, 7, 0.5)
    assert (sampling.min_p, sampling.seed) == (0.125, 42)
    assert sampling.penalty == Penalty(repetition=1.5, presence=0.5, frequency=-0.5)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, CONTEXT - 23),
        ({"num_predict": 5}, 5),
        ({"num_predict": -1}, CONTEXT - 23),
        ({"num_predict": -2}, CONTEXT - 23),
        ({"num_predict": 10**6}, CONTEXT - 23),
        ({"num_ctx": 100}, 77),
        ({"num_ctx": CONTEXT}, CONTEXT - 23),
        ({"num_ctx": 24, "num_predict": 9}, 1),
        ({"num_ctx": 100, "num_predict": 9}, 9),
    ],
)
def test_how_long_an_answer_may_be(
    http: httpx.Client, served: Served, options: dict[str, int], tokens: int
) -> None:
    body = {"messages": HELLO, "options": options, "stream": False}
    answer = http.post("/api/chat", json=body)
    request = served.client.tickets[0].request
    assert len(request.prompt) == 23
    assert request.max_tokens == tokens
    assert answer.json()["done_reason"] == ("length" if tokens < ANSWER_TOKENS else "stop")


def test_a_seed_of_minus_one_is_none(http: httpx.Client, served: Served) -> None:
    for _ in range(2):
        http.post("/api/chat", json={"messages": HELLO, "options": {"seed": -1}})
    first, second = (ticket.request.sampling.seed for ticket in served.client.tickets)
    assert first != second


def test_logprobs(llama: ollama.Client, served: Served) -> None:
    fields: Any = {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 5}}
    whole = llama.chat(model="scripted", messages=HELLO, **fields)
    assert whole.logprobs
    assert [one.token for one in whole.logprobs] == list("Hello")
    parts = llama.generate(model="scripted", prompt="Hello", stream=True, **fields)
    streamed = [one for part in parts for one in part.logprobs or ()]
    assert [one.token for one in streamed] == list("Hello")
    assert {one.logprob for one in streamed} == {-0.25}
    assert [ticket.request.top_logprobs for ticket in served.client.tickets] == [2, 2]


def refused(response: httpx.Response, name: str, status: int = 400) -> None:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    assert name in response.json()["error"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_ctx": CONTEXT + 1}, "options.num_ctx"),
        ({"num_ctx": 23}, "options.num_ctx"),
        ({"num_ctx": "big"}, "options.num_ctx"),
        ({"num_predict": 0}, "options.num_predict"),
        ({"num_predict": 1.5}, "options.num_predict"),
        ({"temperature": -1}, "options.temperature"),
        ({"temperature": "hot"}, "options.temperature"),
        ({"top_p": 2}, "options.top_p"),
        ({"repeat_penalty": 0}, "options.repeat_penalty"),
        ({"repetition_penalty": 1}, "options.repetition_penalty"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "options.stop"),
        ({"seed": 0.5}, "options.seed"),
        ({"temprature": 1}, "options.temprature"),
        ({"max_tokens": 1}, "options.max_tokens"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    http: httpx.Client, served: Served, options: dict[str, Any], name: str
) -> None:
    refused(http.post("/api/chat", json={"messages": HELLO, "options": options}), name)
    assert served.client.tickets == []


BODIES: dict[str, tuple[dict[str, Any], Any]] = {
    "chat": ({"messages": HELLO}, api.CHAT_NEUTRAL),
    "generate": ({"prompt": "Hello"}, api.GENERATE_NEUTRAL),
}


@pytest.mark.parametrize("kind", BODIES)
def test_neutral_values_pass_and_others_are_refused(http: httpx.Client, kind: str) -> None:
    body, neutral = BODIES[kind]
    for field, values in neutral.items():
        for value in (*values, None):
            assert http.post(f"/api/{kind}", json=body | {field: value}).status_code == 200, field
        for other in ("other", 2.5, [5], {"a": 1}):
            refused(http.post(f"/api/{kind}", json=body | {field: other}), field)
    for field, values in api.OPTION_NEUTRAL.items():
        for value in (*values, None):
            given = body | {"options": {field: value}}
            assert http.post(f"/api/{kind}", json=given).status_code == 200, field
        refused(http.post(f"/api/{kind}", json=body | {"options": {field: 2.5}}), field)


def test_every_option_of_the_client_is_known() -> None:
    known = {*api.OPTION_NAMES, *api.OPTION_NEUTRAL, *api.Room.__struct_fields__}
    assert set(ollama.Options.model_fields) <= known


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("chat", {"messages": "Hello"}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, "images"),
        ("chat", {"messages": HELLO, "options": []}, "options"),
        ("chat", {"messages": HELLO, "keep_alive": []}, "keep_alive"),
        ("chat", {"messages": HELLO, "prompt": "x"}, "prompt"),
        ("chat", {"messages": HELLO, "stream": "yes"}, "stream"),
        ("generate", {"prompt": 5}, "prompt"),
        ("generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
        ("show", {"model": 5}, "model"),
        ("chat", {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_wrong_bodies_are_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], name: str
) -> None:
    refused(http.post(f"/api/{path}", json=body), name)


def test_names_may_have_the_latest_tag(llama: ollama.Client, http: httpx.Client) -> None:
    for name in ("scripted", "scripted:latest", "org/alias:latest"):
        assert llama.generate(model=name, prompt="x").model == name
    for name in ("scripted:small", "llama3"):
        with pytest.raises(ollama.ResponseError, match=name) as caught:
            llama.generate(model=name, prompt="x")
        assert caught.value.status_code == 404
    refused(http.post("/api/pull", json={"model": "x"}), "/api/pull", 404)


def test_which_models_there_are(llama: ollama.Client) -> None:
    listed = llama.list().models
    assert [model.model for model in listed] == ["scripted:latest", "org/alias:latest"]
    details = listed[0].details
    assert details
    assert (details.family, details.parameter_size) == ("llama", "134.5M")
    assert details.quantization_level == "Q8_0"
    assert (listed[0].size, listed[0].digest) == (ABOUT.weights_bytes, ABOUT.fingerprint)
    running = llama.ps().models
    assert [model.name for model in running] == ["scripted:latest", "org/alias:latest"]
    assert running[0].context_length == CONTEXT
    shown = llama.show("scripted")
    assert shown.template == TEMPLATE
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo
    assert shown.modelinfo["llama.context_length"] == CONTEXT
    assert shown.modelinfo["general.parameter_count"] == ABOUT.parameters
    with pytest.raises(ollama.ResponseError, match="other"):
        llama.show("other")


def test_the_version(http: httpx.Client) -> None:
    assert http.get("/api/version").json() == {"version": "1.2.3"}


@pytest.mark.parametrize("stream", [False, True])
def test_errors_keep_their_status(llama: ollama.Client, served: Served, stream: bool) -> None:
    served.client.script = Script(error=Overloaded("full"))
    with pytest.raises(ollama.ResponseError, match="full") as caught:
        list(llama.chat(model="scripted", messages=HELLO, stream=stream))
    assert caught.value.status_code == 429


def test_an_engine_that_fails_late_ends_the_stream_with_an_error(
    llama: ollama.Client, served: Served
) -> None:
    served.client.script = Script(error=EngineError("step 9 failed"), fail_at=6)
    parts = llama.generate(model="scripted", prompt="x", stream=True)
    texts: list[Any] = []
    with pytest.raises(ollama.ResponseError, match="step 9 failed"):
        texts.extend(part.response for part in parts)
    assert "".join(texts) == TEXT[:6]


def test_a_client_that_stops_reading_cancels(llama: ollama.Client, served: Served) -> None:
    gate = Gate()
    served.client.script = Script(gate=gate, pause_at=5)
    stream = llama.chat(model="scripted", messages=HELLO, stream=True)
    next(stream)
    assert not served.client.was_cancelled.is_set()
    stream.close()  # type: ignore[attr-defined]
    assert served.client.was_cancelled.wait(60)
    gate.open()
