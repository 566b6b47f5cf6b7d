"""Scheduler: decides, step by step, which positions of which sequences are computed.

    submit ─▶ waiting ── admit ──▶ running ── commit ──▶ finished
                 ▲                    │
                 └───── preempt ──────┘

Submit, cancel, plan and commit change state; drop and flush what is held or cached, set_limits what
may be. None reads a clock or does I/O. Several plans may be in flight; they are committed in the
order in which they were made.
"""

from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from math import inf

from octavo.core import policy
from octavo.core.acceptance import Experience
from octavo.core.admission import Admissions
from octavo.core.block_manager import BlockManager
from octavo.core.budget import Ceilings, Limits
from octavo.core.counters import Counters
from octavo.core.deadlines import Deadlines
from octavo.core.draft import Draft, InFlight
from octavo.core.events import (
    CancelReason,
    Decision,
    Event,
    Evicted,
    Explanation,
    Finished,
    FinishReason,
    Refused,
    Token,
)
from octavo.core.following import Followers
from octavo.core.growth import Growth
from octavo.core.holds import Holds
from octavo.core.misses import explain
from octavo.core.pace import Pace
from octavo.core.plan import Drawn, Move, RowFailed, Sampled, Span, StepPlan, StepResult
from octavo.core.prediction import AnswerLengths
from octavo.core.preemption import Preemptions
from octavo.core.prefix_cache import Context
from octavo.core.queue import turned_away
from octavo.core.request import Request
from octavo.core.roster import Roster
from octavo.core.searches import Searches
from octavo.core.sequence import Sequence, State
from octavo.core.siblings import Siblings


