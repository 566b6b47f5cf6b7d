"""Log-probabilities as OpenAI's endpoints show them: one entry for each token of the answer that
usage counts, the end token too.

They are those of the model, before temperature, penalties and all else that sampling does.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.serve.requests import naming, renamed
from octavo.text.assembler import Scored
from octavo.text.tokenizer import Tokenizer

LEAST = -9999.0
"""What stands for the log-probability of the impossible: JSON has no infinity."""


class TopLogprob(msgspec.Struct, frozen=True):
    """`bytes` are those that the token stands for; of a part of a character `token` shows them as
    escapes."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: tuple[TokenLogprob, ...]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The older form, by columns. Each map of `top_logprobs` has the token itself as well; of
    tokens with the same text it has the likeliest. `text_offset` counts characters."""

    text_offset: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    tokens: tuple[str, ...]
    top_logprobs: tuple[dict[str, float], ...]


def chat_params(params: SamplingParams, logprobs: bool | None, top: int | None) -> SamplingParams:
    """Raises  InvalidRequest naming top_logprobs: it is out of range, or logprobs is not true."""
    if not logprobs:
        if top:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return params
    with naming(partial(renamed, {"logprobs": "top_logprobs"})):
        return replace(params, logprobs=top or 0)


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[Scored]) -> ChatLogprobs:
    def top(token: int, logprob: float) -> TopLogprob:
        spelled = tokenizer.token_bytes(token)
        return TopLogprob(_shown(spelled), max(logprob, LEAST), tuple(spelled))

    def entry(one: Scored) -> TokenLogprob:
        chosen = top(one.token, one.logprob)
        alternatives = tuple(top(*pair) for pair in one.top)
        return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, alternatives)

    return ChatLogprobs(tuple(entry(one) for one in scored))


def completion_logprobs(
    tokenizer: Tokenizer, scored: Sequence[Scored], before: int = 0
) -> CompletionLogprobs:
    """`before` characters of the text come before the answer."""

    def shown(token: int) -> str:
        return _shown(tokenizer.token_bytes(token))

    tops = []
    for one in scored:
        pairs = [(token, logprob) for token, logprob in one.top if token != one.token]
        top: dict[str, float] = {}
        for token, logprob in sorted([(one.token, one.logprob), *pairs], key=lambda p: -p[1]):
            top.setdefault(shown(token), max(logprob, LEAST))
        tops.append(top)
    return CompletionLogprobs(
        text_offset=tuple(before + one.offset for one in scored),
        token_logprobs=tuple(max(one.logprob, LEAST) for one in scored),
        tokens=tuple(shown(one.token) for one in scored),
        top_logprobs=tuple(tops),
    )


def _shown(spelled: bytes) -> str:
    return spelled.decode(errors="backslashreplace")
