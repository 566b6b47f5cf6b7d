"""Engine: turns the crank. One step is plan, execute, commit."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from octavo.core.budget import Ceilings, Limits
from octavo.core.calls import Answer, Call, Cancel, Commit, Drop, Flush, Plan, SetLimits, Submit
from octavo.core.events import CancelReason, Decision, Event, Explanation, PromptScored, Token
from octavo.core.plan import RowFailed, Runner, StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.engine.limits import changed, named, refusal
from octavo.errors import ConfigError
from octavo.observe.histogram import Counted
from octavo.observe.meter import Meter

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class Observer(Protocol):
    """Is told each call to the core and its answer, in the engine's thread, and must be quick.

    One that raises is told nothing more; the engine goes on.
    """

    def observe(self, call: Call, answer: Answer) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """What the engine is doing, read between two steps. Totals count from the start.

    Each block is free, cached, owned by a request that runs, or held for requests to come; those
    that are pinned are held, owned or both.
    """

    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int
    blocks_held: int
    blocks_pinned: int
    blocks_fenced: int
    """Given up, and on their way to the swap space."""
    table_entries: int
    """Blocks in the tables of all that run; one that several share counts once for each."""
    swap_blocks_total: int
    swap_blocks_used: int
    steps: int
    tokens_computed: int
    tokens_sampled: int
    tokens_drafted: int
    tokens_accepted: int
    """Of those drafted."""
    tokens_recomputed: int
    tokens_swapped_out: int
    tokens_swapped_in: int
    prompt_tokens: int
    """Of requests whose first token was sampled."""
    prompt_tokens_cached: int
    """How many of those were found in the prefix cache."""
    admissions: int
    """Answers that ran for the first time."""
    preemptions: int
    swaps: int
    """How many of the preemptions kept their KV in the swap space."""
    evictions: int
    prefix_tokens_queried: int
    prefix_tokens_hit: int
    limits: Limits
    ceilings: Ceilings
    failed_steps: int
    last_step_s: float
    """How long the last step took."""
    stepped_at_s: float
    """When it ended, on the engine's clock."""
    started_s: float
    """When this engine was made, on its clock: totals count from then."""
    step_s: Counted
    step_tokens: Counted
    token_gaps_s: Counted
    """Steps by duration and by positions computed, tokens by the time since the one before; the
    bounds stand in `observe.meter`."""