class Scheduler:
    """Keeps  the sequence of the lowest rank can always progress: others yield their blocks to it.
    Every submitted request ends in one Refused, or one Finished for each of its answers.
    """

    def __init__(
        self,
        manager: BlockManager,
        limits: Limits,
        *,
        context: Context | None = None,
        ceilings: Ceilings | None = None,
    ) -> None:
        self.manager = manager
        self.limits = limits
        self.ceilings = ceilings or Ceilings(
            sequences=limits.sequences,
            tokens=limits.tokens,
            watermark_blocks=max(manager.pool.total, limits.watermark_blocks),
        )
        self.ceilings.check(limits)
        self.counters = Counters()
        self.holds = Holds(manager)
        self.deadlines = Deadlines()
        self.followers = Followers()
        self.pace = Pace()
        self.rounds = Pace()
        """How long rounds of guesses take."""
        self.experience = Experience()
        self.roster = Roster(self.ceilings.sequences)
        self._context = context or Context()
        self._lengths = AnswerLengths()
        preemptions = Preemptions(manager, self.roster, self.followers, self.pace, self.counters)
        self._searches = Searches(manager, self.roster, self.followers)
        self._growth = Growth(
            manager,
            self.roster,
            self.holds,
            preemptions,
            self.pace,
            self.rounds,
            self.experience,
        )
        self._admissions = Admissions(
            manager,
            self.roster,
            self.holds,
            self.followers,
            preemptions,
            self.pace,
            self._lengths,
            self.counters,
        )
        self._in_flight: deque[InFlight] = deque()
        self._committed_at = -inf
        self._plans = 0
        self._untold: list[Decision] = []
        """Decisions made since the last plan."""

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self.roster.waiting.all())

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self.roster.running)

    @property
    def held(self) -> tuple[Sequence, ...]:
        """Those that wait for a sibling to compute their prompt, or to be admitted before them."""
        return self.roster.held

    @property
    def moving(self) -> tuple[Move, ...]:
        """The moves of plans in flight."""
        return tuple(move for step in self._in_flight for move in step.plan.moves)

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not (self.roster.waiting or self.roster.running or self._in_flight)

    def submit(self, request: Request, now: float) -> tuple[Event, ...]:
        """Queue a request, or say why it cannot be taken.

        Returns  nothing, or the terminal events.
        """
        refusal = self._refusal(request)
        if refusal is not None:
            return (refusal,)
        siblings = Siblings(request, self._factory(now))
        endings = [(one, one.ending()) for one in siblings if request.emitted]
        if any(ending for _, ending in endings):  # they have the same tokens still
            return tuple(self._finished(one, *end, now) for one, end in endings if end)
        self.roster.enter(siblings, request, now)
        self.deadlines.add(request, self.limits, now)
        return ()

    def cancel(
        self,
        request_id: str,
        now: float,
        only: int | None = None,
        reason: CancelReason = "abort",
    ) -> tuple[Event, ...]:
        """End a request wherever it is, or the `only` one of its answers that has this number;
        nothing if that has ended already."""
        ending = self.roster.of(request_id, only)
        return tuple(self._end(sequence, reason, None, now) for sequence in ending)

    def drop(self, hold: str, now: float) -> tuple[Event, ...]:
        """Give up the hold of this name, if there is one. No events come of it."""
        self.holds.drop(hold)
        return ()

    def flush(self, now: float) -> tuple[Event, ...]:
        """Let no later request find what was computed before; pins end. No events come of it."""
        self.manager.begin(now, self._plans)
        self.holds.flush()
        self.manager.flush()
        for sequence in tuple(self.roster):  # waiting ones may have KV too
            sequence.private = True
            self._desert(sequence)
        return ()

    def plan(self, now: float) -> StepPlan | None:
        """Decide the next step; None when there is nothing to compute."""
        self.manager.begin(now, self._plans)
        at = policy.circumstances(
            now,
            self.limits,
            self.roster.running,
            priorities=self.roster.live,
            service=self.roster.service,
            pace=self.pace,
            admissions=self.roster.tickets,
        )
        draft = Draft(self._plans, at, policy.budget(at))
        draft.promise = self._admissions.take_promise()
        self._untold += self.holds.expire(now)
        self._growth.share_out(draft)
        if not draft.preempted and not draft.awaited:
            self._admissions.admit(draft)
            self._growth.guess(draft, self.ceilings.draws)
        if not draft.empty:
            return self._close(draft)
        return self.plan(now) if draft.promise is not None and not self._in_flight else None

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> tuple[Event, ...]:
        """Take in what a step computed; plans are committed in the order they were made."""
        step = self._in_flight.popleft()
        assert step.plan is plan, f"plan {plan.id} is not the oldest in flight"
        assert result.plan_id == plan.id, f"result of plan {result.plan_id} for plan {plan.id}"
        self.manager.begin(now, self._plans)
        self.manager.settle(plan.moves, result.moved)
        events: list[Event] = _scored(step, result) if result.scores else []
        events += self._take_all(step, result, now)
        if self.followers:
            for sequence in step.sequences:
                self._call_back(self.followers.passed(sequence))
        drafted = sum([one.drafted for one in result.outcomes if isinstance(one, Sampled)])
        self.counters.tokens_computed += drafted
        self._time(step, drafted, result.rounds, now)
        return tuple(events)

    def set_limits(self, limits: Limits) -> Limits:
        """Let other limits hold from the next plan and submission on.

        Whoever runs or waits goes on, above a lower limit too: nobody is admitted and nobody
        queues until there is room below it.
        Returns  the limits that held before.
        Raises   ConfigError: one is above its ceiling; nothing has changed.
        """
        self.ceilings.check(limits)
        before, self.limits = self.limits, limits
        self.deadlines.reset()
        return before

    def overdue(self, now: float) -> tuple[str, ...]:
        """The requests whose time is over, to be cancelled for the reason "timeout". Changes
        nothing."""
        return self.deadlines.overdue(self.roster, self.limits, now)

    def explain(self, request: Request, now: float) -> Explanation:
        """What the prefix cache has of this prompt now, and why not the rest. Changes nothing."""
        return explain(self.manager, self._factory(now)(request, 0), now)

    # --- submit

    def _refusal(self, request: Request) -> Refused | None:
        if not request.prompt:
            return Refused(request.id, "prompt", "the prompt is empty: send at least one token")
        if request.max_tokens < 1:
            return Refused(
                request.id, "max_tokens", f"max_tokens is {request.max_tokens}: ask for 1 or more"
            )
        needed = self.manager.blocks_for(len(request.prompt) + request.max_tokens - 1)
        if needed > self.manager.pool.total:
            return Refused(
                request.id,
                "blocks",
                f"prompt and answer need {needed} KV blocks,"
                f" the pool has {self.manager.pool.total}",
            )
        if request.pins and (self.manager.cache is None or not request.use_cache):
            return Refused(request.id, "pin", "a pin needs the prefix cache, which is off")
        if request.id in self.roster:
            return Refused(request.id, "id", f"a request with id {request.id!r} is live")
        return turned_away(
            request,
            self.limits,
            answers=self.roster.unadmitted,
            tokens=self.roster.unadmitted_tokens,
        )

    def _context_of(self, request: Request) -> Context:
        return replace(self._context, salt=request.salt)

    def _factory(self, now: float) -> Callable[[Request, int], Sequence]:
        def sequence_of(request: Request, number: int) -> Sequence:
            last = len(request.prompt) + request.max_tokens - 1
            return Sequence(
                request,
                order=self.roster.arrivals,
                context=self._context_of(request),
                block_size=self.manager.block_size,
                groups=self.manager.groups,
                now=now,
                number=number,
                longest_chunk=self.manager.longest_chunk(last),
            )

        return sequence_of

    # --- plan

    def _close(self, draft: Draft) -> StepPlan:
        sequences = tuple(draft.grants)
        guesses = draft.guesses
        spans = tuple(
            [one.schedule(n, draft.id, guesses.get(one, 0)) for one, n in draft.grants.items()]
        )
        covers, tokens = draft.covers.values(), sum(draft.grants.values())
        turned = self._searches.turned()
        self._untold += draft.pinned
        draft.decisions += self._untold
        self._untold = []
        plan = StepPlan(
            id=draft.id,
            binds=(*[one.bind() for one in turned], *draft.binds),
            writes=(
                *[write for one in turned for write in self.manager.tables_of(one)],
                *[write for taken in covers for write in taken.writes],
            ),
            copies=tuple([copy for taken in covers for copy in taken.copies]),
            spans=spans,
            decisions=tuple(draft.decisions),
            moves=(*draft.moves_out, *draft.moves_in),
            returned=self.manager.returned(),
        )
        self._plans += 1
        self.counters.steps += 1
        self.counters.tokens_computed += tokens
        self.counters.evictions += sum([isinstance(one, Evicted) for one in draft.decisions])
        epochs = tuple([one.epoch for one in sequences])
        self._in_flight.append(InFlight(plan, sequences, epochs, tokens, draft.at.now))
        return plan

    # --- commit

    def _time(
        self, step: InFlight, drafted: int, rounds: Items[tuple[int, float]], now: float
    ) -> None:
        """Learn how long steps take, and rounds of guesses."""
        for positions, seconds in rounds:
            self.rounds.observe(positions, seconds)
        if step.tokens and not step.plan.moves:
            guessing_s = sum([seconds for _, seconds in rounds])
            step_s = now - max(step.planned_at, self._committed_at) - guessing_s
            self.pace.observe(step.tokens + drafted, step_s)
        self._committed_at = now

    def _take_all(self, step: InFlight, result: StepResult, now: float) -> list[Event]:
        """Take in every span. Most are one token of an answer that brings nothing else with it:
        they are seen here, without a look at all that they could bring.

        Only a span that samples is answered by a token. Tenants are charged when all are in.
        """
        outcomes = {outcome.row: outcome for outcome in result.outcomes}
        events: list[Event] = []
        tenants = []
        for sequence, epoch, span in zip(step.sequences, step.epochs, step.plan.spans, strict=True):
            row, _, stop, _, _, drafts = span
            outcome, request = outcomes.get(row), sequence.request
            if (
                stop < sequence.next_event
                and not drafts
                and epoch == sequence.epoch
                and isinstance(outcome, Sampled)
                and outcome.token not in request.stop_token_ids
            ):
                _, token, logprob, top, _, _, _, _, _ = outcome
                events.append(sequence.step(stop, token, logprob, top))
                tenants.append(request.tenant)
            else:
                events += self._take_in(sequence, epoch, span, outcome, now)
        self.counters.tokens_sampled += len(tenants)
        for tenant, tokens in Counter(tenants).items():
            self.roster.service.answer(tenant, tokens)
        return events

    def _take_in(
        self,
        sequence: Sequence,
        epoch: int,
        span: Span,
        outcome: Sampled | RowFailed | None,
        now: float,
    ) -> tuple[Event, ...]:
        if sequence.state is State.FINISHED:
            return ()
        if isinstance(outcome, RowFailed):
            self.manager.distrust(sequence)
            failed = self._searches.company_of(sequence)
            return tuple([self._end(one, "error", None, now, outcome.message) for one in failed])
        kept = 0 if outcome is None else outcome.kept
        if sequence.epoch == epoch and not kept:
            self._computed(sequence, span.start, span.stop, now)
        if not span.samples:
            return ()
        assert outcome is not None, f"{sequence.id}: the step sampled nothing"
        if sequence.company is not None:
            return self._search_on(sequence, outcome, now)
        events: list[Event] = []
        for drawn in (Drawn(outcome.token, outcome.logprob, outcome.top), *outcome.more):
            events.append(self._append(sequence, drawn, now))
            ending = sequence.ending()
            if ending is not None:
                break
        else:
            ending = ("stop", None) if outcome.ended else None
        if sequence.epoch == epoch and kept:  # the tokens of these positions are there now
            self._computed(sequence, span.start, span.stop + min(kept, len(events) - 1), now)
        if span.drafts:
            self._settle(sequence, outcome)
        elif sequence.runs:
            sequence.settle()
        if ending is not None:
            return (*events, self._end(sequence, *ending, now))
        if (
            sequence.computed > sequence.common and not sequence.runs
        ):  # all tokens it had at first, in this epoch
            event = self.manager.next_event(sequence)
            sequence.next_event = min(event, sequence.last_position)
        return tuple(events)

    def _search_on(self, sequence: Sequence, outcome: Sampled, now: float) -> tuple[Event, ...]:
        """Take in what one of a search may go on with; if that ends the search, its answers."""
        events: list[Event] = []
        for one, answer in self._searches.take(sequence, outcome, now):
            events += [self._append(one, drawn, now) for drawn in answer.drawn]
            events.append(self._end(one, answer.reason, answer.stop_id, now, answer.message))
        return tuple(events)

    def _append(self, sequence: Sequence, drawn: Drawn, now: float) -> Token:
        """Take in one token of an answer."""
        self.counters.tokens_sampled += 1
        self.roster.service.answer(sequence.request.tenant)
        token = sequence.append(drawn.token, drawn.logprob, now, drawn.top)
        if token.number == 0 and not sequence.number:
            self.counters.prompt_tokens += sequence.prompt_length
            self.counters.prompt_tokens_cached += sequence.cached_tokens
        return token

    def _settle(self, sequence: Sequence, outcome: Sampled) -> None:
        """Learn from the drafts of a span, and go on after those that were right."""
        self.counters.tokens_drafted += outcome.drafted
        self.counters.tokens_accepted += outcome.kept
        sequence.settle()
        sequence.drafting.observe(outcome.drafted, outcome.kept, sequence.length)
        if outcome.drafted:
            self.experience.observe(outcome.drafted, outcome.kept)
        self.manager.shrink(sequence)

    def _computed(self, sequence: Sequence, start: int, stop: int, now: float) -> None:
        """The KV of positions [start, stop) is there."""
        before = sequence.computed
        sequence.compute(start, stop)
        self.manager.seal(sequence)
        if before <= sequence.common:  # it may be the last part of the prompt
            self.roster.queue_next(sequence, now)
        if sequence.request.pins:
            self._untold += self.holds.pin(sequence, self.limits.pinned_blocks, now)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_id: int | None,
        now: float,
        message: str = "",
    ) -> Finished:
        """Free all that the sequence holds. Steps in flight that still name it change nothing."""
        if sequence.state is State.RUNNING and reason in ("stop", "length"):
            self.holds.keep(sequence)
        self.manager.release(sequence)
        self._desert(sequence)
        self.roster.leave(sequence, now)
        return self._finished(sequence, reason, stop_id, now, message)

    def _finished(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_id: int | None,
        now: float,
        message: str = "",
    ) -> Finished:
        event = sequence.finish(reason, stop_id, now, message)
        if reason in ("stop", "length"):
            self._lengths.learn(sequence.answer_length)
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self.counters.tokens_recomputed += event.receipt.recomputed_tokens
        return event

    def _desert(self, leader: Sequence) -> None:
        self._call_back(self.followers.deserted(leader))

    def _call_back(self, followers: list[Sequence]) -> None:
        for follower in followers:
            self.roster.waiting.call_back(follower)


def _scored(step: InFlight, result: StepResult) -> list[Event]:
    """What the step told of prompts for the first time."""
    found = {one.row: one for one in result.scores}
    told = [
        sequence.score(found[span.row].first, found[span.row].scores)
        for sequence, span in zip(step.sequences, step.plan.spans, strict=True)
        if span.row in found and sequence.state is not State.FINISHED
    ]
    return [event for event in told if event is not None]
