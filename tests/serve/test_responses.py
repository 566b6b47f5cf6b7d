"""OpenAI's Responses API through the real client: the stream's last response is the whole one."""

from typing import Any

import httpx
import openai
import pytest
from tests.serve.scripted import CONTEXT, Gate, Script, Served

from octavo.core.request import Pin
from octavo.errors import EngineError, Overloaded
from octavo.serve import responses

TEXT = Script().text
ANSWER_TOKENS = len(TEXT.encode()) + 1
PROMPT = "<|start|>user:Hello<|other|><|start|>assistant:"


def create(api: openai.OpenAI, **fields: Any) -> Any:
    return api.responses.create(**({"model": "scripted", "input": "Hello"} | fields))


def prompt_of(served: Served) -> str:
    return served.door.tokenizer.decode(served.client.tickets[-1].request.prompt)


def test_a_response(api: openai.OpenAI, served: Served) -> None:
    metadata = {"team": "a"}
    answer = create(api, temperature=0.5, top_p=0.75, metadata=metadata, user="Ada", store=False)
    assert answer.output_text == TEXT
    assert (answer.status, answer.model, answer.error) == ("completed", "scripted", None)
    assert answer.id.startswith("resp_")
    assert (answer.temperature, answer.top_p, answer.metadata) == (0.5, 0.75, metadata)
    assert (answer.tools, answer.tool_choice, answer.truncation) == ([], "auto", "disabled")
    assert answer.text.format.type == "text"
    (message,) = answer.output
    assert (message.role, message.status, message.type) == ("assistant", "completed", "message")
    assert prompt_of(served) == PROMPT
    length, usage = len(served.client.tickets[0].request.prompt), answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (length, ANSWER_TOKENS)
    assert usage.total_tokens == length + ANSWER_TOKENS
    assert usage.input_tokens_details.cached_tokens == length // 2
    assert usage.input_tokens_details.cache_write_tokens == 0
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.octavo["preemptions"], answer.octavo["user"]) == (1, "Ada")


