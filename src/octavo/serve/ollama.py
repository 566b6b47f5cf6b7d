"""POST /api/chat and /api/generate: Ollama's API, which streams unless it is told not to."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.door import Door, Ticket
from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.serve.answers import OctavoUsage, Tally, collect, merge
from octavo.serve.dialect import OLLAMA
from octavo.serve.errors import json_response
from octavo.serve.logprobs import TokenLogprob, chat_logprobs, chat_params
from octavo.serve.requests import (
    Body,
    JsonObject,
    Names,
    Neutral,
    capped,
    convert,
    messages_schema,
    naming,
    params_of,
    parse,
    read_body,
    take_neutral,
)
from octavo.serve.service import Service
from octavo.serve.stream import stream_response, while_connected
from octavo.serve.structured import of_format
from octavo.text.assembler import Ended, Scored
from octavo.text.chat import ROLES

COMMON_NEUTRAL: Neutral = {
    "shift": (False,),
    "think": (False,),
    "truncate": (False,),
}
CHAT_NEUTRAL: Neutral = {**COMMON_NEUTRAL, "tools": ([],)}
GENERATE_NEUTRAL: Neutral = {
    **COMMON_NEUTRAL,
    "context": ([],),
    "height": (0,),
    "images": ([],),
    "steps": (0,),
    "suffix": ("",),
    "template": ("",),
    "width": (0,),
}
OPTION_NAMES: Names = {
    "frequency_penalty": "frequency_penalty",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "repeat_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "typical_p": "typical_p",
}
OPTION_NEUTRAL: Neutral = {
    "embedding_only": (False,),
    "f16_kv": (True,),
    "logits_all": (False,),
    "low_vram": (False,),
    "main_gpu": (0,),
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5,),
    "num_batch": (),
    "num_gpu": (0,),
    "num_keep": (-1, 0, 4),
    "num_thread": (0,),
    "numa": (False,),
    "penalize_newline": (True,),
    "repeat_last_n": (-1, 64),
    "tfs_z": (1,),
    "use_mlock": (False,),
    "use_mmap": (True,),
    "vocab_only": (False,),
}
"""A penalty sees all of prompt and answer. How memory and cores are used is for the server's
settings to say; an answer that reaches the end of the context ends there, so that nothing of a
prompt is ever dropped."""

NS = 10**9


class Room(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that say how long prompt and answer may be; a negative `num_predict` is no limit."""

    num_ctx: int | None = None
    num_predict: int | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body. `keep_alive` asks for nothing here: the model stays where it is."""

    model: str | None = None
    messages: list[Any] | None = None
    format: str | JsonObject | None = None
    options: JsonObject | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    keep_alive: float | str | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body. A `raw` prompt goes past the chat template."""

    model: str | None = None
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    format: str | JsonObject | None = None
    options: JsonObject | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    keep_alive: float | str | None = None


