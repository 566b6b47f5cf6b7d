"""Scheduler: decides, step by step, which positions of which sequences are computed.

    submit ─▶ waiting ── admit ──▶ running ── commit ──▶ finished
                 ▲                    │
                 └───── preempt ──────┘

Submit, cancel, plan and commit change state; drop and flush what is held or cached, set_limits what
may be. None reads a clock or does I/O. Several plans may be in flight; they are committed in the
order in which they were made.
"""

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal, NamedTuple, get_args

from octavo.core import policy
from octavo.core.block_manager import BlockManager
from octavo.core.block_pool import Shortage
from octavo.core.budget import Budget, Ceilings, Limits
from octavo.core.events import (
    Admitted,
    CancelReason,
    Chunked,
    Decision,
    Deferred,
    Event,
    Evicted,
    Explanation,
    Finished,
    FinishReason,
    Preempted,
    Refused,
    Stretch,
    TokenLimit,
)
from octavo.core.fairness import ServiceCounters
from octavo.core.following import Followers
from octavo.core.grants import Admission, Reservation
from octavo.core.hits import Parent
from octavo.core.holds import Holds
from octavo.core.misses import explain, first_miss
from octavo.core.pace import Pace
from octavo.core.plan import Bind, Move, RowFailed, Sampled, Span, StepPlan, StepResult
from octavo.core.policy import Circumstances
from octavo.core.prediction import AnswerLengths
from octavo.core.prefix_cache import Context
from octavo.core.queue import Waiting, turned_away
from octavo.core.request import Request
from octavo.core.sequence import Rank, Sequence, State
from octavo.core.siblings import Siblings


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    tokens_recomputed: int = 0
    tokens_moved_out: int = 0
    tokens_moved_in: int = 0
    preemptions: int = 0
    preemptions_moved: int = 0
    """Those whose KV was kept."""
    evictions: int = 0
    prefix_tokens_queried: int = 0
    prefix_tokens_hit: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class _Part(NamedTuple):
    """One sequence's share of a plan."""

    sequence: Sequence
    epoch: int
    span: Span


class _InFlight(NamedTuple):
    """A plan that was made at `planned_at` and is not committed yet."""

    plan: StepPlan
    parts: tuple[_Part, ...]
    planned_at: float
    tokens: int


