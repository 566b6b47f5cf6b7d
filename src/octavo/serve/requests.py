"""Request bodies: bytes to checked records, with every field honoured or refused by name."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from octavo.engine.door import Ticket
from octavo.engine.params import FOR_BEAMS, SamplingParams
from octavo.errors import InvalidRequest, PayloadTooLarge, RequestError
from octavo.serve.structured import structured_of

Shape = TypeVar("Shape", bound=msgspec.Struct)
JsonObject = dict[str, Any]
Neutral = Mapping[str, tuple[object, ...]]
"""Fields that other servers have and Octavo has not, each with the values that ask for nothing."""

NEUTRAL_EVERYWHERE: Neutral = {
    "ec_transfer_params": (),
    "kv_transfer_params": (),
    "logits_processors": (),
    "logprob_token_ids": ([],),
    "metadata": ({},),
    "repetition_detection": (),
    "request_id": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "session_id": (),
    "spaces_between_special_tokens": (True, False),  # tokenizers put none there
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "vllm_xargs": (),
    "watermarking": (False,),
}

ELSEWHERE: Mapping[str, str] = {
    "max_new_tokens": "use max_tokens",
    "messages": "POST it to /v1/chat/completions",
    "n_predict": "use max_tokens",
    "num_predict": "use max_tokens",
    "prompt": "POST it to /v1/completions",
    "response_format": "use text.format of responses, output_config.format of messages",
}
"""Fields that belong to other servers or endpoints, and what to do instead."""

LONGEST_TYPO = 40


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`include_usage`: one more chunk at the end, with usage. `continuous_usage_stats`: on every
    chunk as well."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a body that say how to answer; their ranges are `SamplingParams`' business."""

    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    min_p: float | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    repetition_penalty: float | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    logit_bias: dict[str, float] | UnsetType = UNSET
    dry_multiplier: float | UnsetType = UNSET
    dry_base: float | UnsetType = UNSET
    dry_allowed_length: int | UnsetType = UNSET
    dry_penalty_last_n: int | UnsetType = UNSET
    dry_sequence_breakers: tuple[str, ...] | UnsetType = UNSET
    top_n_sigma: float | UnsetType = UNSET
    typical_p: float | UnsetType = UNSET
    xtc_probability: float | UnsetType = UNSET
    xtc_threshold: float | UnsetType = UNSET
    response_format: JsonObject | UnsetType = UNSET
    structured_outputs: JsonObject | UnsetType = UNSET
    guided_json: str | JsonObject | UnsetType = UNSET
    guided_json_object: bool | UnsetType = UNSET
    guided_regex: str | UnsetType = UNSET
    guided_choice: tuple[str, ...] | UnsetType = UNSET
    guided_grammar: str | UnsetType = UNSET
    guided_whitespace_pattern: str | UnsetType = UNSET
    allowed_token_ids: tuple[int, ...] | UnsetType = UNSET
    bad_words: tuple[str, ...] | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET
    min_tokens: int | UnsetType = UNSET
    stop: str | tuple[str, ...] | UnsetType = UNSET
    stop_token_ids: tuple[int, ...] | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET
    include_stop_str_in_output: bool | UnsetType = UNSET
    skip_special_tokens: bool | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    n: int | UnsetType = UNSET
    use_beam_search: bool | UnsetType = UNSET
    length_penalty: float | UnsetType = UNSET
    early_stopping: bool | str | UnsetType = UNSET
    num_beam_groups: int | UnsetType = UNSET
    diversity_penalty: float | UnsetType = UNSET
    tenant: str | UnsetType = UNSET
    ttft_target_s: float | UnsetType = UNSET
    tpot_target_s: float | UnsetType = UNSET
    timeout_s: float | UnsetType = UNSET
    cache: str | UnsetType = UNSET
    cache_prompt: bool | UnsetType = UNSET
    cache_salt: str | UnsetType = UNSET
    cache_control: JsonObject | UnsetType = UNSET


Names = Mapping[str, str]
"""What an API calls the fields of `SamplingFields`: its own names to ours."""

