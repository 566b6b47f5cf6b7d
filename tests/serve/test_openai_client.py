"""The real `openai` client over a socket: the streamed answer joined is the whole answer."""

from typing import Any

import openai
import pytest
from tests.serve.scripted import ABOUT, CONTEXT, Script, Served

from octavo.errors import ContextLengthExceeded, EngineError, Overloaded

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TEXT = Script().text
ANSWER_TOKENS = len(TEXT.encode()) + 1


def test_chat(api: openai.OpenAI, served: Served) -> None:
    answer = api.chat.completions.create(model="scripted", messages=HELLO)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert choice.finish_reason == "stop"
    assert answer.model == "scripted"
    assert answer.id.startswith("chatcmpl-")
    request = served.client.tickets[0].request
    prompt = served.door.tokenizer.decode(request.prompt)
    assert prompt == "<|start|>user:Hello<|other|><|start|>assistant:"
    assert request.prompt.count(1) == 2
    assert request.max_tokens == CONTEXT - len(request.prompt)
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(request.prompt)
    assert usage.completion_tokens == ANSWER_TOKENS
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == len(request.prompt) // 2
    assert answer.model_dump()["octavo"] == {
        "queue_s": 0.5,
        "time_to_first_token_s": 1.0,
        "preemptions": 1,
        "recomputed_tokens": 3,
        "cached_tokens": len(request.prompt) // 2,
        "peak_blocks": 2,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
    }


def test_chat_streamed(api: openai.OpenAI) -> None:
    chunks = list(api.chat.completions.create(model="scripted", messages=HELLO, stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    first, *middle, last = (chunk.choices[0] for chunk in chunks)
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert all(choice.delta.content and choice.finish_reason is None for choice in middle)
    assert "".join(choice.delta.content or "" for choice in middle) == TEXT
    assert (last.delta.content, last.finish_reason) == (None, "stop")


@pytest.mark.parametrize("continuous", [False, True])
def test_usage_of_a_stream(api: openai.OpenAI, continuous: bool) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": continuous}
    chunks = list(
        api.chat.completions.create(
            model="scripted", messages=HELLO, stream=True, stream_options=options, user="Ada"
        )
    )
    *body, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == ANSWER_TOKENS
    assert last.usage.prompt_tokens_details is not None
    assert last.model_dump()["octavo"]["preemptions"] == 1
    assert last.model_dump()["octavo"]["user"] == "Ada"
    if not continuous:
        assert all(chunk.usage is None for chunk in body)
        return
    counts = [chunk.usage.completion_tokens for chunk in body if chunk.usage]
    assert len(counts) == len(body)
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, ANSWER_TOKENS)


def test_completion_streamed_and_not(api: openai.OpenAI, served: Served) -> None:
    whole = api.completions.create(model="scripted", prompt="Once", max_tokens=20)
    chunks = list(
        api.completions.create(model="scripted", prompt="Once", max_tokens=20, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text == TEXT[:20]
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 20)
    assert [ticket.request.max_tokens for ticket in served.client.tickets] == [20, 20]


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts(api: openai.OpenAI, served: Served, stream: bool) -> None:
    served.client.script = lambda prompt: Script(text=f"re {prompt}")
    prompts = ["one", "three", "é"]
    answer = api.completions.create(model="scripted", prompt=prompts, stream=stream)
    texts = dict.fromkeys(range(3), "")
    reasons = {}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert list(texts.values()) == [f"re {prompt}" for prompt in prompts]
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}
    if not stream:
        assert answer.usage.prompt_tokens == 3 + 5 + 2
        assert answer.usage.completion_tokens == (6 + 8 + 5) + 3


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_of_several_prompts(
    api: openai.OpenAI, served: Served, stream: bool
) -> None:
    """B049: all of them, in index order, however they ended."""
    served.client.script = lambda prompt: Script(text=f" re {prompt}")
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = api.completions.create(
        model="scripted", prompt=["one", "three"], n=4, stream=stream, **options
    )
    texts, reasons, usage = dict.fromkeys(range(8), ""), {}, None
    for part in answer if stream else [answer]:
        usage = part.usage or usage
        for choice in part.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert list(texts.values()) == [
        f"{branch or ''} re {prompt}" for prompt in ("one", "three") for branch in range(4)
    ]
    assert reasons == dict.fromkeys(range(8), "stop")
    if not stream:
        assert [choice.index for choice in answer.choices] == list(range(8))
    assert usage.prompt_tokens == 3 + 5
    assert usage.completion_tokens == 4 * (7 + 9 + 2) + 2 * 3
    assert usage.prompt_tokens_details.cached_tokens == 3 // 2 + 5 // 2


def test_several_choices_of_a_message_streamed_and_not(api: openai.OpenAI, served: Served) -> None:
    served.client.script = Script(text=" same")
    whole = api.chat.completions.create(model="scripted", messages=HELLO, n=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    wanted = [choice.message.content for choice in whole.choices]
    assert wanted == [" same", "1 same", "2 same"]
    parts: dict[int, list[Any]] = {}
    for chunk in api.chat.completions.create(model="scripted", messages=HELLO, n=3, stream=True):
        (choice,) = chunk.choices
        parts.setdefault(choice.index, []).append(choice)
    assert sorted(parts) == [0, 1, 2]
    for index, choices in parts.items():
        first, *between, last = choices
        assert (first.delta.role, first.delta.content) == ("assistant", "")
        assert "".join(choice.delta.content for choice in between) == wanted[index]
        assert last.finish_reason == "stop"
        assert all(choice.finish_reason is None for choice in choices[:-1])


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("a", [[100]]),
        (["a", "bc"], [[100], [101, 102]]),
        ([100, 5], [[100, 5]]),
        ([[100], [101, 7, 263]], [[100], [101, 7, 263]]),
        (" ", [[35]]),
    ],
)
def test_kinds_of_prompt(
    api: openai.OpenAI, served: Served, prompt: Any, ids: list[list[int]]
) -> None:
    api.completions.create(model="scripted", prompt=prompt)
    assert sorted(list(ticket.request.prompt) for ticket in served.client.tickets) == sorted(ids)


