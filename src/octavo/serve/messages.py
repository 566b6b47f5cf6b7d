"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.door import Door, Ticket
from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.serve.answers import OctavoUsage, Tally, collect, merge
from octavo.serve.dialect import ANTHROPIC
from octavo.serve.errors import json_response
from octavo.serve.requests import (
    OWN_NAMES,
    Body,
    JsonObject,
    Names,
    Neutral,
    capped,
    messages_schema,
    naming,
    parse,
    read_body,
    shifted,
)
from octavo.serve.service import Service
from octavo.serve.stream import stream_response, while_connected
from octavo.serve.structured import of_output_format
from octavo.text.assembler import Ended
from octavo.text.chat import Ending

COUNT_NEUTRAL: Neutral = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "context_management": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "tools": ([],),
}
NEUTRAL: Neutral = {
    **COUNT_NEUTRAL,
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
    "kv_transfer_params": (),
    "service_tier": ("auto", "standard_only"),
    "user_profile_id": (),
    "vllm_xargs": (),
}
NAMES: Names = {
    "stop_sequences": "stop",
    **{
        name: ours
        for name, ours in OWN_NAMES.items()
        if name not in ("cache_prompt", "max_tokens", "min_tokens", "n", "response_format", "stop")
    },
}
"""One answer is given. How long it may be is a field of the request, and a cap only."""
COUNT_NAMES: Names = {"cache_control": "cache_control"}
"""Checked as in a request; counting keeps nothing."""

ROLES = ("user", "assistant", "system")


class Metadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    user_id: str | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: JsonObject | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked. Messages and system are checked at the door."""

    messages: list[Any]
    model: str | None = None
    system: str | list[Any] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonObject | None = None


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body, without the fields of `NAMES`."""

    messages: list[Any]
    max_tokens: int
    model: str | None = None
    system: str | list[Any] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    output_format: JsonObject | None = None
    """What `output_config.format` was called before."""


DETAILS = {"messages": messages_schema(ROLES)}
BODY = Body(shape=MessagesRequest, names=NAMES, neutral=NEUTRAL, details=DETAILS)
COUNT_BODY = Body(shape=CountRequest, names=COUNT_NAMES, neutral=COUNT_NEUTRAL, details=DETAILS)


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt is the sum of three: what the cache had, what breakpoints asked to keep and it had
    not, and the rest. Known when the answer has ended; before that all of it counts as the rest."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "text"
    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: tuple[TextBlock, ...] = ()
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    octavo: OctavoUsage | UnsetType = UNSET


