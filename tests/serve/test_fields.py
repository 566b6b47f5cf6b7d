"""A walk over every field: null is absent, neutral values pass, the rest is honoured or refused."""

import json
from typing import Any

import httpx
import pytest
from tests.serve.scripted import Served, byte_tokenizer

from octavo.core.request import Beams, Grammar, Pin
from octavo.engine.params import SamplingParams
from octavo.serve import chat, completions
from octavo.serve.requests import OPENAI_NAMES, params_of
from octavo.text.breakers import Breakers
from octavo.text.words import spellings

PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hello"}]},
    "completion": {"prompt": "Hello"},
}
SHAPES = {"chat": chat.ChatRequest, "completion": completions.CompletionRequest}
NEUTRAL = {"chat": chat.NEUTRAL, "completion": completions.NEUTRAL}
REQUIRED = {"messages", "prompt"}

# Of each sampling field: a value that changes the request, where to see it, what is seen.
HONOURED: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0.25, "sampling.temperature", 0.25),
    "top_p": (0.5, "sampling.top_p", 0.5),
    "top_k": (7, "sampling.top_k", 7),
    "min_p": (0.125, "sampling.min_p", 0.125),
    "seed": (42, "sampling.seed", 42),
    "repetition_penalty": (1.5, "sampling.penalty.repetition", 1.5),
    "presence_penalty": (0.5, "sampling.penalty.presence", 0.5),
    "frequency_penalty": (-0.5, "sampling.penalty.frequency", -0.5),
    "logit_bias": ({"5": 1, "6": -2.5}, "sampling.logit_bias", ((5, 1.0), (6, -2.5))),
    "dry_multiplier": (0.5, "sampling.dry.multiplier", 0.5),
    "dry_base": (1.5, "sampling.dry.base", 1.5),
    "dry_allowed_length": (4, "sampling.dry.allowed_length", 4),
    "dry_penalty_last_n": (64, "sampling.dry.window", 64),
    "dry_sequence_breakers": (["a", "b"], "sampling.dry.breakers", None),
    "top_n_sigma": (1.5, "sampling.top_n_sigma", 1.5),
    "typical_p": (0.5, "sampling.typical_p", 0.5),
    "xtc_probability": (0.5, "sampling.xtc_probability", 0.5),
    "xtc_threshold": (0.25, "sampling.xtc_threshold", 0.25),
    "response_format": ({"type": "json_object"}, "sampling.grammar.kind", "json"),
    "structured_outputs": ({"regex": "a+"}, "sampling.grammar", Grammar("regex", "a+")),
    "guided_json": ({"type": "array"}, "sampling.grammar.kind", "json"),
    "guided_json_object": (True, "sampling.grammar.kind", "json"),
    "guided_regex": ("b+", "sampling.grammar", Grammar("regex", "b+")),
    "guided_choice": (["a", "b"], "sampling.grammar.kind", "lark"),
    "guided_grammar": ('start: "a"', "sampling.grammar", Grammar("lark", 'start: "a"')),
    "guided_whitespace_pattern": (" ?", "sampling.grammar.kind", "json"),
    "allowed_token_ids": ([5, 6, 5], "sampling.allowed_token_ids", (5, 6)),
    "bad_words": (["a", "b"], "sampling.bad_words", None),
    "max_tokens": (9, "max_tokens", 9),
    "max_completion_tokens": (8, "max_tokens", 8),
    "min_tokens": (3, "min_tokens", 3),
    "stop_token_ids": ([5, 6], "stop_token_ids", frozenset({0, 5, 6})),
    "ignore_eos": (True, "stop_token_ids", frozenset()),
    "priority": (-4, "priority", -4),
    "n": (3, "branches", 3),
    "use_beam_search": (True, "beams", Beams(width=1)),
    "length_penalty": (0.5, "beams.length_penalty", 0.5),
    "early_stopping": ("never", "beams.early_stopping", "never"),
    "num_beam_groups": (4, "beams.groups", 4),
    "diversity_penalty": (1.5, "beams.diversity_penalty", 1.5),
    "tenant": ("team a", "tenant", "team a"),
    "ttft_target_s": (1.5, "ttft_target_s", 1.5),
    "tpot_target_s": (0.25, "tpot_target_s", 0.25),
    "timeout_s": (2.5, "timeout_s", 2.5),
    "cache": ("off", "use_cache", False),
    "cache_prompt": (False, "use_cache", False),
    "cache_salt": ("team a", "salt", "team a"),
    "cache_control": ({"type": "ephemeral", "ttl": "1h"}, "pins", None),
}
FOUR_BEAMS = {"use_beam_search": True, "n": 4}
TWO_GROUPS = FOUR_BEAMS | {"num_beam_groups": 2, "diversity_penalty": 0.5}
SWITCHES: dict[str, dict[str, Any]] = {
    "guided_whitespace_pattern": {"guided_json_object": True},
    "length_penalty": FOUR_BEAMS,
    "early_stopping": FOUR_BEAMS,
    "num_beam_groups": TWO_GROUPS,
    "diversity_penalty": TWO_GROUPS,
}
"""What has to be asked besides, for a field to have an effect."""
IN_THE_TEXT = {
    "stop": ("from", {}, "Hello "),
    "include_stop_str_in_output": (True, {"stop": ["from", "x"]}, "Hello from"),
    "skip_special_tokens": (False, {"stop": "<|other|>", "max_tokens": 60}, None),
}
OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.5, 101, 1e300),
    "top_p": (0, 1.5, -1),
    "top_k": (-2,),
    "min_p": (-0.1, 1.1),
    "seed": (2**64, -(2**63) - 1),
    "repetition_penalty": (0, -1, 101, 1e300),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1),
    "logit_bias": (
        {"5": 101},
        {"5": -101},
        {"-1": 1},
        {"1000000": 1},
        {"2147483648": 1},
        {"abc": 1},
        {"1.5": 1},
        {str(token): 1 for token in range(1025)},
    ),
    "dry_multiplier": (-0.1, 101),
    "dry_base": (0.9, 101),
    "dry_allowed_length": (0, -1),
    "dry_penalty_last_n": (-2,),
    "dry_sequence_breakers": ([""], ["x"] * 17, ["x" * 41]),
    "top_n_sigma": (-1.1, 1e300),
    "typical_p": (0, 1.1),
    "xtc_probability": (-0.1, 1.1),
    "xtc_threshold": (-0.1, 1.1),
    "response_format": (
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}},
        {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}},
        {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}},
        {"type": "text", "x": 1},
        {"type": "structural_tag", "triggers": [], "structures": []},
    ),
    "structured_outputs": (
        {},
        {"json": {}, "regex": "a"},
        {"json": {"type": "integer", "multipleOf": 10**6}},
        {"json": "{"},
        {"regex": "("},
        {"regex": ""},
        {"regex": "a" * 4097},
        {"choice": []},
        {"choice": ["a"] * 1025},
        {"grammar": "start: nothing"},
        {"json_object": "yes"},
        {"structural_tag": {}},
        {"regex": "a", "disable_any_whitespace": True},
        {"json": {}, "whitespace_pattern": "("},
        {"xml": "a"},
        {"json": {"properties": {f"k{n}": {} for n in range(501)}}},
    ),
    "guided_json": ({"type": "objekt"}, "[]"),
    "guided_json_object": (False,),
    "guided_regex": ("(", ""),
    "guided_choice": ([], [""]),
    "guided_grammar": ("", "start: nothing"),
    "guided_whitespace_pattern": (" ?",),
    "allowed_token_ids": ([], [-1], [10**6], [2**31]),
    "bad_words": ([""], ["x"] * 129, ["x" * 257]),
    "max_tokens": (0, -1),
    "max_completion_tokens": (0, -1),
    "min_tokens": (-1, 10**6),
    "stop": ("", [""], ["x"] * 17, "x" * 2000),
    "stop_token_ids": ([-1], [10**6], [2**31]),
    "priority": (2**31,),
    "n": (0, -1, 129),
    "length_penalty": (-10.5, 11, 1e300, 2),  # the last one because nothing is searched
    "early_stopping": ("always", True, "never"),
    "num_beam_groups": (0, 129, 2),
    "diversity_penalty": (-0.1, 101, 0.5),
    "tenant": ("x" * 257,),
    "ttft_target_s": (0, -1, 1e7),
    "tpot_target_s": (0, -1, 1e7),
    "timeout_s": (0, -1, 1e7),
    "cache": ("auto", ""),
    "cache_salt": ("", "x" * 1025),
    "cache_control": ({}, {"type": "x"}, {"type": "ephemeral", "ttl": "2h"}),
}
WRONG_TYPE: dict[str, tuple[Any, ...]] = {
    "temperature": ("hot", [1], True),
    "top_p": ("1",),
    "top_k": (1.5, "1", True),
    "min_p": ("0",),
    "seed": (0.5, "1"),
    "repetition_penalty": ("1", [1], True),
    "presence_penalty": ("1", {}, True),
    "frequency_penalty": ("1", [], True),
    "logit_bias": (5, [5], "5", {"5": "1"}, {"5": None}, {"5": True}),
    "dry_multiplier": ("1", True),
    "dry_base": ("1", True),
    "dry_allowed_length": (1.5, "1"),
    "dry_penalty_last_n": (1.5, "1"),
    "dry_sequence_breakers": (5, "a", [5]),
    "top_n_sigma": ("1", True),
    "typical_p": ("1", True),
    "xtc_probability": ("1", True),
    "xtc_threshold": ("1", True),
    "response_format": ("json_object", [], 5, {"type": 5}),
    "structured_outputs": ("a+", [], {"regex": 5}, {"choice": "a"}, {"grammar": []}),
    "guided_json": (5, []),
    "guided_json_object": ("yes", 1),
    "guided_regex": (5, ["a"]),
    "guided_choice": ("a", 5, [5]),
    "guided_grammar": (5, {}),
    "guided_whitespace_pattern": (5, []),
    "allowed_token_ids": (5, ["a"], [1.5], [True], {}),
    "bad_words": (5, "a", [5], {}),
    "n": ("2", 1.5, True),
    "use_beam_search": (1, "yes", [True]),
    "length_penalty": ("1", [1], True),
    "early_stopping": (1, ["never"], {}),
    "num_beam_groups": ("2", 1.5, True),
    "diversity_penalty": ("1", {}, True),
    "tenant": (5, ["a"], True),
    "ttft_target_s": ("2s", [2], True),
    "tpot_target_s": ("100ms", {}, True),
    "timeout_s": ("2s", [], True),
    "max_tokens": ("5", 1.5, {}),
    "max_completion_tokens": ("5", []),
    "min_tokens": ("0",),
    "stop": (5, [5], {}),
    "stop_token_ids": (5, ["a"], [1.5], [True]),
    "ignore_eos": (1, "yes"),
    "include_stop_str_in_output": (0,),
    "skip_special_tokens": ("no",),
    "priority": ("high",),
    "cache": (False, 1),
    "cache_prompt": ("off", 0),
    "cache_salt": (5, ["a"]),
    "cache_control": ("ephemeral", True, [], {"type": "ephemeral", "x": 1}),
    "model": (5, ["scripted"]),
    "chat_template": (5, ["a"], True),
    "stream": ("yes", 1),
    "stream_options": (True, {"include_usage": 1}, {"unknown": True}),
    "user": (5,),
    "logprobs": ("yes", [1], 1.5, {}),
    "top_logprobs": (True, "1", 1.5),
    "prompt_logprobs": (True, "1", 1.5),
    "echo": (1, "yes"),
    "return_token_ids": (1, "yes"),
    "chat_template_kwargs": (5, [], "x", {"nobody_reads": 1}),
    "tools": (5, "x", ["x"], [{"type": "x"}], [{"type": "function", "function": {}}]),
    "tool_choice": (5, "other", "required", {"type": "function", "function": {"name": "f"}}),
    "parallel_tool_calls": (1, "yes"),
    "include_reasoning": (1, "yes"),
    "reasoning_effort": (5, "much", "high"),
    "thinking_token_budget": ("5", 1.5, -2, 5),
    "add_generation_prompt": (1, "yes"),
    "continue_final_message": (1, "yes"),
    "messages": ("Hello", {}, [], ["Hello"], [{"role": "user"}], None),
    "prompt": (5, {}, [], "", [""], [[]], [1, "a"], [["a"]], [-1], [1.5], [True], None),
}


