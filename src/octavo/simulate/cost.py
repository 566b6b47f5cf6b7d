"""A runner that computes nothing and says how long it would have taken.

    seconds = base + tokens · per token

A step reads all weights once, whatever it computes: that is the base.
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

    def seconds(self, tokens: int) -> float:
        return self.base_s + self.token_s * tokens


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
        self.now += self.cost.seconds(sum(span.stop - span.start for span in plan.spans))
        return StepResult(
            plan.id,
            tuple(Sampled(s.row, self._draw(s), 0.0) for s in plan.spans if s.samples),
        )

    def _draw(self, span: Span) -> int:
        request = self._rows[span.row]
        drawn = span.stop - len(request.prompt) + 1
        return STOP if drawn == self.lengths.get(request.id) else WORD
