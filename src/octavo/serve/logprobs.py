"""Log-probabilities as OpenAI's endpoints show them: one entry for each token of the answer that
usage counts, the end token too; and those of prompts, as vLLM shows them.

They are those of the model, before temperature, penalties and all else that sampling does.
"""

from collections.abc import Sequence
from functools import partial

import msgspec

from octavo.core.events import Score
from octavo.engine.door import Door
from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.serve.echo import Echo
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
    tokens with the same text it has the likeliest. `text_offset` counts characters. Of a prompt the
    first token has no log-probability."""

    text_offset: tuple[int, ...]
    token_logprobs: tuple[float | None, ...]
    tokens: tuple[str, ...]
    top_logprobs: tuple[dict[str, float] | None, ...]

    def then(self, other: "CompletionLogprobs") -> "CompletionLogprobs":
        """The columns of a text that goes on with another."""
        return CompletionLogprobs(
            self.text_offset + other.text_offset,
            self.token_logprobs + other.token_logprobs,
            self.tokens + other.tokens,
            self.top_logprobs + other.top_logprobs,
        )


class PromptLogprob(msgspec.Struct, frozen=True):
    """`rank` 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = tuple[dict[str, PromptLogprob] | None, ...]
"""Of each token of a prompt those likeliest in its place, and it itself, by their ids as text; None
for the first token."""


def chat_params(
    door: Door, params: SamplingParams, logprobs: bool | None, top: int | None
) -> SamplingParams:
    """Raises  InvalidRequest naming top_logprobs: it is out of range, or logprobs is not true."""
    if not logprobs:
        if top:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return params
    with naming(partial(renamed, {"logprobs": "top_logprobs"})):
        return door.scored(params.but(logprobs=top or 0))


def prompt_params(
    door: Door, params: SamplingParams, count: int | None, stream: bool | None
) -> SamplingParams:
    """Raises  InvalidRequest naming prompt_logprobs: out of range, or the answer is streamed."""
    if count is not None and stream:
        raise InvalidRequest("prompt_logprobs needs stream: false", param="prompt_logprobs")
    return door.scored(params.but(prompt_logprobs=count))


def prompt_logprobs(tokenizer: Tokenizer, scores: Sequence[Score], count: int) -> PromptLogprobs:
    def entry(score: Score) -> dict[str, PromptLogprob]:
        ranked = [(rank, *pair) for rank, pair in enumerate(score.top[:count], 1)]
        return {
            str(token): PromptLogprob(
                max(logprob, LEAST), rank, _shown(tokenizer.token_bytes(token))
            )
            for rank, token, logprob in (*ranked, (score.rank, score.token, score.logprob))
        }

    return (None, *(entry(score) for score in scores))


def echo_logprobs(
    tokenizer: Tokenizer, echo: Echo, scores: Sequence[Score], count: int
) -> CompletionLogprobs:
    """Of a prompt that comes before its answer."""
    scored = [
        Scored(score.token, score.logprob, score.top[:count], offset)
        for score, offset in zip(scores, echo.offsets[1:], strict=True)
    ]
    first = CompletionLogprobs(
        echo.offsets[:1], (None,), (_shown(tokenizer.token_bytes(echo.tokens[0])),), (None,)
    )
    return first.then(completion_logprobs(tokenizer, scored))


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