class _Draft:
    """A plan in the making: what each sequence is granted, until it is closed."""

    def __init__(self, plan_id: int, at: Circumstances, budget: Budget) -> None:
        self.id = plan_id
        self.at = at
        self.budget = budget
        self.grants: dict[Sequence, int] = {}
        self.binds: list[Bind] = []
        self.covers: dict[Sequence, Reservation | Admission] = {}
        self.decisions: list[Decision] = []
        self.moves_out: list[Move] = []
        self.moves_in: list[Move] = []
        self.stuck: set[Sequence] = set()
        """Those that no blocks were found for: they wait in place, and their tokens came back."""
        self.preempted = False
        self.awaited = 0
        """Blocks kept for those who will have enough when the moves in flight are over."""
        self.leaders: list[Sequence] | None = None
        """Who is computing its prompt, once somebody has asked."""

    def cover(self, sequence: Sequence, taken: Reservation | Admission) -> None:
        self.covers[sequence] = taken
        self.decisions += [Evicted(block, sequence.id) for block in taken.evicted]

    def defer(
        self, sequence: Sequence, limit: Literal["blocks", "in_transfer"], missing: int
    ) -> None:
        """Take back what was granted to `sequence`: it waits in place."""
        self.budget.refund(self.grants.pop(sequence))
        self.stuck.add(sequence)
        self.decisions.append(Deferred(sequence.id, limit, missing))


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
        self.followers = Followers()
        self.pace = Pace()
        self._context = context or Context()
        self._waiting = Waiting()
        self._running: list[Sequence] = []
        self._by_id: dict[str, Siblings] = {}
        self._rows = list(range(self.ceilings.sequences - 1, -1, -1))
        self._in_flight: deque[_InFlight] = deque()
        self._committed_at = -inf
        self._service = ServiceCounters()
        self._lengths = AnswerLengths()
        self._live: Counter[int] = Counter()
        """How many sequences have not ended, by priority."""
        self._arrivals = 0
        self._tickets = 0
        self._plans = 0
        self._untold: list[Decision] = []
        """Decisions made since the last plan."""

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting.all())

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def held(self) -> tuple[Sequence, ...]:
        """Those that wait for a sibling to compute their prompt, or to be admitted before them."""
        return tuple(one for siblings in self._by_id.values() for one in siblings.held)

    @property
    def unadmitted(self) -> int:
        """How many wait or are held."""
        return self._live.total() - len(self._running)

    @property
    def unadmitted_tokens(self) -> int:
        """The prompt tokens among them."""
        return self._waiting.tokens + self.unadmitted - len(self._waiting)

    @property
    def moving(self) -> tuple[Move, ...]:
        """The moves of plans in flight."""
        return tuple(move for step in self._in_flight for move in step.plan.moves)

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not (self._waiting or self._running or self._in_flight)

    def submit(self, request: Request, now: float) -> tuple[Event, ...]:
        """Queue a request, or say why it cannot be taken.

        Returns  nothing, or the terminal events.
        """
        refusal = self._refusal(request)
        if refusal is not None:
            return (refusal,)
        siblings = Siblings(request, self._factory(now))
        self._arrivals += 1
        endings = [(one, one.ending()) for one in siblings if request.emitted]
        if any(ending for _, ending in endings):  # they have the same tokens still
            return tuple(self._finished(one, *end, now) for one, end in endings if end)
        self._by_id[request.id] = siblings
        self._live[request.priority] += len(siblings)
        self._queue_next(siblings, now)
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
        siblings = self._by_id.get(request_id)
        ending = () if siblings is None else siblings.of(only)
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
        for sequence in (*self._running, *self._waiting.all()):  # waiting ones may have KV too
            sequence.private = True
            self._call_back(self.followers.deserted(sequence))
        return ()

    def plan(self, now: float) -> StepPlan | None:
        """Decide the next step; None when there is nothing to compute."""
        self.manager.begin(now, self._plans)
        at = policy.circumstances(
            now,
            self.limits,
            self._running,
            priorities=self._live,
            service=self._service,
            pace=self.pace,
            admissions=self._tickets,
        )
        draft = _Draft(self._plans, at, policy.budget(at))
        self._untold += self.holds.expire(now)
        self._grant(draft, self._running)
        self._secure(draft)
        self._pass_on(draft)
        if not draft.preempted and not draft.awaited:
            self._admit_waiting(draft)
        return self._close(draft, now)

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> tuple[Event, ...]:
        """Take in what a step computed; plans are committed in the order they were made."""
        step = self._in_flight.popleft()
        assert step.plan is plan, f"plan {plan.id} is not the oldest in flight"
        assert result.plan_id == plan.id, f"result of plan {result.plan_id} for plan {plan.id}"
        self.manager.begin(now, self._plans)
        self.manager.settle(plan.moves, result.moved)
        outcomes = {outcome.row: outcome for outcome in result.outcomes}
        events: list[Event] = []
        for part in step.parts:
            events += self._take_in(part, outcomes.get(part.span.row), now)
            if part.sequence.request.pins:
                self._pin(part.sequence, now)
        if step.tokens and not plan.moves:
            self.pace.observe(step.tokens, now - max(step.planned_at, self._committed_at))
        self._committed_at = now
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
        return before

    def explain(self, request: Request) -> Explanation:
        """What the prefix cache has of this prompt now, and why not the rest. Changes nothing."""
        return explain(self.manager, self._factory(0.0)(request, 0))

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
        if request.id in self._by_id:
            return Refused(request.id, "id", f"a request with id {request.id!r} is live")
        return turned_away(
            request, self.limits, answers=self.unadmitted, tokens=self.unadmitted_tokens
        )

    def _context_of(self, request: Request) -> Context:
        return replace(self._context, salt=request.salt)

    def _factory(self, now: float) -> Callable[[Request, int], Sequence]:
        def sequence_of(request: Request, number: int) -> Sequence:
            last = len(request.prompt) + request.max_tokens - 1
            return Sequence(
                request,
                order=self._arrivals,
                context=self._context_of(request),
                block_size=self.manager.block_size,
                groups=self.manager.groups,
                now=now,
                number=number,
                longest_chunk=self.manager.longest_chunk(last),
            )

        return sequence_of

    def _queue_next(self, siblings: Siblings, now: float) -> None:
        """Queue the next sibling if it is its turn, in the place of its request or behind all."""
        sequence = siblings.next()
        if sequence is None:
            return
        if policy.crowds(siblings.started - 1, len(self._running)):
            sequence.arrive(self._arrivals, now)
            self._arrivals += 1
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        self._service.join(sequence.request.tenant, self._waiting.tenants())
        self._waiting.add(sequence)

    # --- plan

    def _grant(self, draft: _Draft, running: Items[Sequence]) -> None:
        """Hand the token budget to the running sequences."""
        demands = [(sequence, sequence.demand) for sequence in running]
        for sequence, demand in policy.service_order(demands, draft.budget.left, draft.at):
            granted = draft.budget.grant(demand)
            if granted:
                draft.grants[sequence] = granted
            if granted < demand:
                draft.decisions.append(_short_of_tokens(sequence, granted, demand, draft.budget))

    def _secure(self, draft: _Draft) -> None:
        """Find blocks for every grant, by rank; who ranks last yields, or waits in place.

        Nobody yields for blocks that come back when moves in flight are over: they are waited for.
        """
        growing = [
            sequence
            for sequence, granted in draft.grants.items()
            if not self.manager.covers(sequence, sequence.scheduled + granted)
        ]
        for sequence in policy.by_rank(growing):
            while sequence in draft.grants:
                upto = sequence.scheduled + draft.grants[sequence]
                reservation = self.manager.reserve(sequence, upto, draft.awaited)
                if not isinstance(reservation, Shortage):
                    draft.cover(sequence, reservation)
                    break
                if reservation.blocks <= self.manager.pool.fenced:
                    draft.awaited = self.manager.pool.available + reservation.blocks
                    draft.defer(sequence, "in_transfer", reservation.blocks)
                    break
                below = policy.below(sequence, self._running)
                lacking = self.manager.lacking(sequence, upto, below, draft.awaited, holds=True)
                if not lacking and (dropped := self.holds.yield_to(sequence)):
                    draft.decisions.append(dropped)
                    continue
                victim = policy.victim_for(sequence, self._running)
                if victim is None or lacking:
                    draft.defer(sequence, "blocks", reservation.blocks)
                else:
                    self._preempt(victim, sequence, draft)

    def _pass_on(self, draft: _Draft) -> None:
        """Offer the tokens that came back to those for whom none were left.

        Otherwise one that is served next, ranks last and finds no block could hold a small budget
        for ever, and nobody would go on to give it blocks.
        """
        while draft.stuck and draft.budget.left and not draft.preempted:
            served = {*draft.grants, *draft.stuck}
            rest = [one for one in self._running if one.demand and one not in served]
            if not rest:
                return
            ids = {one.id for one in rest}
            draft.decisions = [said for said in draft.decisions if not _no_tokens(said, ids)]
            self._grant(draft, rest)
            self._secure(draft)

    def _preempt(self, victim: Sequence, beneficiary: Sequence, draft: _Draft) -> None:
        draft.budget.refund(draft.grants.pop(victim, 0))
        cover = draft.covers.pop(victim, None)
        draft.preempted = True
        lost, kept = victim.computed, victim.scheduled
        yielded = self.manager.preempt(
            victim,
            self.limits.preemption,
            recompute_s=self.pace.seconds(victim.scheduled) if self.pace.known else None,
            intact=cover is None or not cover.copies,  # which will not be carried out
        )
        self._running.remove(victim)
        self._rows.append(victim.row)
        victim.preempt(kept=bool(yielded.moves))
        self._call_back(self.followers.deserted(victim))
        self._queue(victim)
        draft.moves_out += yielded.moves
        self.counters.preemptions += 1
        if yielded.moves:
            lost = 0
            self.counters.preemptions_moved += 1
            self.counters.tokens_moved_out += kept
        draft.decisions.append(
            Preempted(
                victim.id,
                beneficiary.id,
                yielded.how.mode,
                yielded.blocks,
                lost,
                len(yielded.moves),
                *yielded.how.estimates_s,
            )
        )

    def _admit_waiting(self, draft: _Draft) -> None:
        """Admit in order until a limit is reached; nobody overtakes the first who must wait."""
        while not draft.preempted:
            sequence = policy.first(self._waiting, draft.at)
            if sequence is None:
                return
            if self._follow(sequence, draft):
                continue
            deferred = self._admit(sequence, draft)
            if deferred is not None:
                draft.decisions.append(deferred)
                return

    def _follow(self, sequence: Sequence, draft: _Draft) -> bool:
        """Set it aside while one that runs computes the beginning of its prompt, if that is worth
        waiting for."""
        if not draft.budget.left:
            return False
        if draft.leaders is None:
            draft.leaders = [one for one in self._running if self.manager.fills_prompt(one)]
        before = [one for one in draft.leaders if policy.goes_before(one, sequence, draft.at)]
        if not before:
            return False
        lead = self.manager.lead(sequence, before, self._parent_of(sequence))
        if lead is None or not policy.worth_following(
            lead.alike, lead.lacking, draft.budget.left, self.pace
        ):
            return False
        self._waiting.set_aside(sequence, draft.at.now)
        self.followers.follow(lead.leader, lead.upto, sequence)
        draft.decisions.append(Deferred(sequence.id, "prefix", lead.alike, lead.leader.id))
        return True

    def _call_back(self, followers: Iterable[Sequence]) -> None:
        for follower in followers:
            self._waiting.call_back(follower)

    def _admit(self, sequence: Sequence, draft: _Draft) -> Deferred | None:
        if sequence.promised:
            return Deferred(sequence.id, "in_flight", sequence.promised)
        if moving := self.manager.in_transfer(sequence):
            return Deferred(sequence.id, "in_transfer", moving)
        if draft.budget.left == 0:
            return Deferred(sequence.id, draft.budget.limit, sequence.demand)
        if excess := policy.overload(sequence, [bind.request for bind in draft.binds], draft.at):
            return Deferred(sequence.id, "slo", excess)
        chunk = min(draft.budget.left, sequence.longest_chunk)
        if self.manager.pool.yielding:
            self._ask_holds(sequence, chunk, draft)
        victims = self._victims(sequence, chunk, draft.at)
        if victims is None:
            return self._short_of_room(sequence, chunk)
        for victim in victims:
            self._preempt(victim, sequence, draft)
        admission = self.manager.admit(
            sequence,
            self._rows[-1],
            chunk=chunk,
            upto=policy.reserved(sequence, self.limits.admission),
            headroom=self._headroom(sequence, ()),
            parent=self._parent_of(sequence),
        )
        if isinstance(admission, Shortage):
            assert self.manager.pool.fenced, "counted before"
            return Deferred(sequence.id, "in_transfer", admission.blocks)
        self._start(sequence, admission, chunk, draft)
        return None

    def _ask_holds(self, sequence: Sequence, chunk: int, draft: _Draft) -> None:
        """Let holds go, as many as it takes for `sequence` to start, if it can then."""
        lower = policy.yielding_to(sequence, self._running, draft.at)
        leaving = lower[: max(self._rows_missing(), 0)]
        if self._rows_missing(len(lower)) > 0 or self._missing(sequence, chunk, lower, holds=True):
            return
        while self._missing(sequence, chunk, leaving):
            dropped = self.holds.yield_to(sequence)
            if dropped is None:
                return
            draft.decisions.append(dropped)

    def _victims(self, sequence: Sequence, chunk: int, at: Circumstances) -> list[Sequence] | None:
        """Who must yield a row or blocks for `sequence` to start; None if that would not do."""
        lower = policy.yielding_to(sequence, self._running, at)
        for count in range(len(lower) + 1):
            victims = lower[:count]
            if self._rows_missing(count) <= 0 and not self._missing(sequence, chunk, victims):
                return victims
        return None

    def _short_of_room(self, sequence: Sequence, chunk: int) -> Deferred:
        missing = self._missing(sequence, chunk, ())
        if missing and not self._missing(sequence, chunk, (), foresee=False):
            return Deferred(sequence.id, "predicted", missing)
        if missing:
            return Deferred(sequence.id, "blocks", missing)
        return Deferred(sequence.id, "rows", self._rows_missing())

    def _rows_missing(self, leaving: int = 0) -> int:
        """How many more sequences must leave before one may start; 0 or less: it may now."""
        return len(self._running) - leaving + 1 - self.limits.sequences

    def _missing(
        self,
        sequence: Sequence,
        chunk: int,
        leaving: Items[Sequence],
        *,
        holds: bool = False,
        foresee: bool = True,
    ) -> int:
        return self.manager.missing(
            sequence,
            chunk=chunk,
            upto=policy.reserved(sequence, self.limits.admission),
            headroom=self._headroom(sequence, leaving, foresee=foresee),
            leaving=leaving,
            parent=self._parent_of(sequence),
            holds=holds,
        )

    def _parent_of(self, sequence: Sequence) -> Parent | None:
        """Whose blocks it can go on from: those of a running sibling, or of the hold it names."""
        parents: list[Parent | None] = [
            self._by_id[sequence.request.id].parent_of(sequence),
            self.holds.of(sequence),
        ]
        there = [parent for parent in parents if parent is not None]
        return max(there, key=lambda parent: parent.common_with(sequence), default=None)

    def _headroom(
        self, sequence: Sequence, leaving: Items[Sequence], *, foresee: bool = True
    ) -> int:
        staying = [one for one in self._running if one not in leaving]
        foreseen = 0
        if foresee and policy.foresees(self.limits):
            foreseen = self.manager.foreseen(sequence, staying, leaving, self._lengths)
        return policy.headroom(
            sequence,
            watermark=self.limits.watermark_blocks,
            alone=not staying,
            blocks=self.manager.pool.total,
            foreseen=foreseen,
        )

    def _start(self, sequence: Sequence, admission: Admission, chunk: int, draft: _Draft) -> None:
        resumed = sequence.preemptions > 0
        overtook = self._waiting.earlier(sequence)
        self._waiting.remove(sequence, draft.at.now)
        self._running.append(sequence)
        row = self._rows.pop()
        self._service.leave(sequence.request.tenant)
        if not resumed:
            tokens = sequence.length - admission.cached_tokens
            self._service.prompt(sequence.request.tenant, tokens)
        sequence.take_rank(self._rank(sequence, draft.at))
        cached, restored = admission.cached_tokens, admission.restored_tokens
        sequence.admit(row=row, cached=cached, restored=restored, now=draft.at.now)
        if draft.leaders is not None and self.manager.fills_prompt(sequence):
            draft.leaders.append(sequence)
        draft.binds.append(Bind(row, sequence.request))
        draft.cover(sequence, admission)
        draft.moves_in += admission.moves
        moved_in = max(0, restored - cached)
        self.counters.tokens_moved_in += moved_in
        draft.decisions.append(
            Admitted(
                sequence.id,
                row,
                sequence.length,
                admission.cached_tokens,
                admission.blocks_found,
                admission.blocks_allocated,
                resumed,
                None if admission.parent is None else admission.parent.id,
                moved_in,
                len(admission.moves),
                self._missed(sequence, admission, resumed),
                0 if resumed else overtook,
            )
        )
        self.holds.hit(sequence, draft.at.now)
        self._pin(sequence, draft.at.now)
        cached = self.manager.cache is not None and sequence.request.use_cache
        if cached and not resumed and admission.parent is None:
            self.counters.prefix_tokens_queried += sequence.length
            self.counters.prefix_tokens_hit += admission.cached_tokens
        demand = sequence.demand
        draft.grants[sequence] = granted = draft.budget.grant(min(demand, chunk))
        if granted < demand:
            draft.decisions.append(Chunked(sequence.id, granted, demand, draft.budget.limit))
        self._queue_next(self._by_id[sequence.request.id], draft.at.now)

    def _missed(self, sequence: Sequence, admission: Admission, resumed: bool) -> Stretch | None:
        if resumed or admission.parent is not None:
            return None
        return first_miss(self.manager, sequence, admission.cached_tokens)

    def _rank(self, sequence: Sequence, at: Circumstances) -> Rank:
        if sequence.ticket is None:
            self._tickets += 1
            return policy.rank_class(sequence, at), self._tickets
        return policy.rank_class(sequence, at), sequence.ticket

    def _close(self, draft: _Draft, now: float) -> StepPlan | None:
        moves = (*draft.moves_out, *draft.moves_in)
        if not draft.grants and not moves:
            return None
        parts = tuple(
            _Part(sequence, sequence.epoch, sequence.schedule(count, draft.id))
            for sequence, count in draft.grants.items()
        )
        draft.decisions += self._untold
        self._untold = []
        plan = StepPlan(
            id=draft.id,
            binds=tuple(draft.binds),
            writes=tuple(write for taken in draft.covers.values() for write in taken.writes),
            copies=tuple(copy for taken in draft.covers.values() for copy in taken.copies),
            spans=tuple(part.span for part in parts),
            decisions=tuple(draft.decisions),
            moves=moves,
            returned=self.manager.returned(),
        )
        self._plans += 1
        self.counters.steps += 1
        tokens = sum(draft.grants.values())
        self.counters.tokens_computed += tokens
        self.counters.evictions += sum(isinstance(d, Evicted) for d in draft.decisions)
        self._in_flight.append(_InFlight(plan, parts, now, tokens))
        return plan

    # --- commit

    def _pin(self, sequence: Sequence, now: float) -> None:
        self._untold += self.holds.pin(sequence, self.limits.pinned_blocks, now)

    def _take_in(
        self, part: _Part, outcome: Sampled | RowFailed | None, now: float
    ) -> Iterable[Event]:
        sequence, epoch, (_, start, stop, _, samples) = part
        if sequence.state is State.FINISHED:
            return ()
        if isinstance(outcome, RowFailed):
            self.manager.distrust(sequence)
            return (self._end(sequence, "error", None, now, outcome.message),)
        if sequence.epoch == epoch:
            before = sequence.computed
            sequence.compute(start, stop)
            self.manager.seal(sequence)
            self._call_back(self.followers.passed(sequence))
            if before <= sequence.common:  # it may be the last part of the prompt
                self._queue_next(self._by_id[sequence.request.id], now)
        if not samples:
            return ()
        assert outcome is not None, f"{sequence.id}: the step sampled nothing"
        self.counters.tokens_sampled += 1
        self._service.answer(sequence.request.tenant)
        token = sequence.append(outcome.token, outcome.logprob, now)
        ending = sequence.ending()
        return (token,) if ending is None else (token, self._end(sequence, *ending, now))

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_id: int | None,
        now: float,
        message: str = "",
    ) -> Finished:
        """Free all that the sequence holds. Steps in flight that still name it change nothing."""
        if sequence.state is State.RUNNING:
            self._running.remove(sequence)
            self._rows.append(sequence.row)
            if reason in ("stop", "length"):
                self.holds.keep(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence, now)
        self.manager.release(sequence)
        self._call_back(self.followers.deserted(sequence))
        siblings = self._by_id[sequence.request.id]
        siblings.remove(sequence)
        self._live[sequence.request.priority] -= 1
        if not self._live[sequence.request.priority]:
            del self._live[sequence.request.priority]
        if siblings:
            self._queue_next(siblings, now)
        else:
            del self._by_id[sequence.request.id]
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


def _no_tokens(decision: Decision, ids: Container[str]) -> bool:
    """Whether it says that one of these got no tokens."""
    return (
        isinstance(decision, Deferred)
        and decision.limit in get_args(TokenLimit)
        and decision.request_id in ids
    )


def _short_of_tokens(sequence: Sequence, granted: int, demand: int, budget: Budget) -> Decision:
    if granted:
        return Chunked(sequence.id, granted, demand, budget.limit)
    return Deferred(sequence.id, budget.limit, demand)
