"""POST /v1/responses: OpenAI's Responses API. Nothing is stored; a request brings what was said."""

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse

from octavo.engine.door import Door, Ticket
from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.serve.answers import OctavoUsage, Tally, collect, merge
from octavo.serve.dialect import OPENAI, Dialect, known, named_event, shortened
from octavo.serve.errors import json_response
from octavo.serve.logprobs import TokenLogprob, chat_logprobs, chat_params
from octavo.serve.requests import (
    NEUTRAL_EVERYWHERE,
    OWN_NAMES,
    Body,
    JsonObject,
    Names,
    Neutral,
    messages_schema,
    naming,
    parse,
    read_body,
    shifted,
)
from octavo.serve.service import Service
from octavo.serve.stream import stream_response, while_connected
from octavo.serve.structured import of_text_format
from octavo.text.assembler import Ended

NEUTRAL: Neutral = {
    **{name: values for name, values in NEUTRAL_EVERYWHERE.items() if name != "metadata"},
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "context_management": ([],),
    "conversation": (),
    "enable_response_messages": (False,),
    "image": (),
    "max_tool_calls": (),
    "mm_processor_kwargs": ({},),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # of no calls at all
    "previous_input_messages": ([],),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning": ({}, {"effort": None, "summary": None}),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
}
_OTHERS = ("max_tokens", "n", "response_format")
NAMES: Names = {
    "max_output_tokens": "max_tokens",
    **{name: ours for name, ours in OWN_NAMES.items() if name not in _OTHERS},
}

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

_PARTS = ("input_text", "output_text")
_OF_ANSWERS = ("annotations", "logprobs")
"""What a part of an answer holds, empty, when it is sent back as it came."""


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text of an answer must be."""

    format: JsonObject | None = None


class ResponseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body, without the fields of `NAMES`. What `input` holds is checked at the door."""

    input: str | list[Any]
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = None
    instructions: str | None = None
    model: str | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None


INPUT = messages_schema(
    ("system", "developer", "user", "assistant"),
    parts=_PARTS,
    more={"type": {"const": "message"}, "id": {"type": "string"}, "status": {"type": "string"}},
)
BODY = Body(
    shape=ResponseRequest,
    names=NAMES,
    neutral=NEUTRAL,
    details={"input": {"anyOf": [{"type": "string"}, INPUT]}},
)


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "output_text"
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is in_progress, completed or incomplete."""

    id: str
    type: str = "message"
    role: str = "assistant"
    status: str
    content: tuple[OutputText, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str


class Incomplete(msgspec.Struct, frozen=True, kw_only=True):
    reason: str


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """As it was asked."""

    format: JsonObject


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is in_progress, completed, incomplete or failed."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    error: Failed | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: tuple[OutputMessage, ...] = ()
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: bool = False
    temperature: float
    text: TextConfig
    tool_choice: str = "auto"
    tools: tuple[()] = ()
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    octavo: OctavoUsage | UnsetType = UNSET


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What happens in a stream; which fields there are depends on the type."""

    type: str
    sequence_number: int = 0
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputMessage | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: tuple[TokenLogprob, ...] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


async def create_response(service: Service, request: Request) -> HTTPResponse:
    """The endpoint."""
    body = await read_body(request, service.settings.max_body_bytes)
    asked, params = parse(body, BODY, service.settings.defaults)
    _check_metadata(asked.metadata or {})
    params = _with_logprobs(service.door, params, asked)
    text_format = (asked.text and asked.text.format) or {"type": "text"}
    params = _formatted(params, text_format)
    model = service.model_named(asked.model)
    ticket = await service.at_door(len(body), lambda: _ticket(service.door, asked, params), params)
    blank = Response(
        id=f"resp_{ticket.request.id}",
        created_at=int(time.time()),
        instructions=asked.instructions,
        max_output_tokens=params.max_tokens,
        metadata=asked.metadata or {},
        model=model,
        temperature=params.temperature,
        text=TextConfig(format=text_format),
        top_p=params.top_p,
        user=asked.user,
    )
    if asked.stream:
        events = _events(service, ticket, blank)
        return await stream_response(request.receive, events, _dialect(blank))
    tally = Tally([ticket])
    (answer,) = await while_connected(request.receive, collect(service, [ticket], tally))
    logprobs = chat_logprobs(service.door.tokenizer, answer.scored).content
    part = OutputText(text=answer.text, logprobs=logprobs)
    return json_response(_whole(blank, part, answer.ended, tally))


def _check_metadata(metadata: Mapping[str, str]) -> None:
    fits = len(metadata) <= MAX_METADATA and all(
        len(key) <= MAX_METADATA_KEY and len(value) <= MAX_METADATA_VALUE
        for key, value in metadata.items()
    )
    if not fits:
        raise InvalidRequest(
            f"metadata may have {MAX_METADATA} keys of {MAX_METADATA_KEY} characters, with values"
            f" of {MAX_METADATA_VALUE}",
            param="metadata",
        )


def _with_logprobs(door: Door, params: SamplingParams, asked: ResponseRequest) -> SamplingParams:
    if asked.top_logprobs and not asked.include:
        raise InvalidRequest(
            "top_logprobs needs include: ['message.output_text.logprobs']", param="top_logprobs"
        )
    return chat_params(door, params, bool(asked.include), asked.top_logprobs)


# --- what is asked


