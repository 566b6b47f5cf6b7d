"""POST /v1/completions: plain continuation of one prompt or several."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.door import Ticket
from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.serve.answers import OctavoUsage, Tally, Usage, collect, merge
from octavo.serve.errors import json_response
from octavo.serve.logprobs import CompletionLogprobs, completion_logprobs
from octavo.serve.requests import (
    NEUTRAL_EVERYWHERE,
    Neutral,
    StreamOptions,
    check_stream_options,
    parse,
    read_body,
)
from octavo.serve.service import Service
from octavo.serve.stream import stream_response, while_connected
from octavo.text.assembler import Delta
from octavo.text.tokenizer import Tokenizer

NEUTRAL: Neutral = {
    **NEUTRAL_EVERYWHERE,
    "add_special_tokens": (True,),
    "best_of": (1,),
    "suffix": ("",),
}

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16
"""What OpenAI's endpoint and vLLM give when max_tokens is not set."""


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body, without the fields of `SamplingFields`."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    logprobs: int | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or a chunk of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | UnsetType | None = UNSET
    octavo: OctavoUsage | UnsetType = UNSET


async def create_completion(service: Service, request: Request) -> Response:
    """The endpoint."""
    body = await read_body(request, service.settings.max_body_bytes)
    asked, params = parse(body, CompletionRequest, NEUTRAL, service.settings.defaults)
    model = service.model_named(asked.model)
    options = check_stream_options(asked.stream, asked.stream_options)
    with_logprobs = asked.logprobs is not None
    if with_logprobs and asked.echo:
        raise InvalidRequest(
            "echo with logprobs needs those of the prompt, which are not supported yet; send one",
            param="echo",
        )
    params = replace(params, logprobs=asked.logprobs)
    prompts = split_prompts(asked.prompt)
    tickets = await service.at_door(
        len(body),
        lambda: [
            service.door.completion(prompt, params, default_max_tokens=DEFAULT_MAX_TOKENS)
            for prompt in prompts
        ],
    )
    blank = Completion(
        id=f"cmpl-{tickets[0].request.id}", created=int(time.time()), model=model, choices=()
    )
    tokenizer = service.door.tokenizer
    echoes = [
        _prompt_text(prompt, params, tokenizer) if asked.echo else ""
        for prompt in prompts
        for _ in range(params.n)
    ]
    if asked.stream:
        chunks = _chunks(service, tickets, blank, echoes, options, asked.user)
        return await stream_response(request.receive, chunks)
    tally = Tally(tickets)
    answers = await while_connected(request.receive, collect(service, tickets, tally))
    choices = tuple(
        CompletionChoice(
            index=index,
            text=echoes[index] + answer.text,
            logprobs=completion_logprobs(tokenizer, answer.scored) if with_logprobs else None,
            finish_reason=answer.ended.finish_reason,
            stop_reason=answer.ended.stop_reason,
        )
        for index, answer in enumerate(answers)
    )
    whole = msgspec.structs.replace(
        blank, choices=choices, usage=tally.usage(), octavo=tally.cost(asked.user)
    )
    return json_response(whole)


def split_prompts(prompt: str | list[str | int | list[int]]) -> Sequence[str | Sequence[int]]:
    """The prompts of a body: text, ids, or a list of either.

    Raises  InvalidRequest: an empty list, one of mixed kinds, or too many prompts.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(part) for part in prompt}
    if len(kinds) != 1:
        problem = "mixes text and token ids" if kinds else "is empty"
        raise InvalidRequest(f"prompt {problem}; give at least one token", param="prompt")
    if kinds == {int}:
        return [[part for part in prompt if isinstance(part, int)]]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt holds {len(prompt)} prompts, at most {MAX_PROMPTS} go into one request",
            param="prompt",
        )
    return [part for part in prompt if not isinstance(part, int)]


def _prompt_text(prompt: str | Sequence[int], params: SamplingParams, tokenizer: Tokenizer) -> str:
    """A prompt as an echo shows it."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prompt, skip_special=params.skip_special_tokens)


async def _chunks(
    service: Service,
    tickets: Sequence[Ticket],
    blank: Completion,
    echoes: Sequence[str],
    options: StreamOptions,
    user: str | None,
) -> AsyncGenerator[Completion, None]:
    """Of each choice its echo, if there is one, then text, then the reason it ended; then usage if
    asked."""
    tally, tokenizer = Tally(tickets), service.door.tokenizer
    absent = None if options.include_usage else UNSET
    unsaid = {index: echo for index, echo in enumerate(echoes) if echo}
    async with aclosing(merge(service, tickets)) as items:
        async for index, item in items:
            tally.add(item)
            choices = []
            if index in unsaid:
                choices.append(
                    CompletionChoice(index=index, text=unsaid.pop(index), finish_reason=None)
                )
            if not isinstance(item, Delta):
                choices.append(
                    CompletionChoice(
                        index=index,
                        text="",
                        finish_reason=item.finish_reason,
                        stop_reason=item.stop_reason,
                    )
                )
            elif item.scored:
                logprobs = completion_logprobs(tokenizer, item.scored)
                choices.append(
                    CompletionChoice(
                        index=index, text=item.text, logprobs=logprobs, finish_reason=None
                    )
                )
            elif item.text:
                choices.append(CompletionChoice(index=index, text=item.text, finish_reason=None))
            for choice in choices:
                usage = tally.usage() if options.continuous_usage_stats else absent
                yield msgspec.structs.replace(blank, choices=(choice,), usage=usage)
    if options.include_usage:
        yield msgspec.structs.replace(blank, usage=tally.usage(), octavo=tally.cost(user))
