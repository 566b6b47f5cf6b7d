"""Drafting: which of the draws after guessed tokens count.

Each position draws its own token from its own logits, keyed by its seed, branch and position. As
long as a guess is the token that was drawn, the next position stands where it would have stood
without guesses: so the answer is the same, bit for bit, and a guess is right with the probability
that the model gives it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.plan import Drawn, RowFailed, Sampled


@dataclass(frozen=True, slots=True)
class Chain:
    """A span that samples: the token for position `stop`, and after each guess the next one."""

    row: int
    stop: int
    guesses: tuple[int, ...]


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