def _formatted(params: SamplingParams, text_format: JsonObject) -> SamplingParams:
    structured = of_text_format(text_format)
    if structured is None:
        return params
    if params.structured is not None:
        raise InvalidRequest(
            f"{params.structured.called} and text.format both say what the answer must be; send"
            " one",
            param="text.format",
        )
    return replace(params, structured=structured)


def _ticket(door: Door, asked: ResponseRequest, params: SamplingParams) -> Ticket:
    messages = _conversation(asked)
    with naming(partial(_as_sent, asked)):
        return door.chat(messages, params)


def _as_sent(asked: ResponseRequest, param: str) -> str:
    """What the client calls a message that is counted from the instructions on."""
    if param == "max_tokens":
        return "max_output_tokens"
    before = ["instructions"] if asked.instructions else []
    if isinstance(asked.input, str):
        before.append("input")
    return shifted(param, before, "input")


def _conversation(asked: ResponseRequest) -> list[Any]:
    """The messages, after one that holds the instructions if there are any."""
    if not asked.input and isinstance(asked.input, list):
        raise InvalidRequest("input is empty: send at least one message", param="input")
    first = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    if isinstance(asked.input, str):
        return [*first, {"role": "user", "content": asked.input}]
    return [*first, *(_message(item, f"input[{n}]") for n, item in enumerate(asked.input))]


def _message(item: object, where: str) -> object:
    """An item of the input as a message; what is wrong with that is for the door to say."""
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where} is not an object with role and content", param=where)
    kind = item.get("type", "message")
    if kind not in ("message", None):
        raise InvalidRequest(
            f"{where}.type is {kind!r}; only messages are supported", param=f"{where}.type"
        )
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part, f"{where}.content[{n}]") for n, part in enumerate(content)]
    dropped = {"type", "id", "status"}
    return {key: value for key, value in item.items() if key not in dropped} | {"content": content}


def _part(part: object, where: str) -> object:
    if not isinstance(part, dict) or part.get("type") not in _PARTS:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise InvalidRequest(f"{where} is of type {kind!r}; only text is supported", param=where)
    kept = {key: value for key, value in part.items() if not (key in _OF_ANSWERS and value == [])}
    return kept | {"type": "text"}


# --- what is answered


async def _events(service: Service, ticket: Ticket, blank: Response) -> AsyncGenerator[Event, None]:
    """The response with one message, which has one part of text."""
    tally = Tally([ticket])
    item_id = _item_id(blank)
    place: dict[str, Any] = {"item_id": item_id, "output_index": 0, "content_index": 0}
    texts: list[str] = []
    scores: list[TokenLogprob] = []
    started = False
    async with aclosing(merge(service, [ticket])) as items:
        async for _, item in items:
            tally.add(item)
            if not started:
                started = True
                yield Event(type="response.created", response=blank)
                yield Event(type="response.in_progress", response=blank)
                message = OutputMessage(id=item_id, status="in_progress")
                yield Event(type="response.output_item.added", output_index=0, item=message)
                part = OutputText(text="")
                yield Event(type="response.content_part.added", part=part, **place)
            if isinstance(item, Ended):
                part = OutputText(text="".join(texts), logprobs=tuple(scores))
                whole = _whole(blank, part, item, tally)
                for event in _endings(whole, place):
                    yield event
            elif item.text or item.scored:
                logprobs = chat_logprobs(service.door.tokenizer, item.scored).content
                texts.append(item.text)
                scores += logprobs
                yield Event(
                    type="response.output_text.delta", delta=item.text, logprobs=logprobs, **place
                )


def _endings(whole: Response, place: dict[str, Any]) -> tuple[Event, ...]:
    """Part, message and response end in this order."""
    (message,) = whole.output
    (part,) = message.content
    return (
        Event(type="response.output_text.done", text=part.text, logprobs=part.logprobs, **place),
        Event(type="response.content_part.done", part=part, **place),
        Event(type="response.output_item.done", output_index=0, item=message),
        Event(type=f"response.{whole.status}", response=whole),
    )


def _whole(blank: Response, part: OutputText, ended: Ended, tally: Tally) -> Response:
    short = ended.finish_reason == "length"
    status = "incomplete" if short else "completed"
    return msgspec.structs.replace(
        blank,
        status=status,
        incomplete_details=Incomplete(reason="max_output_tokens") if short else None,
        output=(OutputMessage(id=_item_id(blank), status=status, content=(part,)),),
        usage=_usage(tally),
        octavo=tally.cost(blank.user),
    )


def _item_id(blank: Response) -> str:
    return f"msg_{blank.id.removeprefix('resp_')}"


def _usage(tally: Tally) -> ResponseUsage:
    usage, prompt = tally.usage(), tally.prompt_split()
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(
            cached_tokens=prompt.read, cache_write_tokens=prompt.written
        ),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )


def _dialect(blank: Response) -> Dialect:
    """Events are named and numbered; the last of a stream that fails says so too."""
    numbers = count()

    def frame(event: msgspec.Struct) -> bytes:
        return named_event(msgspec.structs.replace(event, sequence_number=next(numbers)))

    def failure(error: Exception) -> tuple[Event, ...]:
        told = known(error)
        message = shortened(told.message)
        failed = Failed(code="server_error", message=message)
        return (
            Event(type="error", code=told.code, message=message, param=told.param),
            Event(
                type="response.failed",
                response=msgspec.structs.replace(blank, status="failed", error=failed),
            ),
        )

    return replace(OPENAI, frame=frame, failure=failure, end=b"")
