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
from octavo.engine.params import SamplingParams
from octavo.engine.voice import Effort, Talk
from octavo.serve.answers import (
    Answer,
    OctavoUsage,
    Tally,
    Usage,
    call_id,
    collect,
    has_called,
    merge,
    parts_of,
)
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
    JsonObject,
    Neutral,
    StreamOptions,
    check_stream_options,
    messages_schema,
    parse,
    read_body,
)
from octavo.serve.service import Service
from octavo.serve.stream import stream_response, while_connected
from octavo.serve.tools import of_chat
from octavo.text.assembler import Delta, Ended
from octavo.text.chat import ROLES, ending_of
from octavo.text.parts import Argued, Begun, Part, Thought

NEUTRAL: Neutral = {
    **{name: values for name, values in NEUTRAL_EVERYWHERE.items() if "thinking" not in name},
    "add_special_tokens": (False,),
    "audio": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_payload": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": (),
    "web_search_options": (),
}


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body, without the fields of `SamplingFields`. Messages are checked at the door.

    With `continue_final_message` the answer goes on with the last message. Without
    `add_generation_prompt` nothing says that an answer of the assistant follows. A `chat_template`
    of its own is taken where clients are trusted; `chat_template_kwargs` are variables for it.
    Without `include_reasoning` the reasoning before an answer is left out; it ends after
    `thinking_token_budget` tokens, of which -1 is no limit.
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
    chat_template_kwargs: JsonObject | None = None
    tools: list[Any] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


BODY = Body(
    shape=ChatRequest,
    names=OPENAI_NAMES,
    neutral=NEUTRAL,
    details={"messages": messages_schema(ROLES, more={"name": {"type": "string"}})},
)


class Function(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: Function


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The first of a call has its id and name, the others more of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning_content` is an older name of `reasoning`. The content is null where there are
    only these or calls."""

    role: str = "assistant"
    content: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET


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
    talk = talk_of(asked)
    ticket = await service.at_door(
        len(body), lambda: ticket_of(service, asked, params, talk), params, talk
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
            message=_message(answer, reasoning=asked.include_reasoning is not False),
            logprobs=chat_logprobs(tokenizer, answer.scored) if asked.logprobs else None,
            finish_reason=_reason(ticket, answer.ended),
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


def talk_of(asked: ChatRequest) -> Talk:
    """What a chat asks for beside its messages.

    Raises  InvalidRequest.
    """
    budget = asked.thinking_token_budget
    return Talk(
        tools=of_chat(asked.tools, asked.tool_choice, asked.parallel_tool_calls),
        variables=asked.chat_template_kwargs or {},
        effort=asked.reasoning_effort,
        budget=None if budget == -1 else budget,
    )


def ticket_of(service: Service, asked: ChatRequest, params: SamplingParams, talk: Talk) -> Ticket:
    """Raises  RequestError."""
    ending = ending_of(asked.add_generation_prompt, asked.continue_final_message)
    return service.door_for(asked.chat_template).chat(asked.messages, params, ending, talk)


def _reason(ticket: Ticket, ended: Ended) -> str:
    return "tool_calls" if has_called(ticket, ended) else ended.finish_reason


def _message(answer: Answer, *, reasoning: bool) -> ChatMessage:
    thought = answer.reasoning if reasoning and answer.reasoning else UNSET
    calls = tuple(
        ToolCall(id=call.id, function=Function(name=call.name, arguments=call.arguments))
        for call in answer.calls
    )
    alone = not answer.text and (calls or answer.reasoning)
    return ChatMessage(
        content=None if alone else answer.text,
        reasoning=thought,
        reasoning_content=thought,
        tool_calls=calls or UNSET,
    )


def _delta(ticket: Ticket, branch: int, part: Part) -> ChatDelta:
    if isinstance(part, Thought):
        return ChatDelta(reasoning=part.text, reasoning_content=part.text)
    if isinstance(part, Begun):
        call = ToolCallDelta(
            index=part.index,
            id=call_id(ticket, branch, part.index),
            type="function",
            function=Function(name=part.name, arguments=""),
        )
        return ChatDelta(tool_calls=(call,))
    if isinstance(part, Argued):
        more = ToolCallDelta(index=part.index, function=Function(arguments=part.text))
        return ChatDelta(tool_calls=(more,))
    return ChatDelta(content=part.text)


async def _chunks(
    service: Service, ticket: Ticket, blank: ChatChunk, options: StreamOptions, asked: ChatRequest
) -> AsyncGenerator[ChatChunk, None]:
    """Of each choice the role with the first token, then reasoning, text and calls, then the reason
    it ended; then usage if asked."""
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
            others: dict[str, Any] = {}
            if isinstance(item, Delta) and item.scored:
                others["logprobs"] = chat_logprobs(service.door.tokenizer, item.scored)
            if isinstance(item, Delta) and asked.return_token_ids:
                others["token_ids"] = item.token_ids
            for part in parts_of(ticket, item):
                if asked.include_reasoning is not False or not isinstance(part, Thought):
                    yield chunk(index, _delta(ticket, item.branch, part), **others)
                    others = {}
            if others:
                yield chunk(index, ChatDelta(content=""), **others)
            if isinstance(item, Ended):
                reason = _reason(ticket, item)
                ending = {"finish_reason": reason, "stop_reason": item.stop_reason}
                yield chunk(index, ChatDelta(), **ending)
    if options.include_usage:
        yield msgspec.structs.replace(blank, usage=tally.usage(), octavo=tally.cost(asked.user))
