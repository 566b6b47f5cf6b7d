"""POST /v1/completions: plain continuation of one prompt or several."""

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.events import Score
from octavo.engine.door import Ticket
from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.serve.answers import Answer, OctavoUsage, Tally, Usage, collect, merge
from octavo.serve.echo import Echo, echo_of
from octavo.serve.errors import json_response
from octavo.serve.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    completion_logprobs,
    echo_logprobs,
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
    parse,
    read_body,
)
from octavo.serve.service import Item, Service
from octavo.serve.stream import stream_response, while_connected
from octavo.text.assembler import Delta, Scored
from octavo.text.tokenizer import Tokenizer

NEUTRAL: Neutral = {
    **NEUTRAL_EVERYWHERE,
    "add_special_tokens": (True,),
    "best_of": (1,),
    "prompt_embeds": (),
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
    prompt_logprobs: int | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


BODY = Body(shape=CompletionRequest, names=OPENAI_NAMES, neutral=NEUTRAL)


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


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
    asked, params = parse(body, BODY, service.settings.defaults)
    model = service.model_named(asked.model)
    options = check_stream_options(asked.stream, asked.stream_options)
    scores = prompt_params(service.door, params, asked.prompt_logprobs, asked.stream)
    scores = service.door.scored(scores.but(logprobs=asked.logprobs))
    params = _with_echo(scores, asked)
    prompts = split_prompts(asked.prompt)
    if len(prompts) * params.n > MAX_PROMPTS:
        raise InvalidRequest(
            f"{params.n} answers to each of {len(prompts)} prompts are more than the {MAX_PROMPTS}"
            " that go into one request",
            param="n",
        )
    tickets = await service.at_door(
        len(body),
        lambda: [
            service.door.completion(prompt, params, default_max_tokens=DEFAULT_MAX_TOKENS)
            for prompt in prompts
        ],
        params,
    )
    blank = Completion(
        id=f"cmpl-{tickets[0].request.id}", created=int(time.time()), model=model, choices=()
    )
    view = _View(service.door.tokenizer, asked, scores, prompts, tickets)
    if asked.stream:
        chunks = _chunks(service, tickets, blank, view, options, asked.user)
        return await stream_response(request.receive, chunks)
    tally = Tally(tickets)
    answers = await while_connected(request.receive, collect(service, tickets, tally))
    choices = tuple(view.whole(index, answers) for index in range(len(answers)))
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


def _with_echo(params: SamplingParams, asked: CompletionRequest) -> SamplingParams:
    """An echo with logprobs has those of the prompt too."""
    if not asked.echo or params.logprobs is None:
        return params
    return params.but(prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))


class _View:
    """How the choices of a request show their answers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        asked: CompletionRequest,
        params: SamplingParams,
        prompts: Sequence[str | Sequence[int]],
        tickets: Sequence[Ticket],
    ) -> None:
        self._tokenizer = tokenizer
        self._logprobs = params.logprobs
        self._prompt_logprobs = params.prompt_logprobs
        self._branches = params.n
        self._token_ids = asked.return_token_ids
        self._prompts = [ticket.request.prompt for ticket in tickets]
        self._echoes: list[Echo] = []
        if asked.echo:
            self._echoes = [
                echo_of(
                    prompt,
                    ticket.request.prompt,
                    tokenizer,
                    skip_special=params.skip_special_tokens,
                )
                for prompt, ticket in zip(prompts, tickets, strict=True)
            ]

    def prompt_of(self, index: int) -> int:
        """Which prompt a choice answers."""
        return index // self._branches

    def whole(self, index: int, answers: Sequence[Answer]) -> CompletionChoice:
        answer = answers[index]
        scores = answers[self.prompt_of(index) * self._branches].prompt
        echo = self.echo(index, scores)
        logprobs = self._of_answer(index, answer.scored)
        if echo is not None and echo.logprobs is not None and logprobs is not None:
            logprobs = echo.logprobs.then(logprobs)
        return CompletionChoice(
            index=index,
            text=("" if echo is None else echo.text) + answer.text,
            logprobs=logprobs,
            finish_reason=answer.ended.finish_reason,
            stop_reason=answer.ended.stop_reason,
            prompt_logprobs=UNSET
            if self._prompt_logprobs is None
            else prompt_logprobs(self._tokenizer, scores, self._prompt_logprobs),
            prompt_token_ids=self.prompt_ids(index),
            token_ids=answer.token_ids if self._token_ids else UNSET,
        )

    def prompt_ids(self, index: int) -> tuple[int, ...] | UnsetType:
        return self._prompts[self.prompt_of(index)] if self._token_ids else UNSET

    def echo(self, index: int, scores: Sequence[Score]) -> CompletionChoice | None:
        """The prompt of a choice, as a piece that comes before the others."""
        if not self._echoes:
            return None
        echo = self._echoes[self.prompt_of(index)]
        return CompletionChoice(
            index=index,
            text=echo.text,
            logprobs=None
            if self._logprobs is None
            else echo_logprobs(self._tokenizer, echo, scores, self._logprobs),
            finish_reason=None,
        )

    def piece(self, index: int, item: Item) -> CompletionChoice | None:
        """What comes next of a choice; nothing while it is held back."""
        if not isinstance(item, Delta):
            return CompletionChoice(
                index=index,
                text="",
                finish_reason=item.finish_reason,
                stop_reason=item.stop_reason,
            )
        if not (item.text or item.scored or self._token_ids):
            return None
        return CompletionChoice(
            index=index,
            text=item.text,
            logprobs=self._of_answer(index, item.scored) if item.scored else None,
            finish_reason=None,
            token_ids=item.token_ids if self._token_ids else UNSET,
        )

    def _of_answer(self, index: int, scored: Sequence[Scored]) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        before = len(self._echoes[self.prompt_of(index)].text) if self._echoes else 0
        return completion_logprobs(self._tokenizer, scored, before)


async def _chunks(
    service: Service,
    tickets: Sequence[Ticket],
    blank: Completion,
    view: _View,
    options: StreamOptions,
    user: str | None,
) -> AsyncGenerator[Completion, None]:
    """Of each choice its echo, if there is one, then text, then the reason it ended; then usage if
    asked."""
    tally = Tally(tickets)
    absent = None if options.include_usage else UNSET
    scores: defaultdict[int, list[Score]] = defaultdict(list)
    """Of each prompt; they come before its answers."""
    begun: set[int] = set()
    async with aclosing(merge(service, tickets)) as items:
        async for index, item in items:
            tally.add(item)
            if isinstance(item, Delta) and item.prompt:
                scores[view.prompt_of(index)] += item.prompt
                if not item.token_ids:
                    continue
            pieces = [view.piece(index, item)]
            first = index not in begun
            if first:
                begun.add(index)
                pieces.insert(0, view.echo(index, scores[view.prompt_of(index)]))
            for choice in pieces:
                if choice is not None:
                    if first:
                        first, ids = False, view.prompt_ids(index)
                        choice = msgspec.structs.replace(choice, prompt_token_ids=ids)
                    usage = tally.usage() if options.continuous_usage_stats else absent
                    yield msgspec.structs.replace(blank, choices=(choice,), usage=usage)
    if options.include_usage:
        yield msgspec.structs.replace(blank, usage=tally.usage(), octavo=tally.cost(user))
