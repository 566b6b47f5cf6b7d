"""The real `anthropic` client over a socket: the streamed message joined is the whole one."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from tests.serve.scripted import CONTEXT, Gate, Script, Served

from octavo.core.request import Pin
from octavo.errors import EngineError, EngineStopped, Overloaded

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TEXT = Script().text
ANSWER_TOKENS = len(TEXT.encode()) + 1


@pytest.fixture(scope="module")
def _claude(_server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=_server.url, api_key="none", max_retries=0) as claude:
        yield claude


@pytest.fixture
def claude(served: Served, _claude: anthropic.Anthropic) -> anthropic.Anthropic:
    return _claude


def create(claude: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    known: dict[str, Any] = {"model": "scripted", "messages": HELLO, "max_tokens": 99}
    message: anthropic.types.Message = claude.messages.create(**(known | fields))
    return message


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def prompt_of(served: Served, index: int = 0) -> str:
    return served.door.tokenizer.decode(served.client.tickets[index].request.prompt)


def test_a_message(claude: anthropic.Anthropic, served: Served) -> None:
    message = create(claude, metadata={"user_id": "Ada"})
    assert (message.type, message.role, message.model) == ("message", "assistant", "scripted")
    assert message.id.startswith("msg_")
    assert text_of(message) == TEXT
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert prompt_of(served) == "<|start|>user:Hello<|other|><|start|>assistant:"
    request = served.client.tickets[0].request
    assert request.max_tokens == 99
    usage, length = message.usage, len(request.prompt)
    assert usage.cache_read_input_tokens == length // 2
    assert usage.cache_creation_input_tokens == 0
    assert usage.input_tokens == length - length // 2
    assert usage.output_tokens == ANSWER_TOKENS
    octavo = message.model_dump()["octavo"]
    assert (octavo["queue_s"], octavo["preemptions"], octavo["user"]) == (0.5, 1, "Ada")


def test_the_events_of_a_stream(claude: anthropic.Anthropic, served: Served) -> None:
    events = list(
        claude.messages.create(model="scripted", messages=HELLO, max_tokens=99, stream=True)
    )
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    start, block, *middle, _, delta, _ = (event.model_dump() for event in events)
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == len(served.client.tickets[0].request.prompt)
    assert block["content_block"]["text"] == ""
    assert "".join(event["delta"]["text"] for event in middle) == TEXT
    assert delta["delta"]["stop_reason"] == "end_turn"
    assert delta["usage"]["output_tokens"] == ANSWER_TOKENS
    assert delta["octavo"]["preemptions"] == 1


def test_a_ping_is_among_the_events(http: httpx.Client) -> None:
    body = {"model": "scripted", "messages": HELLO, "max_tokens": 5, "stream": True}
    response = http.post("/v1/messages", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    assert all(len(lines) == 2 for lines in events)
    for name, data in events:
        kind = json.loads(data.removeprefix("data: "))["type"]
        assert name == f"event: {kind}"
    assert events[2][1] == 'data: {"type":"ping"}'


def test_the_stream_helper_builds_the_whole_message(claude: anthropic.Anthropic) -> None:
    whole = create(claude)
    with claude.messages.stream(model="scripted", messages=HELLO, max_tokens=99) as stream:
        assert "".join(stream.text_stream) == TEXT
        message = stream.get_final_message()
    assert text_of(message) == text_of(whole)
    assert message.usage == whole.usage
    assert message.stop_reason == whole.stop_reason


def test_why_it_stopped(claude: anthropic.Anthropic, served: Served) -> None:
    short = create(claude, max_tokens=5)
    assert (text_of(short), short.stop_reason) == ("Hello", "max_tokens")
    stopped = create(claude, stop_sequences=["never", "the"])
    assert text_of(stopped) == "Hello from "
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "the")
    served.client.script = Script(text="x" * 1000)
    prompt = len(served.client.tickets[0].request.prompt)
    full = create(claude, max_tokens=CONTEXT + 1)
    assert full.stop_reason == "model_context_window_exceeded"
    assert full.usage.output_tokens == CONTEXT - prompt


def test_fields_reach_the_engine(claude: anthropic.Anthropic, served: Served) -> None:
    extra = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "seed": 42,
        "min_p": 0.125,
        "cache_salt": "a",
        "tenant": "b",
        "ttft_target_s": 2,
    }
    create(claude, extra_body=extra)
    request = served.client.tickets[0].request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 7)
    assert (sampling.seed, sampling.min_p) == (42, 0.125)
    assert (request.salt, request.tenant, request.ttft_target_s) == ("a", "b", 2)


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


CACHED = {"cache_control": {"type": "ephemeral"}}


def test_system_as_text_and_as_blocks(claude: anthropic.Anthropic, served: Served) -> None:
    create(claude, system="Be terse.")
    create(claude, system=[part("Be "), part("terse.")])
    create(claude, system="", messages=[{"role": "user", "content": [part("Hel"), part("lo")]}])
    create(claude)
    first, second, third, fourth = (prompt_of(served, index) for index in range(4))
    assert first == second == f"<|start|>system:Be terse.<|other|>{fourth}"
    assert third == fourth


def test_breakpoints_are_kept_and_counted(claude: anthropic.Anthropic, served: Served) -> None:
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages = [{"role": "user", "content": [part("Why?", **CACHED), part(" Now.")]}]
    message = create(claude, system=[part("x" * 40, **hour)], messages=messages)
    request = served.client.tickets[0].request
    second = len("system:" + "x" * 40 + "user:Why?") + 3
    assert request.pins == (Pin(len("system:") + 41, 3600.0), Pin(second, 300.0))
    length, usage = len(request.prompt), message.usage
    assert usage.cache_read_input_tokens == length // 2
    assert usage.cache_creation_input_tokens == second - length // 2 > 0
    assert usage.input_tokens == length - second
    create(claude, extra_body=CACHED)
    whole = served.client.tickets[1].request
    assert whole.pins == (Pin(len(whole.prompt), 300.0),)


def test_an_assistant_message_at_the_end_is_continued(
    claude: anthropic.Anthropic, served: Served
) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Well, "}]
    create(claude, messages=begun)
    assert prompt_of(served) == "<|start|>user:Hello<|other|><|start|>assistant:Well, "
    count = claude.messages.count_tokens(model="scripted", messages=begun)
    assert count.input_tokens == len(served.client.tickets[0].request.prompt)


def test_counting(claude: anthropic.Anthropic, served: Served) -> None:
    fields: dict[str, Any] = {"system": [part("Be terse.", **CACHED)], "messages": HELLO}
    count = claude.messages.count_tokens(model="scripted", **fields)
    assert served.client.tickets == []
    create(claude, **fields)
    assert count.input_tokens == len(served.client.tickets[0].request.prompt)


IMAGE = {"role": "user", "content": [{"type": "image"}]}


def refused(response: httpx.Response, param: str, status: int = 400) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["details"]["param"] == param
    assert param in body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}], "system": "y"}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}], "system": "y"}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        (
            {
                "system": "y",
                "messages": [*HELLO, {"role": "user", "content": [{"type": "tool_use"}]}],
            },
            "messages[1].content[0]",
        ),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"system": [{"type": "text", "text": 5}]}, "system[0]"),
        ({"system": [part("a", cache_control={"type": "x"})]}, "system[0].cache_control"),
        ({"system": 5}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": [5]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"max_completion_tokens": 2}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": "1"}, "top_k"),
        ({"metadata": {"user": "x"}}, "metadata.user"),
        ({"tools": [{"name": "x"}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"service_tier": "batch"}, "service_tier"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    http: httpx.Client, served: Served, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "scripted", "messages": HELLO, "max_tokens": 9} | fields
    refused(http.post("/v1/messages", json=body), param)
    assert served.client.tickets == []


def test_what_asks_for_nothing_passes(http: httpx.Client) -> None:
    neutral: dict[str, Any] = {
        "tools": [],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "service_tier": "standard_only",
        "output_config": {},
    }
    body = {"messages": HELLO, "max_tokens": 9}
    assert http.post("/v1/messages", json=body | neutral).status_code == 200
    nulls = dict.fromkeys(
        ("system", "stream", "metadata", "temperature", "stop_sequences", "tools")
    )
    assert http.post("/v1/messages", json=body | nulls).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "caught", "kind"),
    [
        (Overloaded("full"), anthropic.RateLimitError, "rate_limit_error"),
        (EngineError("x"), anthropic.InternalServerError, "api_error"),
        (EngineStopped("x"), anthropic.InternalServerError, "overloaded_error"),
    ],
)
def test_errors_are_the_clients_own_classes(
    claude: anthropic.Anthropic,
    served: Served,
    error: Exception,
    caught: type[anthropic.APIStatusError],
    kind: str,
    stream: bool,
) -> None:
    served.client.script = Script(error=error)
    with pytest.raises(caught) as told:
        list(create(claude, stream=stream))
    assert told.value.type == kind
    assert ("retry-after" in told.value.response.headers) == (kind != "api_error")


def test_unknown_models_paths_and_methods(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError) as told:
        create(claude, model="claude")
    assert told.value.error_code == "model_not_found"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.list()
    assert http.get("/v1/messages").json()["error"]["details"]["error_code"] == "method_not_allowed"


def test_an_engine_that_fails_late_ends_the_stream_with_an_error(
    claude: anthropic.Anthropic, http: httpx.Client, served: Served
) -> None:
    served.client.script = Script(error=EngineError("step 9 failed"), fail_at=6)
    texts: list[str] = []
    with (
        claude.messages.stream(model="scripted", messages=HELLO, max_tokens=99) as stream,
        pytest.raises(anthropic.APIStatusError, match="step 9 failed"),
    ):
        texts.extend(stream.text_stream)
    assert "".join(texts) == TEXT[:6]
    body = {"messages": HELLO, "max_tokens": 99, "stream": True}
    last = http.post("/v1/messages", json=body).text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")


def test_a_client_that_stops_reading_cancels(claude: anthropic.Anthropic, served: Served) -> None:
    gate = Gate()
    served.client.script = Script(gate=gate, pause_at=5)
    with claude.messages.stream(model="scripted", messages=HELLO, max_tokens=99) as stream:
        next(stream.text_stream)
        assert not served.client.was_cancelled.is_set()
    assert served.client.was_cancelled.wait(60)
    gate.open()