def test_a_stop_string_ends_the_answer_and_the_work(api: openai.OpenAI, served: Served) -> None:
    stop = ["script", "never"]
    answer = api.completions.create(model="scripted", prompt="x", max_tokens=99, stop=stop)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("Hello from the ", "stop")
    assert choice.model_dump()["stop_reason"] == "script"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Hello from the script")


def test_a_completion_without_a_limit_has_sixteen_tokens(api: openai.OpenAI) -> None:
    answer = api.completions.create(model="scripted", prompt="x")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT[:16], "length")


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["scripted", "org/alias"]
    card = api.models.retrieve("org/alias").model_dump()
    assert (card["max_model_len"], card["root"], card["owned_by"]) == (
        CONTEXT,
        ABOUT.reference,
        "octavo",
    )
    with pytest.raises(openai.NotFoundError) as caught:
        api.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_an_alias_answers_under_its_own_name(api: openai.OpenAI) -> None:
    assert api.completions.create(model="org/alias", prompt="x").model == "org/alias"


def test_errors_are_the_clients_own_classes(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        api.chat.completions.create(model="other", messages=HELLO)
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as too_long:
        api.completions.create(model="scripted", prompt="x" * CONTEXT)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as bad_id:
        api.completions.create(model="scripted", prompt=[3, 10**6])
    assert "1000000" in bad_id.value.message
    assert bad_id.value.param == "prompt"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [(Overloaded("full"), 429), (ContextLengthExceeded("long"), 400), (EngineError("x"), 500)],
)
def test_what_the_engine_refuses_keeps_its_status(
    api: openai.OpenAI, served: Served, error: Exception, status: int, stream: bool
) -> None:
    served.client.script = Script(error=error)
    with pytest.raises(openai.APIStatusError) as caught:
        list(api.chat.completions.create(model="scripted", messages=HELLO, stream=stream))
    assert caught.value.status_code == status
    assert ("retry-after" in caught.value.response.headers) == (status == 429)


def test_an_engine_that_fails_late_ends_the_stream_with_an_error(
    api: openai.OpenAI, served: Served
) -> None:
    served.client.script = Script(reason="error")
    chunks = api.completions.create(model="scripted", prompt="x", max_tokens=99, stream=True)
    texts: list[str] = []
    with pytest.raises(openai.APIError, match="it broke"):
        texts.extend(chunk.choices[0].text for chunk in chunks)
    assert "".join(texts) == TEXT
    with pytest.raises(openai.InternalServerError, match="it broke"):
        api.completions.create(model="scripted", prompt="x")
