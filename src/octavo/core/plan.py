"""The values that cross between the core, which decides, and a runner, which carries out.

A runner keeps one row of state for each running sequence: its block tables and its request.
A `StepPlan` says how the rows change, then which positions to compute. It is carried out in
this order: binds, writes, copies, spans. Plans are carried out in the order of their ids.
"""

from dataclasses import dataclass
from typing import Protocol

from octavo.core.events import Decision
from octavo.core.request import Request


@dataclass(frozen=True, slots=True)
class Bind:
    """From this step on, `row` serves `request`; whatever it held before is void."""

    row: int
    request: Request


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
class Span:
    """Compute positions [start, stop) of the sequence in `row`, writing their keys and values.

    `tokens` are the ids at those positions. With plans in flight the last ones may not be known
    yet: the runner then appends what it sampled last for this row. When `samples`, the position
    `stop - 1` is the sequence's last and the token for position `stop` is drawn from its logits.
    """

    row: int
    start: int
    stop: int
    tokens: tuple[int, ...]
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    id: int
    binds: tuple[Bind, ...]
    writes: tuple[TableWrite, ...]
    copies: tuple[BlockCopy, ...]
    spans: tuple[Span, ...]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token drawn for a span that samples, with its log-probability before any filter."""

    row: int
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class RowFailed:
    """This row's own work failed (non-finite logits, say); the other rows are not touched."""

    row: int
    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """One outcome for each span that samples, and a `RowFailed` for any span that failed."""

    plan_id: int
    outcomes: tuple[Sampled | RowFailed, ...]


class Runner(Protocol):
    """Carries out plans. The real one runs a model; doubles answer from rules."""

    def execute(self, plan: StepPlan) -> StepResult: ...