class MessageStart(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "message_start"
    message: Message


class BlockStart(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "content_block_start"
    index: int = 0
    content_block: TextBlock = TextBlock(text="")


class Ping(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "ping"


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "text_delta"
    text: str


class BlockDelta(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "content_block_delta"
    index: int = 0
    delta: TextDelta


class BlockStop(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "content_block_stop"
    index: int = 0


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "message_delta"
    delta: Stopped
    usage: MessageUsage
    octavo: OctavoUsage


class MessageStop(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "message_stop"


async def create_message(service: Service, request: Request) -> Response:
    """The endpoint."""
    body = await read_body(request, service.settings.max_body_bytes)
    asked, params = parse(body, BODY, service.settings.defaults)
    params = _formatted(params, asked)
    model = service.model_named(asked.model)
    ticket = await service.at_door(len(body), lambda: _ticket(service.door, asked, params), params)
    user = None if asked.metadata is None else asked.metadata.user_id
    tally = Tally([ticket])
    blank = Message(id=f"msg_{ticket.request.id}", model=model, usage=_usage(tally))
    if asked.stream:
        events = _events(service, ticket, blank, asked, user)
        return await stream_response(request.receive, events, ANTHROPIC)
    (answer,) = await while_connected(request.receive, collect(service, [ticket], tally))
    stopped = _stopped(ticket, asked.max_tokens, answer.ended)
    whole = msgspec.structs.replace(
        blank,
        content=(TextBlock(text=answer.text),),
        stop_reason=stopped.stop_reason,
        stop_sequence=stopped.stop_sequence,
        usage=_usage(tally),
        octavo=tally.cost(user),
    )
    return json_response(whole)


async def count_tokens(service: Service, request: Request) -> Response:
    """How many tokens the prompt of a message would have."""
    body = await read_body(request, service.settings.max_body_bytes)
    asked, params = parse(body, COUNT_BODY, service.settings.defaults)
    _formatted(params, asked)  # it adds nothing to the prompt
    service.model_named(asked.model)
    count = await service.at_door(len(body), lambda: _count(service.door, asked))
    return json_response(TokenCount(input_tokens=count))


def _formatted(params: SamplingParams, asked: MessagesRequest | CountRequest) -> SamplingParams:
    config = None if asked.output_config is None else asked.output_config.format
    given = {"output_config.format": config, "output_format": asked.output_format}
    found = [of_output_format(value, name) for name, value in given.items() if value is not None]
    found += [params.structured] if params.structured is not None else []
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0].called} and {found[1].called} both say what the answer must be; send one",
            param=found[1].called,
        )
    return replace(params, structured=found[0]) if found else params


def _ticket(door: Door, asked: MessagesRequest, params: SamplingParams) -> Ticket:
    with naming(partial(_as_sent, asked)):
        ticket = door.chat(_conversation(asked), params, _ending(asked))
    return capped(ticket, asked.max_tokens)


def _count(door: Door, asked: CountRequest) -> int:
    with naming(partial(_as_sent, asked)):
        text = door.render(_conversation(asked), _ending(asked))
    return len(door.encode(text, add_special=False))


def _conversation(asked: MessagesRequest | CountRequest) -> list[Any]:
    """The messages, after one that holds the system prompt if there is any."""
    first = [{"role": "system", "content": asked.system}] if asked.system else []
    for n, message in enumerate(asked.messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role is not None and role not in ROLES:
            where = f"messages[{n + len(first)}].role"
            raise InvalidRequest(
                f"{where} is {role!r}; it must be one of {', '.join(ROLES)}", param=where
            )
    return [*first, *asked.messages]


def _ending(asked: MessagesRequest | CountRequest) -> Ending:
    """An answer goes on with a last message of the assistant."""
    last = asked.messages[-1] if asked.messages else None
    return "continued" if isinstance(last, dict) and last.get("role") == "assistant" else "answer"


def _as_sent(asked: MessagesRequest | CountRequest, param: str) -> str:
    """What the client calls a message that is counted from the system prompt on."""
    return shifted(param, ("system",) if asked.system else (), "messages")


async def _events(
    service: Service, ticket: Ticket, blank: Message, asked: MessagesRequest, user: str | None
) -> AsyncGenerator[msgspec.Struct, None]:
    """The message without its text, the text as one block, and why it ended."""
    tally = Tally([ticket])
    started = False
    async with aclosing(merge(service, [ticket])) as items:
        async for _, item in items:
            tally.add(item)
            if not started:
                started = True
                yield MessageStart(message=blank)
                yield BlockStart()
                yield Ping()
            if isinstance(item, Ended):
                yield BlockStop()
                stopped = _stopped(ticket, asked.max_tokens, item)
                yield MessageDelta(delta=stopped, usage=_usage(tally), octavo=tally.cost(user))
            elif item.text:
                yield BlockDelta(delta=TextDelta(text=item.text))
    yield MessageStop()


def _stopped(ticket: Ticket, max_tokens: int, ended: Ended) -> Stopped:
    if ended.finish_reason == "length":
        whole = ticket.request.max_tokens < max_tokens
        reason = "model_context_window_exceeded" if whole else "max_tokens"
        return Stopped(stop_reason=reason, stop_sequence=None)
    if isinstance(ended.stop_reason, str):
        return Stopped(stop_reason="stop_sequence", stop_sequence=ended.stop_reason)
    return Stopped(stop_reason="end_turn", stop_sequence=None)


def _usage(tally: Tally) -> MessageUsage:
    prompt = tally.prompt_split()
    return MessageUsage(
        input_tokens=prompt.rest,
        cache_creation_input_tokens=prompt.written,
        cache_read_input_tokens=prompt.read,
        output_tokens=tally.usage().completion_tokens,
    )