def test_the_events_of_a_stream(api: openai.OpenAI) -> None:
    events = list(create(api, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == TEXT
    first, last = events[0].response, events[-1].response
    assert (first.status, first.output, first.usage) == ("in_progress", [], None)
    assert first.id == last.id
    assert events[-4].text == events[-3].part.text == TEXT
    assert events[-2].item == last.output[0]
    assert {event.item_id for event in events[3:-2]} == {last.output[0].id}
    whole = create(api)
    assert last.output_text == whole.output_text
    assert (last.status, last.usage) == (whole.status, whole.usage)


def test_the_stream_helper_gives_the_whole_response(api: openai.OpenAI) -> None:
    with api.responses.stream(model="scripted", input="Hello") as stream:
        snapshots = [event.snapshot for event in stream if hasattr(event, "snapshot")]
        assert snapshots[-1] == TEXT
        assert stream.get_final_response().output_text == TEXT


def test_events_have_names_and_no_end_of_their_own(http: httpx.Client) -> None:
    response = http.post("/v1/responses", json={"input": "Hello", "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = response.text.strip().split("\n\n")
    assert events[0].startswith("event: response.created\ndata: {")
    assert events[-1].startswith("event: response.completed\ndata: {")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_is_incomplete(
    api: openai.OpenAI, served: Served, stream: bool
) -> None:
    answer = create(api, max_output_tokens=5, stream=stream)
    if stream:
        *_, last = answer
        assert last.type == "response.incomplete"
        answer = last.response
    assert served.client.tickets[0].request.max_tokens == 5
    assert (answer.status, answer.max_output_tokens) == ("incomplete", 5)
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    assert answer.output_text == "Hello"


def test_instructions_and_items(api: openai.OpenAI, served: Served) -> None:
    first = create(api)
    said = [
        {"role": "user", "content": "Hello"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
    ]
    for item in said:
        create(api, input=[item])
        assert prompt_of(served) == PROMPT
    back = first.output[0].model_dump()
    create(api, instructions="Be brief.", input=[*said[:1], back, *said[1:]])
    assert prompt_of(served) == (
        "<|start|>system:Be brief.<|other|><|start|>user:Hello<|other|>"
        f"<|start|>assistant:{TEXT}<|other|>{PROMPT}"
    )


def test_fields_reach_the_engine(api: openai.OpenAI, served: Served) -> None:
    extra = {"top_k": 7, "min_p": 0.125, "seed": 42, "cache_salt": "a", "presence_penalty": 0.5}
    answer = create(api, extra_body=extra | {"stop": ["the"]})
    assert answer.output_text == "Hello from "
    request = served.client.tickets[0].request
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (7, 0.125, 42)
    assert request.salt == "a"
    assert sampling.penalty
    assert sampling.penalty.presence == 0.5


def test_breakpoints_count_as_written(http: httpx.Client, served: Served) -> None:
    control = {"type": "ephemeral"}
    part = {"type": "input_text", "text": "x" * 60, "cache_control": control}
    more = {"type": "input_text", "text": "y"}
    body = {"input": [{"role": "user", "content": [part, more]}]}
    usage = http.post("/v1/responses", json=body).json()["usage"]
    request = served.client.tickets[0].request
    marked = len("user:") + 61
    assert request.pins == (Pin(marked, 300.0),)
    cached = len(request.prompt) // 2
    details = {"cached_tokens": cached, "cache_write_tokens": marked - cached}
    assert usage["input_tokens_details"] == details


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(api: openai.OpenAI, served: Served, stream: bool) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = create(api, max_output_tokens=5, stream=stream, **asked)
    if stream:
        events = list(answer)
        deltas = [one for event in events if "text.delta" in event.type for one in event.logprobs]
        (done,) = (event for event in events if "text.done" in event.type)
        answer = events[-1].response
        assert [one.token for one in deltas] == [one.token for one in done.logprobs]
    (part,) = answer.output[0].content
    assert "".join(one.token for one in part.logprobs) == part.text == "Hello"
    assert {one.logprob for one in part.logprobs} == {-0.25}
    assert served.client.tickets[0].request.top_logprobs == 2


def refused(response: httpx.Response, param: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


USER = {"role": "user", "content": "x"}
IMAGE = {"role": "user", "content": [{"type": "input_image"}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "reasoning"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [USER, IMAGE]}, "input[1].content[0]"),
        ({"input": [USER, IMAGE], "instructions": "y"}, "input[1].content[0]"),
        ({"input": [{"role": "pirate", "content": "x"}]}, "input[0].role"),
        ({"input": [USER, {"role": "user"}], "instructions": "y"}, "input[1].content"),
        ({"input": [USER | {"phase": "x"}]}, "input[0]"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": CONTEXT}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"background": True}, "background"),
        ({"unknown": 1}, "unknown"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    http: httpx.Client, served: Served, fields: dict[str, Any], param: str
) -> None:
    refused(http.post("/v1/responses", json={"input": "Hello"} | fields), param)
    assert served.client.tickets == []


def test_neutral_values_pass_and_others_are_refused(http: httpx.Client) -> None:
    for field, neutral in responses.NEUTRAL.items():
        for value in (*neutral, None):
            body = {"input": "x", field: value}
            assert http.post("/v1/responses", json=body).status_code == 200, field
        for value in ("other", 2.5, [5], {"a": 1}):
            refused(http.post("/v1/responses", json={"input": "x", field: value}), field)


@pytest.mark.parametrize("stream", [False, True])
def test_errors_keep_their_status(api: openai.OpenAI, served: Served, stream: bool) -> None:
    served.client.script = Script(error=Overloaded("full"))
    with pytest.raises(openai.RateLimitError):
        list(create(api, stream=stream))


def test_an_engine_that_fails_late_ends_the_stream_with_an_error(
    api: openai.OpenAI, served: Served
) -> None:
    served.client.script = Script(error=EngineError("step 9 failed"), fail_at=6)
    events = list(create(api, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    *_, error, last = events
    assert (error.type, error.message) == ("error", "step 9 failed")
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error.code) == ("failed", "server_error")


def test_a_client_that_stops_reading_cancels(api: openai.OpenAI, served: Served) -> None:
    gate = Gate()
    served.client.script = Script(gate=gate, pause_at=5)
    with create(api, stream=True) as stream:
        next(iter(stream))
        assert not served.client.was_cancelled.is_set()
    assert served.client.was_cancelled.wait(60)
    gate.open()