def post(http: httpx.Client, kind: str, **fields: Any) -> httpx.Response:
    return http.post(PATHS[kind], json=BODIES[kind] | fields)


def fields_of(kind: str) -> set[str]:
    return {
        *SHAPES[kind].__struct_fields__,
        *OPENAI_NAMES,
        *NEUTRAL[kind],
    }


def refused(response: httpx.Response, field: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None
    assert error["param"].startswith(field)
    assert field.rstrip("s") in error["message"]


@pytest.mark.parametrize("kind", PATHS)
def test_no_field_is_forgotten_here(kind: str) -> None:
    sampling = set(OPENAI_NAMES)
    assert sampling == HONOURED.keys() | IN_THE_TEXT.keys()
    assert sampling | set(SHAPES[kind].__struct_fields__) <= WRONG_TYPE.keys()
    assert sampling.isdisjoint(NEUTRAL[kind])
    assert set(SHAPES[kind].__struct_fields__).isdisjoint(NEUTRAL[kind])


@pytest.mark.parametrize("kind", PATHS)
def test_null_is_absent(http: httpx.Client, served: Served, kind: str) -> None:
    optional = fields_of(kind) - REQUIRED
    assert post(http, kind).status_code == 200
    assert post(http, kind, **dict.fromkeys(optional)).status_code == 200
    plain, nulls = (ticket.request for ticket in served.client.tickets)
    assert plain.prompt == nulls.prompt
    assert plain.max_tokens == nulls.max_tokens
    assert plain.stop_token_ids == nulls.stop_token_ids
    for field in sorted(optional):
        assert post(http, kind, **{field: None}).status_code == 200, field


@pytest.mark.parametrize("kind", PATHS)
def test_neutral_values_pass_and_others_are_refused(http: httpx.Client, kind: str) -> None:
    for field, neutral in NEUTRAL[kind].items():
        for value in neutral:
            assert post(http, kind, **{field: value}).status_code == 200, (field, value)
        for value in ("other", 2, -0.5, [5], {"a": 1}):
            refused(post(http, kind, **{field: value}), field)
        if not any(isinstance(value, bool) for value in neutral):
            refused(post(http, kind, **{field: True}), field)


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("field", HONOURED)
def test_sampling_fields_reach_the_engine(
    http: httpx.Client, served: Served, kind: str, field: str
) -> None:
    value, path, seen = HONOURED[field]
    switch = {"dry_multiplier": 1.0} if field.startswith("dry_") else SWITCHES.get(field, {})
    assert post(http, kind, **{**switch, field: value}).status_code == 200
    found: Any = served.client.tickets[0].request
    for name in path.split("."):
        found = getattr(found, name)
    if field == "cache_control":
        seen = (Pin(len(served.client.tickets[0].request.prompt), 3600.0),)
    if field == "bad_words":
        seen = spellings(value, byte_tokenizer())
    if field == "dry_sequence_breakers":
        seen = Breakers(byte_tokenizer()).of(value)
    assert found == seen


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("field", IN_THE_TEXT)
def test_fields_that_change_the_text(
    http: httpx.Client, served: Served, kind: str, field: str
) -> None:
    value, others, wanted = IN_THE_TEXT[field]
    choice = post(http, kind, **({"max_tokens": 99} | others | {field: value})).json()["choices"][0]
    text = choice["message"]["content"] if kind == "chat" else choice["text"]
    plain = post(http, kind, max_tokens=99).json()["choices"][0]
    whole = plain["message"]["content"] if kind == "chat" else plain["text"]
    assert text == (whole if wanted is None else wanted)


@pytest.mark.parametrize("kind", PATHS)
def test_special_tokens_are_skipped_unless_asked_for(
    http: httpx.Client, served: Served, kind: str
) -> None:
    script = served.client.script
    script.text = "a<|other|>b"  # type: ignore[union-attr]
    for fields, wanted in (({}, "ab"), ({"skip_special_tokens": False}, "a<|other|>b")):
        choice = post(http, kind, **fields).json()["choices"][0]
        assert (choice["message"]["content"] if kind == "chat" else choice["text"]) == wanted


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("field", OUT_OF_RANGE)
def test_out_of_range_is_refused_by_name(
    http: httpx.Client, served: Served, kind: str, field: str
) -> None:
    for value in OUT_OF_RANGE[field]:
        refused(post(http, kind, **{field: value}), field)
    assert served.client.tickets == []


@pytest.mark.parametrize("kind", PATHS)
def test_wrong_types_are_refused_by_name(http: httpx.Client, served: Served, kind: str) -> None:
    for field in WRONG_TYPE.keys() & fields_of(kind):
        for value in WRONG_TYPE[field]:
            refused(post(http, kind, **{"stream": True, field: value}), field)
    assert served.client.tickets == []


@pytest.mark.parametrize("kind", PATHS)
def test_unknown_fields_are_refused_by_name(http: httpx.Client, kind: str) -> None:
    refused(post(http, kind, temprature=0), "temprature")
    refused(post(http, kind, temprature=True), "temprature")
    other = (REQUIRED - BODIES[kind].keys()).pop()
    refused(post(http, kind, **{other: "x"}), other)


@pytest.mark.parametrize("kind", PATHS)
def test_an_unknown_field_is_refused_with_advice(http: httpx.Client, kind: str) -> None:
    advice = {
        "temprature": "did you mean temperature?",
        "n_predict": "use max_tokens",
        "n_keep": "leave it out",
        "temperature" * 10**3: "leave it out",
        "prompt" if kind == "chat" else "messages": "POST it to /v1/",
    }
    for field, expected in advice.items():
        assert expected in post(http, kind, **{field: 1}).json()["error"]["message"]


@pytest.mark.parametrize("kind", PATHS)
def test_stream_options(http: httpx.Client, kind: str) -> None:
    refused(post(http, kind, stream_options={"include_usage": True}), "stream_options")
    refused(
        post(http, kind, stream=True, stream_options={"continuous_usage_stats": True}),
        "stream_options.continuous_usage_stats",
    )
    refused(
        post(http, kind, stream=True, stream_options={"include_obfuscation": True}),
        "stream_options.include_obfuscation",
    )
    off = {"include_usage": False, "continuous_usage_stats": None, "include_obfuscation": False}
    response = post(http, kind, stream=True, stream_options=off)
    assert response.status_code == 200
    assert "usage" not in response.text


@pytest.mark.parametrize("kind", PATHS)
def test_both_names_of_the_limit(http: httpx.Client, served: Served, kind: str) -> None:
    assert post(http, kind, max_tokens=5, max_completion_tokens=5).status_code == 200
    assert served.client.tickets[0].request.max_tokens == 5
    refused(post(http, kind, max_tokens=5, max_completion_tokens=6), "max_completion_tokens")


@pytest.mark.parametrize("kind", PATHS)
def test_too_long_an_answer_is_refused_by_code(http: httpx.Client, kind: str) -> None:
    error = post(http, kind, max_tokens=10**6).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")


def test_empty_content_is_still_a_conversation(http: httpx.Client, served: Served) -> None:
    for content in ("", []):
        messages = [{"role": "user", "content": content}]
        assert post(http, "chat", messages=messages).status_code == 200
    assert len({ticket.request.prompt for ticket in served.client.tickets}) == 1


def test_how_the_prompt_of_a_chat_ends(http: httpx.Client, served: Served) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    talk = "<|start|>user:Hi<|other|><|start|>assistant:Well, "
    off: dict[str, Any] = {"add_generation_prompt": False}
    on: dict[str, Any] = {"continue_final_message": True}
    for fields, wanted in (
        ({}, talk + "<|other|><|start|>assistant:"),
        (off, talk + "<|other|>"),
        (on, talk),
        (off | on, talk),
    ):
        served.client.tickets.clear()
        assert post(http, "chat", messages=messages, **fields).status_code == 200
        prompt = served.client.tickets[0].request.prompt
        assert served.door.tokenizer.decode(prompt) == wanted
    both = {"add_generation_prompt": True, "continue_final_message": True}
    refused(post(http, "chat", messages=messages, **both), "continue_final_message")


def test_an_answer_can_be_sent_back_as_it_came(http: httpx.Client) -> None:
    message = post(http, "chat").json()["choices"][0]["message"]
    nulls = {"refusal": None, "tool_calls": None, "function_call": None, "audio": None}
    messages = [{"role": "user", "content": "a"}, message | nulls, {"role": "user", "content": "b"}]
    assert post(http, "chat", messages=messages).status_code == 200


def test_B124_the_prompts_of_one_request_are_limited(http: httpx.Client, served: Served) -> None:
    assert post(http, "completion", prompt=["a"] * 1024, max_tokens=1).status_code == 200
    served.client.tickets.clear()
    for prompt in (["a"] * 1025, [[5]] * 1025):
        refused(post(http, "completion", prompt=prompt), "prompt")
    assert served.client.tickets == []


@pytest.mark.parametrize("kind", PATHS)
def test_both_names_of_the_cache(http: httpx.Client, served: Served, kind: str) -> None:
    assert post(http, kind, cache="on", cache_prompt=True).status_code == 200
    assert served.client.tickets[0].request.use_cache
    refused(post(http, kind, cache="off", cache_prompt=True), "cache_prompt")


@pytest.mark.parametrize("kind", PATHS)
def test_what_is_not_cached_cannot_be_kept(http: httpx.Client, kind: str) -> None:
    refused(post(http, kind, cache="off", cache_control={"type": "ephemeral"}), "cache")


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


FOR_AN_HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
FOR_A_WHILE = {"cache_control": {"type": "ephemeral"}}


def test_breakpoints_mark_the_prompt_up_to_them(http: httpx.Client, served: Served) -> None:
    """Here a token is a byte, and the template puts `<|start|>role:` before and `<|other|>` after
    each message, both one token."""
    messages = [
        {"role": "system", "content": [part("You are", **FOR_AN_HOUR), part(" terse.")]},
        {"role": "user", "content": [part("Why?"), part(" Now.", **FOR_A_WHILE)]},
    ]
    whole = {"cache_control": {"type": "ephemeral"}}
    assert post(http, "chat", messages=messages, **whole).status_code == 200
    request = served.client.tickets[0].request
    first = len("system:You are") + 1
    second = len("system:You are terse.user:Why? Now.") + 3
    assert request.pins == (
        Pin(first, 3600.0),
        Pin(second, 300.0),
        Pin(len(request.prompt), 300.0),
    )


def test_too_many_or_broken_breakpoints_are_refused(http: httpx.Client, served: Served) -> None:
    four = [part("a", **FOR_A_WHILE)] * 4
    assert post(http, "chat", messages=[{"role": "user", "content": four}]).status_code == 200
    served.client.tickets.clear()
    five = {"messages": [{"role": "user", "content": [*four, part("b", **FOR_A_WHILE)]}]}
    refused(post(http, "chat", **five), "messages")
    four_and_one = {"messages": [{"role": "user", "content": four}], **FOR_A_WHILE}
    refused(post(http, "chat", **four_and_one), "cache_control")
    for wrong in ({"type": "x"}, "x", {"type": "ephemeral", "ttl": 5}, {"ttl": "5m"}):
        content = [part("a", cache_control=wrong)]
        response = post(http, "chat", messages=[{"role": "user", "content": content}])
        refused(response, "messages[0].content[0].cache_control")
    content = [part("a", cached=True)]
    response = post(http, "chat", messages=[{"role": "user", "content": content}])
    refused(response, "messages[0].content[0]")
    assert served.client.tickets == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", PATHS)
def test_token_ids_are_returned_if_asked(
    http: httpx.Client, served: Served, kind: str, stream: bool
) -> None:
    """Those of the prompt once, those of the answer with each piece; also where no text comes."""
    response = post(http, kind, return_token_ids=True, stream=stream, max_tokens=99, stop="zzz")
    parts = (
        [response.json()]
        if not stream
        else [
            json.loads(line.removeprefix("data: "))
            for line in response.text.split("\n\n")
            if line.startswith("data: {")
        ]
    )
    request = served.client.tickets[0].request
    choices = [choice for part in parts for choice in part["choices"]]
    prompts = [one["prompt_token_ids"] for one in (*parts, *choices) if "prompt_token_ids" in one]
    assert prompts == [list(request.prompt)]
    ids = [token for choice in choices for token in choice.get("token_ids", ())]
    assert served.door.tokenizer.decode(ids[:-1]) == served.client.script.text  # type: ignore[union-attr]
    assert ids[-1] == 0
    plain = post(http, kind, stream=stream).text
    assert "token_ids" not in plain


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.5),
        ("top_k", 5),
        ("min_p", 0.5),
        ("top_n_sigma", 1.0),
        ("typical_p", 0.5),
        ("xtc_probability", 0.5),
        ("structured_outputs", {"regex": "a+"}),
        ("stop", ["from"]),
        ("num_beam_groups", 3),
        ("num_beam_groups", 8),
        ("diversity_penalty", 0.5),
    ],
)
def test_what_has_no_meaning_for_beams_is_refused(
    http: httpx.Client, served: Served, kind: str, field: str, value: Any
) -> None:
    refused(post(http, kind, **FOUR_BEAMS, **{field: value}), field.split("_outputs")[0])
    assert served.client.tickets == []


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize(
    "neutral", [{"temperature": 0}, {"temperature": 1, "top_k": -1, "seed": 5}, {"stop": []}]
)
def test_what_asks_for_nothing_may_stand_beside_beams(
    http: httpx.Client, served: Served, kind: str, neutral: dict[str, Any]
) -> None:
    assert post(http, kind, **FOUR_BEAMS, **neutral).status_code == 200
    assert served.client.tickets[0].request.beams == Beams(width=4)


def test_defaults_for_draws_are_no_wish_of_who_asks_for_beams() -> None:
    defaults = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, repetition_penalty=1.1)
    params = params_of(dict(FOUR_BEAMS), defaults, OPENAI_NAMES)
    assert params == SamplingParams(use_beam_search=True, n=4, repetition_penalty=1.1)
