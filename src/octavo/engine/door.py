"""The door: where a caller's wish becomes a frozen, fully checked request."""

import random
import uuid
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from octavo.core.events import Finished, PromptScored, Token
from octavo.core.request import Pin, Request
from octavo.engine.params import SamplingParams
from octavo.engine.voice import SILENT, Talk, Voice
from octavo.errors import ContextLengthExceeded, InvalidRequest, ModelFileError
from octavo.text.assembler import Assembler, StopRules
from octavo.text.breakers import Breakers
from octavo.text.breakpoints import (
    MAX_BREAKPOINTS,
    breakpoints_of,
    characters_before,
    ttl_s_of,
    unused_character,
)
from octavo.text.chat import ChatTemplate, Ending
from octavo.text.grammar import Grammars
from octavo.text.reader import Reader
from octavo.text.structured import Structured
from octavo.text.tokenizer import Tokenizer
from octavo.text.words import spellings
from octavo.units import common_length

MAX_LOGPROBS = 20
"""Where nothing else is said, as OpenAI's API has it."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request for the engine, and for each of its branches, in order, the assembler that turns
    its events into the answer, and of a chat the reader that takes the answer apart."""

    request: Request
    assemblers: tuple[Assembler, ...]
    readers: tuple[Reader, ...] = ()

    def assembler_of(self, event: Token | PromptScored | Finished) -> Assembler:
        return self.assemblers[event.branch - self.request.sampling.branch]