CHAT_BODY = Body(
    shape=ChatRequest,
    neutral=CHAT_NEUTRAL,
    details={"messages": messages_schema(ROLES) | {"minItems": 0}},
)
GENERATE_BODY = Body(shape=GenerateRequest, neutral=GENERATE_NEUTRAL)


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer, or a whole one; what it took is said at its end. Times are in
    nanoseconds; loading takes none. `response` is of /api/generate, `message` of /api/chat."""

    model: str
    created_at: str
    response: str | UnsetType = UNSET
    message: ChatMessage | UnsetType = UNSET
    logprobs: tuple[TokenLogprob, ...] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    octavo: OctavoUsage | UnsetType = UNSET


def chat_part(text: str) -> dict[str, Any]:
    return {"message": ChatMessage(content=text)}


def generate_part(text: str) -> dict[str, Any]:
    return {"response": text}


SaidAs = Callable[[str], dict[str, Any]]
"""The field of a part that holds a text."""


async def chat(service: Service, request: Request) -> Response:
    """The endpoint /api/chat."""
    body = await read_body(request, service.settings.max_body_bytes)
    asked, _ = parse(body, CHAT_BODY, service.settings.defaults)
    messages = asked.messages or []

    def ticket(door: Door, params: SamplingParams) -> Ticket:
        return door.chat(messages, params)

    made = ticket if messages else None
    return await _answer(service, request, len(body), asked, chat_part, made)


async def generate(service: Service, request: Request) -> Response:
    """The endpoint /api/generate."""
    body = await read_body(request, service.settings.max_body_bytes)
    asked, _ = parse(body, GENERATE_BODY, service.settings.defaults)
    if asked.raw and asked.system:
        raise InvalidRequest("system has no place in a raw prompt; put it into it", param="system")
    prompt = asked.prompt or ""
    talk = [{"role": "system", "content": asked.system}] if asked.system else []
    talk.append({"role": "user", "content": prompt})

    def ticket(door: Door, params: SamplingParams) -> Ticket:
        if asked.raw or not (asked.system or door.has_chat_template):
            return door.completion(prompt, params)
        return door.chat(talk, params)

    made = ticket if prompt else None
    return await _answer(service, request, len(body), asked, generate_part, made)


async def _answer(
    service: Service,
    request: Request,
    body_bytes: int,
    asked: ChatRequest | GenerateRequest,
    said_as: SaidAs,
    ticket_of: Callable[[Door, SamplingParams], Ticket] | None,
) -> Response:
    """The response; without a prompt it says that the model is there, which is what that asks."""
    model = served_name(service, asked.model)
    room, params = _options(asked.options or {}, service.settings.defaults)
    params = chat_params(service.door, params, asked.logprobs, asked.top_logprobs)
    params = replace(params, structured=of_format(asked.format or ""))
    blank = Part(model=model, created_at=_now())
    if ticket_of is None:
        loaded = msgspec.structs.replace(blank, **said_as(""), done=True, done_reason="load")
        return json_response(loaded)
    ticket = await service.at_door(
        body_bytes, lambda: _within(service.door, room, ticket_of(service.door, params)), params
    )
    if asked.stream is not False:
        parts = _parts(service, ticket, blank, said_as)
        return await stream_response(request.receive, parts, OLLAMA)
    tally = Tally([ticket])
    (answer,) = await while_connected(request.receive, collect(service, [ticket], tally))
    said = said_as(answer.text) | _scores(service, answer.scored)
    return json_response(_end(blank, answer.ended, tally, said))


def served_name(service: Service, name: str | None) -> str:
    """The name to answer with. `NAME:latest` is NAME.

    Raises  UnknownModel.
    """
    if name is not None and name not in service.settings.model_names:
        service.model_named(name.removesuffix(":latest"))
        return name
    return service.model_named(name)


def _options(given: JsonObject, defaults: SamplingParams) -> tuple[Room, SamplingParams]:
    with naming(lambda name: f"options.{name}"):
        options = take_neutral(given, OPTION_NEUTRAL)
        room = {name: options.pop(name) for name in Room.__struct_fields__ if name in options}
        if options.get("seed") == -1:
            del options["seed"]
        return convert(room, Room, OPTION_NAMES), params_of(options, defaults, OPTION_NAMES)


def _within(door: Door, room: Room, ticket: Ticket) -> Ticket:
    """The ticket of an answer that is as long as the options let it be."""
    prompt = len(ticket.request.prompt)
    if room.num_ctx is not None:
        if not prompt < room.num_ctx <= door.max_model_len:
            raise InvalidRequest(
                f"options.num_ctx is {room.num_ctx}; it must be at most {door.max_model_len}, the"
                f" server's context, and more than the {prompt} tokens of the prompt",
                param="options.num_ctx",
            )
        ticket = capped(ticket, room.num_ctx - prompt)
    if room.num_predict is None or room.num_predict < 0:
        return ticket
    with naming(lambda _: "options.num_predict"):
        return capped(ticket, room.num_predict)


async def _parts(
    service: Service, ticket: Ticket, blank: Part, said_as: SaidAs
) -> AsyncGenerator[Part, None]:
    tally = Tally([ticket])
    async with aclosing(merge(service, [ticket])) as items:
        async for _, item in items:
            tally.add(item)
            now = msgspec.structs.replace(blank, created_at=_now())
            if isinstance(item, Ended):
                yield _end(now, item, tally, said_as(""))
            elif item.text or item.scored:
                said = said_as(item.text) | _scores(service, item.scored)
                yield msgspec.structs.replace(now, **said)


def _scores(service: Service, scored: Sequence[Scored]) -> dict[str, Any]:
    """The field of a part that holds log-probabilities, where they are asked for."""
    if not scored:
        return {}
    return {"logprobs": chat_logprobs(service.door.tokenizer, scored).content}


def _end(blank: Part, ended: Ended, tally: Tally, said: dict[str, Any]) -> Part:
    receipt, usage = ended.receipt, tally.usage()
    return msgspec.structs.replace(
        blank,
        **said,
        done=True,
        done_reason=ended.finish_reason,
        total_duration=_ns(receipt.arrival_s, receipt.finished_s),
        load_duration=0,
        prompt_eval_count=usage.prompt_tokens,
        prompt_eval_duration=_ns(receipt.admitted_s, receipt.first_token_s),
        eval_count=usage.completion_tokens,
        eval_duration=_ns(receipt.first_token_s, receipt.finished_s),
        octavo=tally.cost(None),
    )


def _ns(start_s: float | None, stop_s: float | None) -> int:
    return 0 if start_s is None or stop_s is None else max(0, round((stop_s - start_s) * NS))


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
