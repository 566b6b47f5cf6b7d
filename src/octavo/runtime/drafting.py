"""Drafting: who guesses tokens, and which of the draws after guessed tokens count.

Each position draws its own token from its own logits, keyed by its seed, branch and position. As
long as a guess is the token that was drawn, the next position stands where it would have stood
without guesses: so the answer is the same, bit for bit, whoever guesses. A guess that is right with
probability p under the model is accepted with probability p, and none is ever kept that the model
would not have drawn.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.core.plan import Drawn, RowFailed, Sampled, Span, StepPlan
from octavo.core.request import Request
from octavo.runtime.batch import RowTables

Guess = tuple[int, ...]


class Guesser(Protocol):
    """Guesses what follows the tokens of every row."""

    def carry(self, plan: StepPlan) -> None:
        """Copy and move what is kept of blocks, as the plan does with theirs."""

    def bind(self, row: int, request: Request, tokens: Sequence[int]) -> None:
        """From now on `row` serves this request, which has these tokens."""

    def guess(self, spans: Sequence[Span], tables: RowTables) -> Sequence[Guess]:
        """What may follow each of these spans, which are about to be computed: at most its
        `drafts`."""

    def append(self, row: int, tokens: Iterable[int]) -> None:
        """These tokens were drawn for `row`."""

    @property
    def rounds(self) -> tuple[tuple[int, float], ...]:
        """What the last guesses took, as `StepResult.rounds` tells."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A span that samples: the token for position `stop`, and after each guess the next one."""

    row: int
    stop: int
    guesses: Guess


def accept(chain: Chain, drawn: Sequence[Sampled | RowFailed]) -> Sampled | RowFailed:
    """What comes of a chain: the first draw, and the next as long as the guess between was right.

    A failure after the first draw is left to the step that computes that position again.
    """
    first = drawn[0]
    if isinstance(first, RowFailed) or not chain.guesses:
        return first
    more, token = [], first.token
    for guess, outcome in zip(chain.guesses, drawn[1:], strict=False):
        if guess != token or isinstance(outcome, RowFailed):
            break
        more.append(Drawn(outcome.token, outcome.logprob, outcome.top))
        token = outcome.token
    return first._replace(more=tuple(more), kept=len(more), drafted=len(chain.guesses))
