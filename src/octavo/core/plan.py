"""The values that cross between the core, which decides, and a runner, which carries out.

A runner keeps one row of state for each running sequence: its block tables and its request.
A `StepPlan` says how the rows change, then which positions to compute. It is carried out in
this order: returned, moves out, binds, writes, copies, moves in, spans. Plans are carried out in
the order of their ids. Only the moves out may be late: until the plan is committed nothing is
written to the blocks that they read, nor read from the slots that they write.

What there is one of for each sequence and step is a named tuple: it is made in a third of the time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from octavo.core.events import Decision, Likeliest, Score
from octavo.core.request import Request


@dataclass(frozen=True, slots=True)
class Returned:
    """The entries of `table[group][row]` before `first` are void: their blocks were given back."""

    row: int
    group: int
    first: int


@dataclass(frozen=True, slots=True)
class Bind:
    """From this step on, `row` serves `request`; whatever it held before is void.

    `answered` are the answer tokens that it has, if its sampling looks back at them: spans bring
    only those whose KV is to be computed.
    """

    row: int
    request: Request
    answered: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TableWrite:
    """`table[group][row][index : index + len(blocks)] = blocks`."""

    row: int
    group: int
    index: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole content of block `source` to block `target`, in the order given."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Move:
    """Move the whole content of `block` out to `slot` of the host arena, or back in."""

    kind: Literal["out", "in"]
    block: int
    slot: int


class Span(NamedTuple):
    """Compute positions [start, stop) of the sequence in `row`, writing their keys and values.

    `tokens` are the ids at those positions. With plans in flight the last ones may not be known
    yet: the runner then appends what it sampled last for this row. When `samples`, the position
    `stop - 1` is the sequence's last and the token for position `stop` is drawn from its logits.
    The runner may guess up to `drafts` tokens more, compute them at the positions from `stop` on,
    and draw after each as well: of the draws those up to the first that is no guess count.
    """

    row: int
    start: int
    stop: int
    tokens: tuple[int, ...]
    samples: bool
    drafts: int = 0


new_span: Callable[[type[Span], tuple[int, int, int, tuple[int, ...], bool, int]], Span]
new_span = tuple.__new__
"""`new_span(Span, fields)` is `Span(*fields)` in half the time: each step makes one for every
sequence."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`moves` come in order, those out before those in. A plan may have moves and no span, or
    neither: somebody lost its blocks, and nobody can go on yet."""

    id: int
    binds: tuple[Bind, ...]
    writes: tuple[TableWrite, ...]
    copies: tuple[BlockCopy, ...]
    spans: tuple[Span, ...]
    decisions: tuple[Decision, ...]
    moves: tuple[Move, ...] = ()
    returned: tuple[Returned, ...] = ()


class Drawn(NamedTuple):
    """A token, its log-probability before any filter and, if the request asks for them, the
    likeliest tokens before any filter."""

    token: int
    logprob: float
    top: Likeliest = ()


class Candidate(NamedTuple):
    """A token that a beam may go on with: its score is its log-probability after all that the
    sampling of the request does to single logits, `logprob` that before."""

    token: int
    score: float
    logprob: float


class Sampled(NamedTuple):
    """The token drawn for a span that samples: the fields of `Drawn`.

    `more` tokens follow, if the span allows drafts or the request has a grammar; the KV of the
    first `kept` positions from its `stop` on is theirs. `drafted` positions were computed there. If
    the answer has `ended`, its grammar allows nothing after the last of them. For a beam nothing
    is drawn: it has `candidates`, the best first.
    """

    row: int
    token: int
    logprob: float
    top: Likeliest = ()
    more: tuple[Drawn, ...] = ()
    kept: int = 0
    drafted: int = 0
    ended: bool = False
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class RowFailed:
    """This row's own work failed (non-finite logits, say); the other rows are not touched."""

    row: int
    message: str


class RowScores(NamedTuple):
    """Of a row whose prompt is to be scored: the tokens from position `first` on, those that follow
    the positions of its span and belong to the prompt."""

    row: int
    first: int
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One outcome for each span that samples, and a `RowFailed` for any span that failed.

    The first `moved` of the plan's moves were carried out. Where a move in was not, the span that
    reads its block has failed. Drafts were guessed in `rounds`: how many positions each computed or
    looked at, and how many seconds of the step it took.
    """

    plan_id: int
    outcomes: tuple[Sampled | RowFailed, ...]
    moved: int = 0
    scores: tuple[RowScores, ...] = ()
    rounds: tuple[tuple[int, float], ...] = ()


class Runner(Protocol):
    """Carries out plans. The real one runs a model; doubles answer from rules."""

    def execute(self, plan: StepPlan) -> StepResult: ...
