"""Every request field that vLLM knows, for each API: honoured, or refused as known by its name.

The lists are those of vLLM 0.32's requests.
"""

from typing import Any

import httpx
import pytest
from tests.serve.scripted import Served

from octavo.serve import chat, completions, messages, responses
from octavo.serve.app import ENDPOINTS
from octavo.serve.requests import OPENAI_NAMES, Names, Neutral

OPENAI = """
frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
stream_options temperature top_p user model
"""
SAMPLING = """
use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
watermarking thinking_token_budget
"""
OTHERS = """
echo add_special_tokens structured_outputs priority request_id session_id
return_tokens_as_token_ids return_token_ids return_token_offsets return_prompt_text cache_salt
kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval
routed_experts_prompt_start
"""
CHAT = """
messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort parallel_tool_calls
include_reasoning add_generation_prompt continue_final_message documents chat_template
chat_template_kwargs media_io_kwargs mm_processor_kwargs mm_payload
"""
FIELDS = {
    "/v1/chat/completions": OPENAI + SAMPLING + OTHERS + CHAT,
    "/v1/completions": OPENAI + SAMPLING + OTHERS + "prompt prompt_embeds suffix",
    "/v1/responses": """
        input instructions max_output_tokens max_tool_calls metadata parallel_tool_calls
        previous_response_id prompt reasoning service_tier store stream text tool_choice tools
        top_logprobs truncation background include prompt_cache_key top_k min_p repetition_penalty
        seed stop stop_token_ids ignore_eos priority cache_salt structured_outputs
    """,
    "/v1/messages": """
        model messages max_tokens system stop_sequences stream temperature top_p top_k tools
        tool_choice thinking output_config metadata cache_salt chat_template_kwargs
        kv_transfer_params vllm_xargs
    """,
}
HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 99},
}
READ: dict[str, tuple[type, Neutral, Names]] = {
    "/v1/chat/completions": (chat.ChatRequest, chat.NEUTRAL, OPENAI_NAMES),
    "/v1/completions": (completions.CompletionRequest, completions.NEUTRAL, OPENAI_NAMES),
    "/v1/responses": (responses.ResponseRequest, responses.NEUTRAL, responses.NAMES),
    "/v1/messages": (messages.MessagesRequest, messages.NEUTRAL, messages.NAMES),
}
WANTED: dict[str, Any] = {
    "add_special_tokens": True,
    "echo": True,
    "include_reasoning": False,
    "logprob_token_ids": [5],
    "logprobs": True,
    "parallel_tool_calls": 5,
    "service_tier": "flex",
    "spaces_between_special_tokens": False,
    "stream_interval": 5,
    "thinking_token_budget": 5,
    "tool_choice": "required",
    "top_logprobs": 3,
}
"""What asks for something, where a made up value would not be one of the field."""

CASES = [(path, field) for path, fields in FIELDS.items() for field in fields.split()]


def error_of(response: httpx.Response) -> tuple[str, str]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error.get("param") or error["details"]["param"], error["message"]


@pytest.mark.parametrize(("path", "field"), CASES)
def test_a_field_is_honoured_or_refused(
    http: httpx.Client, served: Served, path: str, field: str
) -> None:
    shape, neutral, names = READ[path]
    honoured = field in names or field in shape.__struct_fields__  # type: ignore[attr-defined]
    assert honoured != (field in neutral), f"{field} is not known, or both"
    if honoured:
        wrong = {"not": ["this"]} if field not in ("metadata", "logit_bias") else [5]
        param, message = error_of(http.post(path, json=BODIES[path] | {field: wrong}))
        assert param.startswith(field)
        assert field in message
        return
    for value in (WANTED.get(field, "other"), {"asks": "for something"}):
        if value in neutral[field] and not isinstance(value, dict):
            continue
        param, message = error_of(http.post(path, json=BODIES[path] | {field: value}))
        assert param == field
        assert message == f"{field} is not supported yet; leave it out"
    assert served.client.tickets == []


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_that_nobody_knows_is_refused_too(http: httpx.Client, path: str) -> None:
    for field in (
        "detokenize",
        "skip_reading_prefix_cache",
        "extra_args",
        "guided_decoding_backend",
    ):
        param, message = error_of(http.post(path, json=BODIES[path] | {field: True}))
        assert param == field
        assert message.startswith(f"the field {field} is not known here")


@pytest.mark.parametrize("path", sorted({one.path for one in ENDPOINTS if one.reads}))
def test_B084_null_is_absent(http: httpx.Client, served: Served, path: str) -> None:
    """Each optional field of each endpoint, one at a time and all together."""
    valid = BODIES.get(path) or ELSEWHERE[path]
    (endpoint,) = (one for one in ENDPOINTS if one.path == path and one.reads)
    body = endpoint.reads[0]
    fields = {*body.shape.__struct_fields__, *body.names, *body.neutral} - valid.keys()
    plain = without_ids(http.post(path, json=valid | QUIET.get(path, {})))
    for nulls in (*([field] for field in sorted(fields)), sorted(fields)):
        asked = dict.fromkeys(nulls) | valid | QUIET.get(path, {})
        assert without_ids(http.post(path, json=asked)) == plain, nulls


ELSEWHERE: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "Hello"},
    "/api/show": {"model": "scripted"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [100]},
    "/debug/cache": {"messages": HELLO},
    "/admin/drain": {},
}
QUIET = {"/api/chat": {"stream": False}, "/api/generate": {"stream": False}}


def without_ids(response: httpx.Response) -> Any:
    """The answer without what is new in each."""
    assert response.status_code == 200, response.text
    answer = response.json()
    for name in ("id", "created", "created_at", "output"):
        answer.pop(name, None)
    return answer
