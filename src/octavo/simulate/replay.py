"""Replay: the same calls, made again to a core of its own."""

from collections import deque

from octavo.core.budget import Limits
from octavo.core.calls import (
    Answer,
    Call,
    Cancel,
    Commit,
    CoreSetup,
    Drop,
    Flush,
    Plan,
    SetLimits,
    Submit,
)
from octavo.core.plan import StepPlan
from octavo.core.setup import scheduler_of
from octavo.errors import ConfigError, OctavoError


class ImpossibleCall(OctavoError):
    """A call that the core could not have been given in the state it is in."""


class Replay:
    """Answers each call as the core of this version does."""

    def __init__(self, setup: CoreSetup) -> None:
        self.scheduler = scheduler_of(setup)
        self._in_flight: deque[StepPlan] = deque()

    def answer(self, call: Call) -> Answer:
        """What the core says to `call`, after all the calls before it.

        Raises   ImpossibleCall: it commits a plan that is not there, or one unlike the plan made,
                 or sets limits above the ceilings.
        """
        match call:
            case Submit(now, request):
                return self.scheduler.submit(request, now)
            case Cancel(now, request_id, branch, reason):
                return self.scheduler.cancel(request_id, now, branch, reason)
            case Plan(now):
                plan = self.scheduler.plan(now)
                if plan is not None:
                    self._in_flight.append(plan)
                return plan
            case Drop(now, hold):
                return self.scheduler.drop(hold, now)
            case Flush(now):
                return self.scheduler.flush(now)
            case SetLimits(_, limits):
                return self._set_limits(limits)
            case Commit():
                return self._commit(call)

    def _set_limits(self, limits: Limits) -> Limits:
        try:
            return self.scheduler.set_limits(limits)
        except ConfigError as error:
            raise ImpossibleCall(f"these limits cannot be set: {error}") from error

    def _commit(self, call: Commit) -> Answer:
        plan = self._in_flight.popleft() if self._in_flight else None
        if plan is None or plan.id != call.result.plan_id:
            oldest = "none is" if plan is None else f"the oldest is {plan.id}"
            raise ImpossibleCall(f"plan {call.result.plan_id} is not in flight; {oldest}")
        missing = {span.row for span in plan.spans if span.samples} - {
            outcome.row for outcome in call.result.outcomes
        }
        if missing:
            rows = ", ".join(map(str, sorted(missing)))
            raise ImpossibleCall(f"the result of plan {plan.id} has no token for rows {rows}")
        return self.scheduler.commit(plan, call.result, call.now)
