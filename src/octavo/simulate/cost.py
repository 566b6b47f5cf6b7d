"""A runner that computes nothing and says how long it would have taken.

    seconds = base + tokens · per token + moves · per move

A step reads all weights once, whatever it computes: that is the base. One that only moves blocks
reads none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.core.plan import Sampled, Span, StepPlan, StepResult
from octavo.core.request import Request

STOP = 0
"""The token that ends an answer, for requests that name it among their stop ids."""
WORD = 1
"""Every other token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a step costs, in seconds."""

    base_s: float
    token_s: float
    move_s: float = 0.0

    def seconds(self, tokens: int, moves: int = 0) -> float:
        computing_s = self.base_s + self.token_s * tokens if tokens else 0.0
        return computing_s + self.move_s * moves


@dataclass(slots=True)
class CostRunner:
    """Carries out plans in no time; `now` moves on by what they cost.

    Answers have the lengths given by the ids of their requests, where those name `STOP` among
    their stop ids and a longer answer was allowed; all others run to their end.
    """

    cost: Cost
    lengths: Mapping[str, int] = field(default_factory=dict)
    now: float = 0.0
    _rows: dict[int, Request] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        self._rows |= {bind.row: bind.request for bind in plan.binds}
        tokens = sum(span.stop - span.start for span in plan.spans)
        self.now += self.cost.seconds(tokens, len(plan.moves))
        return StepResult(
            plan.id,
            tuple(Sampled(s.row, self._draw(s), 0.0) for s in plan.spans if s.samples),
            len(plan.moves),
        )

    def _draw(self, span: Span) -> int:
        request = self._rows[span.row]
        drawn = span.stop - len(request.prompt) + 1
        return STOP if drawn == self.lengths.get(request.id) else WORD
