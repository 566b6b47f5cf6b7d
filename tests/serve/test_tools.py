"""Calls of tools and reasoning in chat completions, with the real `openai` client."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.serve.scripted import (
    Script,
    Served,
    scripted_server,
)

from octavo.core.request import Grammar

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments.a }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if false %}</think>{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get", "parameters": PARAMETERS}}]
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
TEXT = f"<think>Hm.</think>Well.{CALL}\n{CALL}"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tooled() -> Iterator[Served]:
    with scripted_server(trust_templates=True) as served:
        served.client.script = Script(text=TEXT)
        yield served


@pytest.fixture
def api(tooled: Served) -> Iterator[openai.OpenAI]:
    tooled.client.tickets.clear()
    with openai.OpenAI(base_url=f"{tooled.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def create(api: openai.OpenAI, **fields: Any) -> Any:
    known: dict[str, Any] = {"model": "scripted", "messages": HELLO, "tools": TOOLS}
    return api.chat.completions.create(
        **known | fields, extra_body={"chat_template": TEMPLATE} | fields.pop("extra_body", {})
    )


def test_an_answer_is_taken_apart(api: openai.OpenAI) -> None:
    whole = create(api)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.reasoning) == ("Well.", "Hm.")
    assert choice.message.reasoning_content == "Hm."
    assert [c.function.arguments for c in choice.message.tool_calls] == ['{"a": 1}'] * 2
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("<think>Hm.</think>")


def test_the_joined_stream_is_the_whole(api: openai.OpenAI) -> None:
    content, reasoning, calls, reasons = "", "", {}, []
    for chunk in create(api, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(call.index, [call.id, call.function.name, ""])
            known[2] += call.function.arguments
        reasons.append(choice.finish_reason)
    assert (content, reasoning, reasons[-1]) == ("Well.", "Hm.", "tool_calls")
    assert [one[1:] for one in calls.values()] == [["get", '{"a": 1}']] * 2
    assert len({one[0] for one in calls.values()}) == 2


def test_one_call_at_most(api: openai.OpenAI) -> None:
    assert len(create(api, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_none_leaves_the_text_as_it_is(api: openai.OpenAI, tooled: Served) -> None:
    message = create(api, tool_choice="none").choices[0].message
    assert message.tool_calls is None
    assert CALL in message.content
    prompt = tooled.door.tokenizer.decode(tooled.client.tickets[0].request.prompt)
    assert "parameters" not in prompt


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}])
def test_a_call_that_must_be_is_a_grammar(api: openai.OpenAI, tooled: Served, choice: Any) -> None:
    create(api, tool_choice=choice)
    grammar = tooled.client.tickets[0].request.sampling.grammar
    assert isinstance(grammar, Grammar)
    matcher = tooled.door.grammars.matcher(grammar, (), frozenset())
    encode = tooled.door.tokenizer.encode
    good = encode(f"<think>Hm.</think>{CALL}", parse_special=True, add_special=False)
    assert matcher.valid(good) == len(good)
    bad = encode(CALL.replace("1", '"x"'), parse_special=True, add_special=False)
    assert matcher.valid(bad) < len(bad)