SEVERAL_ANSWERS = ("use_beam_search", *FOR_BEAMS)
"""What only an API that gives several answers has."""
OWN_NAMES: Names = {
    name: name for name in SamplingFields.__struct_fields__ if name not in SEVERAL_ANSWERS
}
OPENAI_NAMES: Names = {
    **OWN_NAMES,
    **{name: name for name in SEVERAL_ANSWERS},
    "max_completion_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Body(Generic[Shape]):
    """What the body of a request may hold: fields of its own, as `shape` says; those of
    `SamplingFields` under the `names` of the API; and what is not supported, if `neutral`.
    `details` are schemas of fields that are checked only at the door, for the document."""

    shape: type[Shape]
    names: Names = field(default_factory=dict)
    neutral: Neutral = field(default_factory=dict)
    details: Mapping[str, JsonObject] = field(default_factory=dict)


def messages_schema(
    roles: Sequence[str], *, parts: Sequence[str] = ("text",), more: JsonObject | None = None
) -> JsonObject:
    """The schema of a list of messages: of these roles, with content that is text or `parts`."""
    part = {
        "type": "object",
        "properties": {
            "type": {"enum": list(parts)},
            "text": {"type": "string"},
            "cache_control": {"type": "object"},
        },
        "required": ["type", "text"],
    }
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
    message = {
        "type": "object",
        "properties": {"role": {"enum": list(roles)}, "content": content, **(more or {})},
        "required": ["role", "content"],
    }
    return {"type": "array", "items": message, "minItems": 1}


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body.

    Raises  PayloadTooLarge as soon as it is known to be larger than the limit.
    """
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    body = bytearray()
    if size <= limit_bytes:
        async for chunk in request.stream():
            body += chunk
            size = len(body)
            if size > limit_bytes:
                break
    if size > limit_bytes:
        raise PayloadTooLarge(f"the body is larger than {limit_bytes} bytes")
    return bytes(body)


def parse(
    body: bytes, known: Body[Shape], defaults: SamplingParams
) -> tuple[Shape, SamplingParams]:
    """The request and how to answer it. A null field counts as absent.

    Raises  InvalidRequest: broken JSON; a field is unknown, not supported, of the wrong type or out
            of range.
    """
    fields = take_neutral(json_object(body), known.neutral)
    sampling = {name: fields.pop(name) for name in known.names.keys() & fields.keys()}
    asked = convert(fields, known.shape, known.names)
    return asked, params_of(sampling, defaults, known.names)


def take_neutral(given: JsonObject, neutral: Neutral) -> JsonObject:
    """What is left of the fields without those that are null or neutral.

    Raises  InvalidRequest: one that is not supported asks for something.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    for name in [name for name in fields if name in neutral]:
        if not _asks_for_nothing(fields.pop(name), neutral[name]):
            raise InvalidRequest(f"{name} is not supported yet; leave it out", param=name)
    return fields


def params_of(fields: JsonObject, defaults: SamplingParams, names: Names) -> SamplingParams:
    """How to answer, from fields under the `names` of an API.

    Raises  InvalidRequest: a field is unknown, of the wrong type or out of range; two fields of one
            meaning differ.
    """
    ours: JsonObject = {}
    theirs: dict[str, str] = {}
    for name, value in fields.items():
        if name not in names:
            raise _unknown(name, names)
        own = names[name]
        if ours.setdefault(own, value) != value:
            raise InvalidRequest(
                f"{name} and {theirs[own]} differ; send one",
                param=theirs[own] if name == own else name,
            )
        theirs[own] = name
    with naming(partial(renamed, theirs)):
        return _params(convert(ours, SamplingFields, names), defaults)


@contextmanager
def naming(theirs: Callable[[str], str]) -> Iterator[None]:
    """Errors raised within name fields as the caller does; `theirs` gives their name for ours."""
    try:
        yield
    except RequestError as error:
        name = None if error.param is None else theirs(error.param)
        if error.param is None or name is None or name == error.param:
            raise
        named = type(error)(error.message.replace(error.param, name), param=name)
        named.code = error.code
        raise named from error


def renamed(names: Names, path: str) -> str:
    """`path` with its first name replaced, if `names` has another for it."""
    name, rest = re.fullmatch(r"([^.\[]*)(.*)", path, re.DOTALL).groups()  # type: ignore[union-attr]
    return names.get(name, name) + rest


def shifted(path: str, before: Sequence[str], name: str) -> str:
    """What a client calls `messages[i]`: the first are `before`, the others are counted from 0
    under `name`."""
    found = re.fullmatch(r"messages\[(\d+)\](\.content)?(.*)", path, re.DOTALL)
    if found is None:
        return name if path == "messages" else path
    index = int(found[1])
    if index < len(before):
        return f"{before[index]}{found[3]}"
    return f"{name}[{index - len(before)}]{found[2] or ''}{found[3]}"


def capped(ticket: Ticket, max_tokens: int) -> Ticket:
    """The ticket of an answer that may be so long at most, or shorter if the context ends before.

    Raises  InvalidRequest naming max_tokens.
    """
    if max_tokens < 1:
        raise InvalidRequest(
            f"max_tokens must be an integer of at least 1, not {max_tokens}", param="max_tokens"
        )
    fewest = min(max_tokens, ticket.request.max_tokens)
    return replace(ticket, request=replace(ticket.request, max_tokens=fewest))


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> StreamOptions:
    """The options of a stream; none when it is not one.

    Raises  InvalidRequest: options that would have no effect, or that are not supported.
    """
    if options is None:
        return StreamOptions()
    if not stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if options.include_obfuscation:
        raise InvalidRequest(
            "stream_options.include_obfuscation is not supported; leave it out",
            param="stream_options.include_obfuscation",
        )
    if options.continuous_usage_stats and not options.include_usage:
        raise InvalidRequest(
            "stream_options.continuous_usage_stats needs include_usage: true",
            param="stream_options.continuous_usage_stats",
        )
    return options


def json_object(body: bytes) -> JsonObject:
    """Raises  InvalidRequest: the body is no JSON, or no object."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"the body is a JSON {type(content).__name__}; send an object")
    return content


def _asks_for_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether a value is one of the neutral ones; true is not 1 here."""
    return any(
        value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral
    )


def convert(fields: JsonObject, shape: type[Shape], others: Collection[str] = ()) -> Shape:
    """The fields as a record. A misspelled one may mean one of its own, or of the `others`.

    Raises  InvalidRequest.
    """
    try:
        return msgspec.convert(fields, shape)
    except msgspec.ValidationError as error:
        raise explained(str(error), {*shape.__struct_fields__, *others}) from error


def explained(message: str, known: Collection[str]) -> InvalidRequest:
    """The library's message, as an error that names the field; `known` are those we have."""
    if found := re.search(r"unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", message):
        return _unknown(".".join(filter(None, (found[2], found[1]))), known)
    if found := re.search(r"missing required field `(.*?)`", message):
        return InvalidRequest(f"the field {found[1]} is missing", param=found[1])
    what, _, path = message.partition(" - at `$.")
    name = path.rstrip("`").replace("[...]", "")
    return InvalidRequest(f"{name}: {what[:1].lower()}{what[1:]}", param=name or None)


def _unknown(name: str, known: Collection[str]) -> InvalidRequest:
    return InvalidRequest(f"the field {name} is not known here; {_advice(name, known)}", param=name)


def _advice(unknown: str, known: Collection[str]) -> str:
    """What to do about a field that we do not have."""
    if unknown in ELSEWHERE:
        return ELSEWHERE[unknown]
    # Comparing takes the product of the lengths: not for a name of a megabyte.
    near = get_close_matches(unknown, known, n=1, cutoff=0.8) if len(unknown) < LONGEST_TYPO else []
    return f"did you mean {near[0]}?" if near else "leave it out"


def _params(fields: SamplingFields, defaults: SamplingParams) -> SamplingParams:
    given = {
        name: value for name, value in msgspec.structs.asdict(fields).items() if value is not UNSET
    }
    if isinstance(stop := given.get("stop"), str):
        given["stop"] = (stop,)
    _merge_cache_prompt(given)
    if (structured := structured_of(given)) is not None:
        given["structured"] = structured
    if given.get("use_beam_search"):
        defaults = defaults.without_draws()
    return replace(defaults, **given)


def _merge_cache_prompt(given: JsonObject) -> None:
    """llama.cpp's name for `cache`, as a switch."""
    switch = given.pop("cache_prompt", None)
    if switch is None:
        return
    meant = "on" if switch else "off"
    if given.setdefault("cache", meant) != meant:
        raise InvalidRequest("cache and cache_prompt differ; send one", param="cache_prompt")
