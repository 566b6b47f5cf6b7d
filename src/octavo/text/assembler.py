"""One answer, from the core's events to the text, ids and finish reason a caller sees."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from octavo.core.events import (
    Finished,
    FinishReason,
    Likeliest,
    PromptScored,
    Receipt,
    Score,
    Token,
)
from octavo.text.detokenizer import Detokenizer
from octavo.text.stops import Matched, StopStrings
from octavo.text.tokenizer import Tokenizer


class Scored(NamedTuple):
    """An answer token as callers who ask for log-probabilities see it, with the likeliest ones.

    `offset` is where its text begins in the text of the answer, in characters: what a stop string
    cuts off counts, and a character that begins with one token and ends with another is the last's.
    """

    token: int
    logprob: float
    top: Likeliest
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of an answer; `text` is empty while it may still become a stop string.

    `scored` are its tokens, if the caller asked for their log-probabilities; `prompt` are tokens of
    the prompt from the second on, if they are to be scored: they come before the answer.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    branch: int = 0
    scored: tuple[Scored, ...] = ()
    prompt: tuple[Score, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an answer: the last thing that comes.

    `stop_reason` is the stop string or the caller's own stop id that ended it, None for the
    model's end of sequence. `message` says what went wrong when the reason is "error".
    """

    finish_reason: FinishReason
    stop_reason: str | int | None
    receipt: Receipt
    message: str = ""
    branch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """What ends an answer, other than its length.

    `end_ids` end it at the engine: the model's end tokens and the caller's `stop_token_ids`.
    No stop string ends an answer of fewer than `min_tokens` tokens.
    """

    strings: tuple[str, ...] = ()
    include_string: bool = False
    end_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0


class Assembler:
    """Takes the core's events of one branch one at a time, and gives what the caller sees.

    The order of the rules: stop string, stop id, end of sequence, length. The core applies all but
    the first; when a stop string ends the answer, `ended` turns true before the core knows: cancel
    the branch at the engine, then pass its `Finished` on to here like any other.
    Keeps  exactly one `Ended`, the last; joined texts = the text of the ids up to the stop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: StopRules,
        *,
        skip_special: bool,
        branch: int = 0,
        scores: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._rules = rules
        self._branch = branch
        self._scores = scores
        self._characters = 0
        self._prompt_scored = 1
        """Up to which token: an engine that was started again tells the first ones twice."""
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special, shown=shown)
        self._stops = StopStrings(rules.strings, include=rules.include_string)
        self._completion_tokens = 0
        self._stop_string: str | None = None

    @property
    def ended(self) -> bool:
        """A stop string was found: what the engine still sends no longer matters."""
        return self._stop_string is not None

    def take(self, event: Token | PromptScored | Finished) -> tuple[Delta | Ended, ...]:
        """What this event adds to the answer, in order."""
        if isinstance(event, Finished):
            return self._finish(event)
        if isinstance(event, PromptScored):
            new = event.scores[self._prompt_scored - event.first :]
            self._prompt_scored += len(new)
            return (Delta("", (), (), self._branch, prompt=new),) if new else ()
        if self.ended:
            return ()
        self._completion_tokens += 1
        offset, text = self._characters, self._text_of(event.token)
        if self._scores:
            scored = (Scored(event.token, event.logprob, event.top, offset),)
            return (Delta(text, (event.token,), (event.logprob,), self._branch, scored),)
        return (Delta(text, (event.token,), (event.logprob,), self._branch),)

    def _text_of(self, token: int) -> str:
        if token in self._rules.end_ids and not self._rules.include_string:
            return ""
        piece = self._detokenizer.push(token)
        self._characters += len(piece)
        may_match = self._completion_tokens >= self._rules.min_tokens
        outcome = self._stops.push(piece, may_match=may_match)
        if isinstance(outcome, Matched):
            self._stop_string = outcome.stop
        return outcome.text

    def _finish(self, event: Finished) -> tuple[Delta | Ended, ...]:
        receipt = replace(event.receipt, completion_tokens=self._completion_tokens)
        if self._stop_string is not None:
            return (Ended("stop", self._stop_string, receipt, branch=self._branch),)
        own_stop = event.stop_id if event.stop_id in self._rules.stop_token_ids else None
        ended = Ended(event.reason, own_stop, receipt, event.message, self._branch)
        tail = self._stops.flush() + self._detokenizer.flush()
        return (Delta(tail, (), (), self._branch), ended) if tail else (ended,)