class Door:
    """Checks everything that a client sent, so that nothing in the step loop has to.

    `vocab_size` is the model's; ids the tokenizer does not know but the model has are allowed.
    `seed` makes the seeds of requests that bring none repeatable. `defaults` is how the model wants
    to be sampled. At most `max_logprobs` likeliest tokens of a position are told; -1 allows the
    whole vocabulary.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int,
        seed: int | None = None,
        defaults: SamplingParams | None = None,
        max_logprobs: int = MAX_LOGPROBS,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.defaults = defaults or SamplingParams()
        self.grammars = Grammars(lambda: tokenizer, vocab_size)
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._max_logprobs = vocab_size if max_logprobs < 0 else max_logprobs
        self._parsers = {
            "tool_call_parser": tool_call_parser,
            "reasoning_parser": reasoning_parser,
        }
        template = tokenizer.chat_template
        self._voice = None if template is None else self._speaking(template)
        self._seeds = random.Random(seed)
        self._breakers = Breakers(tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return self._voice is not None

    def _speaking(self, template: str) -> Voice:
        chat = ChatTemplate(template, special=self.tokenizer.special)
        return Voice(self.tokenizer, template, chat, **self._parsers)

    def speaking(self, template: str) -> "Door":
        """The same door with another chat template, which is trusted: it is a program.

        Raises   InvalidRequest: it is none.
        """
        other = copy(self)
        try:
            other._voice = self._speaking(template)
        except ModelFileError as error:
            raise InvalidRequest(error.message, param="chat_template") from error
        return other

    def completion(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        default_max_tokens: int | None = None,
    ) -> Ticket:
        """A plain continuation of a text, or of token ids.

        Where `max_tokens` is not set, `default_max_tokens` limits the answer if they fit.
        Raises   InvalidRequest, ContextLengthExceeded.
        """
        if isinstance(prompt, str):
            ids = self.encode(prompt, add_special=True)
        else:
            self._room(len(prompt), None)
            ids = [self._checked_id(token, "prompt") for token in prompt]
        if params.max_tokens is None and default_max_tokens is not None:
            usual = max(default_max_tokens, params.min_tokens)
            params = replace(params, max_tokens=min(usual, self._room(len(ids), None)))
        return self._ticket(ids, params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        ending: Ending = "answer",
        talk: Talk = SILENT,
    ) -> Ticket:
        """The assistant's next message, or the rest of the last one.

        Raises   InvalidRequest, ContextLengthExceeded.
        """
        voice = self._own_voice
        text = voice.render(messages, ending, talk)
        ids = self.encode(text, add_special=False)
        pins = self._pins(messages, text, ids, ending, talk)
        reasoning = voice.reasoning(messages, text, ending, talk)
        params = voice.guided(params, talk, reasoning)
        ticket = self._ticket(ids, params, pins, shown=voice.shown(talk, reasoning))
        readers = tuple(voice.reader(params, talk, reasoning) for _ in ticket.assemblers)
        return replace(ticket, readers=readers)

    def scored(self, params: SamplingParams) -> SamplingParams:
        """With the size of the vocabulary in place of -1, which stands for it.

        Raises   InvalidRequest naming logprobs or prompt_logprobs: that is more than allowed.
        """
        return params.but(
            logprobs=self._scores("logprobs", params.logprobs),
            prompt_logprobs=self._scores("prompt_logprobs", params.prompt_logprobs),
        )

    def _scores(self, name: str, count: int | None) -> int | None:
        if count is None:
            return None
        wanted = self.vocab_size if count < 0 else count
        if wanted > self._max_logprobs:
            every = f" (all {wanted:,} of the vocabulary)" if count < 0 else ""
            raise InvalidRequest(
                f"{name} must be at most {self._max_logprobs} here, not {count}{every};"
                " --max-logprobs allows more",
                param=name,
            )
        return wanted

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        ending: Ending = "answer",
        talk: Talk = SILENT,
    ) -> str:
        """The conversation as the text of a prompt.

        Raises   InvalidRequest.
        """
        return self._own_voice.render(messages, ending, talk)

    @property
    def _own_voice(self) -> Voice:
        if self._voice is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        return self._voice

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of `text`; one that cannot fit whatever its ids are is not tokenised first."""
        longest = self.tokenizer.longest_piece_bytes
        if longest is not None and len(text) > longest * self.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(text)} characters; they cannot fit into the context of"
                f" {self.max_model_len} tokens",
                param="prompt",
            )
        return self.tokenizer.encode(text, parse_special=True, add_special=add_special)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises   InvalidRequest: one is not the model's.
        """
        return self.tokenizer.decode([self._checked_id(token, "tokens") for token in tokens])

    def _checked_id(self, token: object, param: str) -> int:
        if (
            not isinstance(token, int)
            or isinstance(token, bool)
            or not 0 <= token < self.vocab_size
        ):
            raise InvalidRequest(
                f"{param} holds {token!r}; token ids are integers from 0 to {self.vocab_size - 1}",
                param=param,
            )
        return token

    def _pins(
        self,
        messages: Sequence[Mapping[str, Any]],
        text: str,
        ids: Sequence[int],
        ending: Ending,
        talk: Talk,
    ) -> tuple[Pin, ...]:
        """The beginnings of a conversation that its breakpoints ask to keep.

        A token is before a breakpoint if it would be the same whatever followed there.
        """
        pins = []
        render = partial(self.render, ending=ending, talk=talk)
        for one in breakpoints_of(messages):
            before = text[: characters_before(one, messages, text, render)]
            other = self.encode(before + unused_character(text), add_special=False)
            count = common_length(ids, other)
            if not count:
                raise InvalidRequest(
                    f"{one.where} stands before the first token: there is nothing to keep",
                    param=one.where,
                )
            pins.append(Pin(count, one.ttl_s))
        return tuple(pins)

    def _ticket(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        pins: tuple[Pin, ...] = (),
        *,
        shown: frozenset[int] = frozenset(),
    ) -> Ticket:
        params = self.scored(params)
        max_tokens = self._room(len(ids), params.max_tokens)
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}, but only {max_tokens} tokens fit",
                param="min_tokens",
            )
        own = frozenset(
            self._checked_id(token, "stop_token_ids") for token in params.stop_token_ids
        )
        for token in params.logit_bias:
            self._checked_id(token, "logit_bias")
        for token in params.allowed_token_ids or ():
            self._checked_id(token, "allowed_token_ids")
        self._check_grammar(params.structured)
        ends = own if params.ignore_eos else own | frozenset(self.tokenizer.eos_ids)
        request = Request(
            id=uuid.uuid4().hex,
            prompt=tuple(ids),
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            sampling=params.sampling(
                seed=self._seeds.getrandbits(63),
                bad_words=spellings(params.bad_words, self.tokenizer),
                dry_breakers=self._breakers.of(params.dry_sequence_breakers)
                if params.dry_is_on
                else (),
            ),
            stop_token_ids=ends,
            priority=params.priority,
            branches=params.n,
            beams=params.beams(),
            tenant=params.tenant,
            ttft_target_s=params.ttft_target_s,
            tpot_target_s=params.tpot_target_s,
            timeout_s=params.timeout_s,
            salt=params.cache_salt or "",
            use_cache=params.cache == "on",
            pins=_all_pins(pins, len(ids), params),
            top_logprobs=params.logprobs or 0,
            prompt_logprobs=params.prompt_logprobs,
        )
        rules = StopRules(
            strings=tuple(params.stop),
            include_string=params.include_stop_str_in_output,
            end_ids=ends,
            stop_token_ids=own,
            min_tokens=params.min_tokens,
        )
        return Ticket(
            request,
            tuple(
                Assembler(
                    self.tokenizer,
                    rules,
                    skip_special=params.skip_special_tokens,
                    branch=branch,
                    scores=params.logprobs is not None,
                    shown=shown,
                )
                for branch in range(params.n)
            ),
        )

    def _check_grammar(self, structured: Structured | None) -> None:
        """Compile what an answer must be; a new one takes milliseconds, the first one longer."""
        if structured is not None:
            why = self.grammars.check(*structured.definition)
            if why:
                raise structured.wrong(why)

    def _room(self, prompt_length: int, max_tokens: int | None) -> int:
        """How many tokens the answer may have."""
        if prompt_length == 0:
            raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
        room = self.max_model_len - prompt_length
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_length} tokens; the context holds {self.max_model_len}"
                " and needs room for at least one more",
                param="prompt",
            )
        if max_tokens is not None and max_tokens > room:
            raise ContextLengthExceeded(
                f"{prompt_length} prompt tokens and max_tokens {max_tokens} do not fit into the"
                f" context of {self.max_model_len}; at most {room} are left",
                param="max_tokens",
            )
        return room if max_tokens is None else max_tokens


def _all_pins(pins: tuple[Pin, ...], length: int, params: SamplingParams) -> tuple[Pin, ...]:
    """Those of the messages, and one of the whole prompt if that is asked, the shortest first.

    Raises   InvalidRequest: there are too many, or none can be kept.
    """
    if params.cache_control is not None:
        pins = (*pins, Pin(length, ttl_s_of(params.cache_control, "cache_control")))
    if pins and params.cache == "off":
        raise InvalidRequest("cache_control needs the cache, which is off here", param="cache")
    if len(pins) > MAX_BREAKPOINTS:
        raise InvalidRequest(
            f"there are {len(pins)} cache_control, at most {MAX_BREAKPOINTS} are allowed",
            param="cache_control",
        )
    return tuple(sorted(pins, key=attrgetter("tokens")))
