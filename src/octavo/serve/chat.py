"""POST /v1/chat/completions: the assistant's next message."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.door import Ticket
from octavo.serve.answers import OctavoUsage, Tally, Usage, collect, merge
from octavo.serve.errors import json_response
from octavo.serve.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    chat_logprobs,
    chat_params,
    prompt_logprobs,
    prompt_params,
)
from octavo.serve.requests import (
    NEUTRAL_EVERYWHERE,
    OPENAI_NAMES,
    Body,
    Neutral,
    StreamOptions,
    check_stream_options,
    messages_schema,
    parse,
    read_body,
)
from octavo.serve.service import Service
from octavo.serve.stream import stream_response, while_connected
from octavo.text.assembler import Delta
from octavo.text.chat import ROLES, ending_of

NEUTRAL: Neutral = {
    **NEUTRAL_EVERYWHERE,
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_payload": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # of no calls at all
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body, without the fields of `SamplingFields`. Messages are checked at the door.

    With `continue_final_message` the answer goes on with the last message. Without
    `add_generation_prompt` nothing says that an answer of the assistant follows. A `chat_template`
    of its own is taken where clients are trusted.
    """

    messages: list[Any]
    model: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


BODY = Body(
    shape=ChatRequest,
    names=OPENAI_NAMES,
    neutral=NEUTRAL,
    details={"messages": messages_schema(ROLES, more={"name": {"type": "string"}})},
)


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage
    octavo: OctavoUsage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...] = ()
    usage: Usage | UnsetType | None = UNSET
    octavo: OctavoUsage | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


async def create_chat_completion(service: Service, request: Request) -> Response:
    """The endpoint."""
    body = await read_body(request, service.settings.max_body_bytes)
    asked, params = parse(body, BODY, service.settings.defaults)
    params = chat_params(service.door, params, asked.logprobs, asked.top_logprobs)
    params = prompt_params(service.door, params, asked.prompt_logprobs, asked.stream)
    model = service.model_named(asked.model)
    options = check_stream_options(asked.stream, asked.stream_options)
    ending = ending_of(asked.add_generation_prompt, asked.continue_final_message)
    ticket = await service.at_door(
        len(body),
        lambda: service.door_for(asked.chat_template).chat(asked.messages, params, ending),
        params,
    )
    answer_id, created = f"chatcmpl-{ticket.request.id}", int(time.time())
    if asked.stream:
        blank = ChatChunk(id=answer_id, created=created, model=model)
        chunks = _chunks(service, ticket, blank, options, asked)
        return await stream_response(request.receive, chunks)
    tally, tokenizer = Tally([ticket]), service.door.tokenizer
    answers = await while_connected(request.receive, collect(service, [ticket], tally))
    choices = tuple(
        ChatChoice(
            index=index,
            message=ChatMessage(content=answer.text),
            logprobs=chat_logprobs(tokenizer, answer.scored) if asked.logprobs else None,
            finish_reason=answer.ended.finish_reason,
            stop_reason=answer.ended.stop_reason,
            token_ids=answer.token_ids if asked.return_token_ids else UNSET,
        )
        for index, answer in enumerate(answers)
    )
    return json_response(
        ChatCompletion(
            id=answer_id,
            created=created,
            model=model,
            choices=choices,
            usage=tally.usage(),
            octavo=tally.cost(asked.user),
            prompt_token_ids=ticket.request.prompt if asked.return_token_ids else UNSET,
            prompt_logprobs=UNSET
            if params.prompt_logprobs is None
            else prompt_logprobs(tokenizer, answers[0].prompt, params.prompt_logprobs),
        )
    )


async def _chunks(
    service: Service, ticket: Ticket, blank: ChatChunk, options: StreamOptions, asked: ChatRequest
) -> AsyncGenerator[ChatChunk, None]:
    """Of each choice the role with the first token, then text, then the reason it ended; then usage
    if asked."""
    tally = Tally([ticket])

    def chunk(index: int, delta: ChatDelta, **others: Any) -> ChatChunk:
        absent = None if options.include_usage else UNSET
        return msgspec.structs.replace(
            blank,
            choices=(ChatChunkChoice(index=index, delta=delta, **others),),
            usage=tally.usage() if options.continuous_usage_stats else absent,
        )

    started: set[int] = set()
    async with aclosing(merge(service, [ticket])) as items:
        async for index, item in items:
            tally.add(item)
            if index not in started:
                first = chunk(index, ChatDelta(role="assistant", content=""))
                if asked.return_token_ids and not started:
                    first = msgspec.structs.replace(first, prompt_token_ids=ticket.request.prompt)
                started.add(index)
                yield first
            if not isinstance(item, Delta):
                ending = {"finish_reason": item.finish_reason, "stop_reason": item.stop_reason}
                yield chunk(index, ChatDelta(), **ending)
                continue
            others: dict[str, Any] = {}
            if item.scored:
                others["logprobs"] = chat_logprobs(service.door.tokenizer, item.scored)
            if asked.return_token_ids:
                others["token_ids"] = item.token_ids
            if item.text or others:
                yield chunk(index, ChatDelta(content=item.text), **others)
    if options.include_usage:
        yield msgspec.structs.replace(blank, usage=tally.usage(), octavo=tally.cost(asked.user))
