"""Rendering equals transformers'; malformed conversations are refused by message."""

from datetime import datetime
from typing import Any

import pytest
from tests.text.vocabulary import metadata_of

from octavo.errors import InvalidRequest, ModelFileError
from octavo.text.chat import ChatTemplate
from octavo.text.tokenizer import Tokenizer

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
KINDS = """
{#- loop controls, tojson, namespaces and whitespace as published templates use them -#}
{%- set ns = namespace(found=false) -%}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message['content'] is string %}
        {% set ns.found = true %}
        <{{ message.role }}> {{ message.content | trim }} {{ message | tojson }}
        {% generation %}{{ message.content | upper }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if not ns.found %}{{ raise_exception('nobody spoke <&>') }}{% endif %}
{% if tools is not none or documents is not none %}{{ tools | length }}{% endif %}
{% if add_generation_prompt %}{{ eos_token }}{% endif %}
"""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " x < y & 'z' \n"}],
    [
        {"role": "user", "content": "漢字 👩‍👧"},
        {"role": "assistant", "content": "<|im_end|>"},
        {"role": "user", "content": ""},
    ],
)


@pytest.mark.parametrize("source", [SMOLLM2, KINDS], ids=["smollm2", "kinds"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_rendering_equals_transformers(source: str, messages: list[dict[str, Any]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (wanted,), _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, **SPECIAL
    )
    assert ChatTemplate(source, special=SPECIAL).render(messages) == wanted


def test_the_demo_model_has_the_template_tested_here(demo_tokenizer: Tokenizer) -> None:
    assert demo_tokenizer.chat_template == SMOLLM2


def test_text_parts_are_joined_and_a_null_answer_is_empty() -> None:
    template = ChatTemplate(SMOLLM2, special={})
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    in_parts: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": None, "name": None},
        {"role": "user", "content": []},
    ]
    joined = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]
    assert template.render(in_parts) == template.render(joined)


def test_a_model_without_a_template_has_none() -> None:
    with pytest.raises(ModelFileError, match="no chat template"):
        ChatTemplate.for_tokenizer(Tokenizer.from_gguf(metadata_of([])))


def test_the_clock_is_an_argument() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", special={}, now=lambda: datetime(2024, 7, 26)
    )
    assert template.render(CONVERSATIONS[0]) == "26 Jul 2024"


def test_a_name_reaches_the_template() -> None:
    template = ChatTemplate("{{ messages[0].name }}", special={})
    assert template.render([{"role": "user", "content": "x", "name": "Ada"}]) == "Ada"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([1], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        (
            [{"role": "user", "content": "x"}, {"role": "pirate", "content": "x"}],
            "messages[1].role",
        ),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "name": 1}], "messages[0].name"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0]"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(SMOLLM2, special={}).render(messages)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ 1 // (messages | length - 1) }}", "zero"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_may_refuse_but_not_break_out(source: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        ChatTemplate(source, special={}).render(CONVERSATIONS[0])


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelFileError, match="compile"):
        ChatTemplate("{% for %}", special={})


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in y %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ x | no_such_filter }}",
        "{% include 'other' %}{% nothing %}",
    ],
)
def test_a_template_that_no_compiler_takes(source: str) -> None:
    with pytest.raises(ModelFileError, match="does not compile"):
        ChatTemplate(source, special={})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__closure__[0].cell_contents }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{{ ''['__cla' ~ 'ss__'].__base__ }}",
        "{% include '/etc/passwd' %}",
        "{% for _ in range(100001) %}{% endfor %}",
        "{{ messages.append('more') }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest, match="refuses"):
        ChatTemplate(source, special={}).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("content", ["Well, ", "", " a<|im_end|>b ", "ends\n"])
def test_the_last_message_is_continued_where_it_ends(content: str) -> None:
    template = ChatTemplate(SMOLLM2, special=SPECIAL)
    messages = [*CONVERSATIONS[0], {"role": "assistant", "content": content}]
    bare = template.render(messages, "bare")
    continued = template.render(messages, "continued")
    assert continued.endswith(f"<|im_start|>assistant\n{content}")
    assert bare == f"{continued}<|im_end|>\n"
    assert template.render(messages) == f"{bare}<|im_start|>assistant\n"


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", special={})
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        template.render(messages, "continued")


@pytest.mark.parametrize("nothing", [{}, {"tool_calls": None}, {"tool_calls": []}, {"images": []}])
def test_B100_lists_that_hold_nothing_count_as_absent(nothing: dict[str, Any]) -> None:
    messages = [{"role": "assistant", "content": "x", **nothing}]
    template = ChatTemplate("{{ messages }}", special={})
    assert template.render(messages) == "[{'role': 'assistant', 'content': 'x'}]"