class Engine:
    """A scheduler and a runner. Not thread-safe: one thread turns the crank."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        clock: Clock = time.monotonic,
        observers: Iterable[Observer] = (),
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._meter = Meter()
        self._observers = (self._meter, *observers)
        self._failed_steps = 0
        self._last_step_s = 0.0
        self._started_s = self._stepped_at_s = clock()

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def now(self) -> float:
        """The time on its clock."""
        return self._clock()

    def submit(self, request: Request) -> tuple[Event, ...]:
        call = Submit(self._clock(), request)
        events = self.scheduler.submit(request, call.now)
        self._show(call, events)
        return self._told(events)

    def cancel(
        self, request_id: str, branch: int | None = None, reason: CancelReason = "abort"
    ) -> tuple[Event, ...]:
        """End a request, or one branch of it; nothing if that has ended already.

        With the reason "stop" the answer has ended as it should, by a stop string.
        """
        call = Cancel(self._clock(), request_id, branch, reason)
        events = self.scheduler.cancel(request_id, call.now, branch, reason)
        self._show(call, events)
        return self._told(events)

    def drop(self, hold: str) -> None:
        """Give up the hold of this name, if there is one."""
        call = Drop(self._clock(), hold)
        self._show(call, self.scheduler.drop(hold, call.now))

    def flush(self) -> int:
        """Empty the prefix cache: no later request finds what was computed before. Pins end.

        Returns  how many blocks it held.
        """
        cache = self.scheduler.manager.cache
        blocks = 0 if cache is None else len(cache)
        call = Flush(self._clock())
        self._show(call, self.scheduler.flush(call.now))
        return blocks

    def explain(self, request: Request) -> Explanation:
        """What the prefix cache has of this prompt now, and why not the rest; it is not served."""
        return self.scheduler.explain(request, self._clock())

    def change_limits(self, changes: Mapping[str, object]) -> Limits:
        """Let other limits hold, named as `engine.limits` does; returns all that hold now.

        Raises   InvalidRequest: one is unknown or out of range; nothing has changed.
        """
        limits = changed(self.scheduler.limits, changes)
        try:
            before = self.scheduler.set_limits(limits)
        except ConfigError as error:
            raise refusal(error) from error
        self._show(SetLimits(self._clock(), limits), before)
        logger.info("limits: %s", ", ".join(f"{k}={v}" for k, v in named(limits).items()))
        return limits

    def step(self) -> tuple[Event, ...]:
        """Compute one step, if there is anything to compute; returns what came of it."""
        expired = self._expire()
        started = self._clock()
        plan = self.scheduler.plan(started)
        self._show(Plan(started), plan)
        if plan is None:
            return expired
        self._tell(plan.decisions)
        result = self._execute(plan)
        call = Commit(self._clock(), result)
        events = self.scheduler.commit(plan, result, call.now)
        self._show(call, events)
        self._stepped_at_s = self._clock()
        self._last_step_s = self._stepped_at_s - started
        return (*expired, *self._told(events))

    def _expire(self) -> tuple[Event, ...]:
        """End the requests whose time is over, before anything more is computed for them."""
        overdue = self.scheduler.overdue(self._clock())
        return tuple([event for name in overdue for event in self.cancel(name, reason="timeout")])

    def _show(self, call: Call, answer: Answer) -> None:
        """Tell the observers; trouble of theirs is none of the engine's."""
        for observer in self._observers:
            try:
                observer.observe(call, answer)
            except Exception:
                logger.exception("an observer failed and is told nothing more")
                self._observers = tuple(other for other in self._observers if other is not observer)

    def _told(self, events: tuple[Event, ...]) -> tuple[Event, ...]:
        self._tell(event for event in events if not isinstance(event, Token | PromptScored))
        return events

    def _tell(self, records: Iterable[Decision | Event]) -> None:
        """Log at debug level what was decided and why, and how each request ended."""
        if logger.isEnabledFor(logging.DEBUG):
            for record in records:
                about = getattr(record, "request_id", None)
                extra = {} if about is None else {"request_id": about}
                logger.debug("step %d: %s", self.scheduler.counters.steps, record, extra=extra)

    def _execute(self, plan: StepPlan) -> StepResult:
        """Run the plan; if the runner fails, the requests of this step fail, and no other."""
        try:
            return self._runner.execute(plan)
        except Exception as error:
            logger.exception("step %d failed", plan.id)
            self._failed_steps += 1
            message = f"step {plan.id} failed: {type(error).__name__}"
            return StepResult(plan.id, tuple(RowFailed(span.row, message) for span in plan.spans))

    def status(self) -> EngineStatus:
        scheduler = self.scheduler
        pool, counters = scheduler.manager.pool, scheduler.counters
        arena = scheduler.manager.arena
        return EngineStatus(
            running=len(scheduler.running),
            waiting=scheduler.roster.unadmitted,
            blocks_total=pool.total,
            blocks_free=pool.available - pool.cached,
            blocks_cached=pool.cached,
            blocks_owned=pool.owned - pool.yielding,
            blocks_held=pool.yielding,
            blocks_pinned=scheduler.holds.pinned_blocks,
            blocks_fenced=pool.fenced,
            table_entries=pool.entries,
            swap_blocks_total=0 if arena is None else arena.total,
            swap_blocks_used=0 if arena is None else arena.used,
            steps=counters.steps,
            tokens_computed=counters.tokens_computed,
            tokens_sampled=counters.tokens_sampled,
            tokens_drafted=counters.tokens_drafted,
            tokens_accepted=counters.tokens_accepted,
            tokens_recomputed=counters.tokens_recomputed,
            tokens_swapped_out=counters.tokens_moved_out,
            tokens_swapped_in=counters.tokens_moved_in,
            prompt_tokens=counters.prompt_tokens,
            prompt_tokens_cached=counters.prompt_tokens_cached,
            admissions=scheduler.roster.tickets,
            preemptions=counters.preemptions,
            swaps=counters.preemptions_moved,
            evictions=counters.evictions,
            prefix_tokens_queried=counters.prefix_tokens_queried,
            prefix_tokens_hit=counters.prefix_tokens_hit,
            limits=scheduler.limits,
            ceilings=scheduler.ceilings,
            failed_steps=self._failed_steps,
            last_step_s=self._last_step_s,
            stepped_at_s=self._stepped_at_s,
            started_s=self._started_s,
            step_s=self._meter.step_s,
            step_tokens=self._meter.step_tokens,
            token_gaps_s=self._meter.token_gaps_s,
        )
