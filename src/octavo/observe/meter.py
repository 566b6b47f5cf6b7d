"""What steps and tokens took: the distributions that only someone beside the engine can keep.

All else that metrics need are totals of the core, and the receipts of requests that ended.
"""

from octavo.core.calls import Answer, Call, Commit, Plan
from octavo.core.events import Event, Finished, Token
from octavo.core.plan import Sampled, StepPlan
from octavo.observe.buckets import STEP_TOKENS, TOKEN_S
from octavo.observe.histogram import Counted, Histogram

Branch = tuple[str, int]


class Meter:
    """An observer of one engine.

    Cost     0.3 µs a token, in the engine's thread.
    """

    def __init__(self) -> None:
        self._step_s = Histogram(TOKEN_S)
        self._step_tokens = Histogram(STEP_TOKENS)
        self._gaps_s = Histogram(TOKEN_S)
        self._planned: dict[int, tuple[float, int]] = {}
        """Of each plan in flight when it was made, and how many positions it computes."""
        self._newest: list[Branch] = []
        """Which answers under way got a token in the newest step that had any,"""
        self._newest_s = 0.0
        """and when that was."""
        self._before: dict[Branch, float] = {}
        """When each of the others got its newest token."""

    @property
    def step_s(self) -> Counted:
        """From plan to commit, by `buckets.TOKEN_S`."""
        return self._step_s.counted()

    @property
    def step_tokens(self) -> Counted:
        """Positions that a step computed, by `buckets.STEP_TOKENS`."""
        return self._step_tokens.counted()

    @property
    def token_gaps_s(self) -> Counted:
        """From one token of an answer to its next, by `buckets.TOKEN_S`."""
        return self._gaps_s.counted()

    def observe(self, call: Call, answer: Answer) -> None:
        """Take in a call to the core and its answer."""
        if isinstance(call, Plan):
            if isinstance(answer, StepPlan):
                tokens = sum([span.stop - span.start for span in answer.spans])
                self._planned[answer.id] = (call.now, tokens)
        elif isinstance(answer, tuple):
            if isinstance(call, Commit):
                self._stepped(call)
            self._told(answer, call.now)

    def _stepped(self, commit: Commit) -> None:
        planned_s, tokens = self._planned.pop(commit.result.plan_id)
        self._step_s.add(commit.now - planned_s)
        drafted = sum([one.drafted for one in commit.result.outcomes if isinstance(one, Sampled)])
        self._step_tokens.add(tokens + drafted)

    def _told(self, events: tuple[Event, ...], now: float) -> None:
        """Mostly those that got a token in the step before get one again, and no other."""
        tokens = [(e[0], e[4]) for e in events if type(e) is Token]  # by index: twice as quick
        branches = list(dict.fromkeys(tokens))
        if len(branches) < len(tokens):  # drafts that were right come with the token before them
            self._gaps_s.add(0.0, len(tokens) - len(branches))
        ended = set[Branch]()
        if len(tokens) < len(events):
            ended = {(e.request_id, e.branch) for e in events if isinstance(e, Finished)}
        if not branches:
            self._forget(ended)
            return
        if branches == self._newest:
            self._gaps_s.add(now - self._newest_s, len(branches))
        else:
            self._before.update(dict.fromkeys(self._newest, self._newest_s))
            for branch in branches:
                before_s = self._before.pop(branch, None)
                if before_s is not None:
                    self._gaps_s.add(now - before_s)
            self._newest = branches
        self._newest_s = now
        self._forget(ended)

    def _forget(self, ended: set[Branch]) -> None:
        if ended:
            self._newest = [branch for branch in self._newest if branch not in ended]
            for branch in ended:
                self._before.pop(branch, None)
