"""A small world, searched whole: every state that any order of calls can lead to, and every way on.

    World    which requests may come, into which setup, and what else may happen
    Place    one state: a core, the runner's cells, the plans in flight, what was sent so far
    moves    every call that can be made in a place; each feature of the core is one more function
    explore  breadth first from the empty place, through all others, to where each request has ended

A plan is carried out when it is made, as a runner would that keeps up; its result waits until the
commit, which may bring what the runner sampled, a stop token instead, or a failed row. Cells that
nobody may read are emptied after every call: who reads one all the same is found at once.
"""

import hashlib
import io
import marshal
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product
from typing import Any
from weakref import WeakValueDictionary

from tests.core.audit import check_pins, check_plan
from tests.core.canonical import canonical
from tests.core.contents import check_contents, empty_what_nobody_reads

from octavo.core.budget import Limits
from octavo.core.calls import (
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
from octavo.core.events import Event, Finished, Refused
from octavo.core.invariants import check
from octavo.core.plan import RowFailed, Sampled, Span, StepPlan, StepResult
from octavo.core.prefix_cache import Context
from octavo.core.request import Request
from octavo.simulate.oracle import OracleRunner, answer_alone
from octavo.simulate.replay import Replay

STOP = 1_000
"""A token that the oracle never draws: a commit that brings it ends the answer."""
VOCABULARY = 97


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Which requests may come, each once and in any order, and what may happen to them.

    `depth` plans are in flight at most. `troubles` rows of one commit stop or fail at most. Once,
    at any moment, `passes_s` seconds may go by. Any of `limits` may be set at any time.
    A step takes what the `pace` says, whatever the clock does.
    """

    setup: CoreSetup
    requests: tuple[Request, ...]
    depth: int = 1
    cancels: bool = True
    troubles: int = 1
    flushes: bool = False
    passes_s: float = 0.0
    limits: tuple[Limits, ...] = ()
    pace: "Steady" = field(default_factory=lambda: Steady())


@dataclass(frozen=True, slots=True)
class Steady:
    """In the place of a `Pace`: what it says of steps does not depend on those that were."""

    base_s: float = 0.0
    token_s: float = 0.0

    @property
    def known(self) -> bool:
        return self.token_s > 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn nothing."""

    def seconds(self, tokens: int) -> float:
        return self.base_s + self.token_s * tokens


@dataclass(slots=True)
class Place:
    """One state of the world."""

    core: Replay
    oracle: OracleRunner
    unsent: tuple[Request, ...]
    now: float = 0.0
    plans: deque[StepPlan] = field(default_factory=deque)
    results: deque[StepResult] = field(default_factory=deque)
    sent: dict[Request, int] = field(default_factory=dict)
    """How many tokens each branch has got, of those that have not ended."""

    @property
    def idle(self) -> bool:
        return self.core.scheduler.idle


def start(world: World) -> Place:
    setup = world.setup
    requests = tuple(
        replace(one, stop_token_ids=one.stop_token_ids | {STOP}) for one in world.requests
    )
    oracle = OracleRunner(
        blocks=setup.blocks,
        block_size=setup.block_size,
        windows=setup.windows,
        vocabulary=VOCABULARY,
    )
    core = Replay(setup)
    core.scheduler.pace = world.pace
    return Place(core, oracle, requests)


# --- what can be done. A feature that brings a call brings a function here.


def submissions(world: World, place: Place) -> Iterator[Call]:
    for request in place.unsent:
        yield Submit(place.now, request)


def cancellations(world: World, place: Place) -> Iterator[Call]:
    """A whole request, or one of its branches."""
    scheduler = place.core.scheduler
    live = [*scheduler.running, *scheduler.waiting, *scheduler.held] if world.cancels else []
    for name in dict.fromkeys(sequence.request.id for sequence in live):
        yield Cancel(place.now, name)
    for sequence in live:
        if len([one for one in live if one.request.id == sequence.request.id]) > 1:
            yield Cancel(place.now, sequence.request.id, sequence.request.sampling.branch)
        if sequence.request.keep:
            branch = sequence.request.sampling.branch
            yield Cancel(place.now, sequence.request.id, branch, "stop")


def drops(world: World, place: Place) -> Iterator[Call]:
    for hold in place.core.scheduler.holds:
        yield Drop(place.now, hold.id)
    if world.flushes:
        yield Flush(place.now)


def plans(world: World, place: Place) -> Iterator[Call]:
    if len(place.plans) < world.depth and not place.idle:
        yield Plan(place.now)
        if place.now < world.passes_s:
            yield Plan(world.passes_s)


def commits(world: World, place: Place) -> Iterator[Call]:
    """The oldest plan in flight as it went, or with trouble in some rows."""
    if not place.plans:
        return
    plan, result = place.plans[0], place.results[0]
    if plan.moves and world.troubles:
        failed = tuple(RowFailed(span.row, "trouble") for span in plan.spans)
        yield Commit(place.now, StepResult(plan.id, failed, moved=0))
    drawn = {outcome.row: outcome for outcome in result.outcomes}
    for count in range(world.troubles + 1):
        for spans in combinations(plan.spans, count):
            for kinds in product(("stop", "fail"), repeat=count):
                changed: dict[int, Sampled | RowFailed] = dict(drawn)
                for span, kind in zip(spans, kinds, strict=True):
                    if kind == "stop" and not span.samples:
                        break
                    stops = kind == "stop"
                    changed[span.row] = (
                        Sampled(span.row, STOP, 0.0) if stops else RowFailed(span.row, "trouble")
                    )
                else:
                    yield Commit(place.now, replace(result, outcomes=tuple(changed.values())))


def new_limits(world: World, place: Place) -> Iterator[Call]:
    for limits in world.limits:
        if limits != place.core.scheduler.limits:
            yield SetLimits(place.now, limits)


RULES: tuple[Callable[[World, Place], Iterator[Call]], ...] = (
    submissions,
    cancellations,
    drops,
    plans,
    commits,
    new_limits,
)

ONWARD = (Plan, Commit)
"""Calls that an engine makes of its own accord: with these alone every request must end."""


def moves(world: World, place: Place) -> Iterator[Call]:
    for rule in RULES:
        yield from rule(world, place)


# --- doing it


def make(place: Place, call: Call) -> None:
    """Change `place` by one call and audit all of it."""
    place.now = call.now
    scheduler = place.core.scheduler
    running = scheduler.running
    answer = place.core.answer(call)
    if isinstance(call, Plan):
        check_pins(scheduler, place.now)
        assert scheduler.holds.pinned_blocks <= scheduler.limits.pinned_blocks
    if answer is None:
        assert running == scheduler.running, "no plan, yet something happened"
        assert place.plans or place.idle, "nothing can move"
    elif isinstance(call, Plan):
        assert isinstance(answer, StepPlan)
        check_plan(scheduler, answer)
        place.plans.append(answer)
        place.results.append(place.oracle.execute(answer))
    elif isinstance(call, SetLimits):
        assert isinstance(answer, Limits)
        assert running == scheduler.running
    else:
        assert isinstance(answer, tuple)
        if isinstance(call, Submit):
            place.unsent = tuple(one for one in place.unsent if one.id != call.request.id)
            place.sent |= dict.fromkeys(call.request.split(), 0)
        if isinstance(call, Commit):
            _undo(place, place.plans.popleft(), call.result.moved)
            place.results.popleft()
        for event in answer:
            _receive(place, event)
    check(scheduler)
    check_contents(scheduler, place.oracle)
    empty_what_nobody_reads(scheduler, place.oracle)
    if place.idle:
        _check_rest(place)


def _undo(place: Place, plan: StepPlan, moved: int) -> None:
    """What was not moved after all is nowhere."""
    for move in plan.moves[moved:]:
        if move.kind == "out":
            place.oracle._slots.pop(move.slot)
        else:
            place.oracle._cells[move.block] = [None] * place.core.scheduler.manager.block_size


def _receive(place: Place, event: Event) -> None:
    """Each branch gets the tokens it would get alone, in order, and one end."""
    if isinstance(event, Refused):
        for own in [own for own in place.sent if own.id == event.request_id]:
            del place.sent[own]
        return
    named = (event.request_id, event.branch)
    own = next((own for own in place.sent if (own.id, own.sampling.branch) == named), None)
    assert own is not None, f"{named}: an event after the terminal one"
    if isinstance(event, Finished):
        assert event.receipt.completion_tokens == place.sent.pop(own)
        return
    assert event.number == place.sent[own], f"{named}: a gap or a repeat"
    place.sent[own] += 1
    assert event.token in (STOP, _alone(own)[event.number]), f"{named}: another token than alone"


@cache
def _alone(request: Request) -> tuple[int, ...]:
    return answer_alone(request, VOCABULARY)


def _check_rest(place: Place) -> None:
    """Nothing leaks: all is free, cached or held, nobody else owns, everyone has an end."""
    scheduler = place.core.scheduler
    pool, arena = scheduler.manager.pool, scheduler.manager.arena
    assert arena is None or not arena.used, "slots of the host arena have leaked"
    assert pool.available + pool.yielding == pool.total, "blocks have leaked"
    assert len(scheduler.holds) or not any(map(pool.references, range(pool.total)))
    assert not place.sent, f"no end for {[own.id for own in place.sent]}"


# --- going everywhere


@dataclass(frozen=True, slots=True)
class Explored:
    """What there was. `steps` is the most plans and commits from any state to its end."""

    states: int
    calls: int
    steps: int


class Broken(AssertionError):
    """Something is wrong in a state; the message says what, and the calls that lead there."""


def explore(world: World, limit: int = 10_000_000) -> Explored:
    """Every state of `world`, audited.

    Raises  Broken, with the shortest path there, if an audit fails, if plans and commits alone can
            go on for ever, or if there are more than `limit` states.
    """
    trail = _Trail(world)
    trail.number(key_of(start(world)), 0, 0)
    frontier = deque([(0, kept(start(world)))])
    while frontier:
        here, before = frontier.popleft()
        for at, call in enumerate(moves(world, restored(before))):
            place = restored(before)
            try:
                make(place, call)
                key = key_of(place)
            except Exception as error:
                raise Broken(trail.told(here, call, repr(error))) from error
            there, fresh = trail.number(key, here, at)
            trail.go(here, there, call)
            if fresh:
                assert there < limit, f"more than {limit} states"
                frontier.append((there, kept(place)))
    return Explored(len(trail), trail.calls, trail.longest())


class _Trail:
    """Which states were found, how each was reached first, and which lead onward to which."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._numbers: dict[bytes, int] = {}
        self._from: list[tuple[int, int]] = []
        self._onward: list[set[int]] = []
        self.calls = 0

    def __len__(self) -> int:
        return len(self._from)

    def number(self, key: bytes, before: int, at: int) -> tuple[int, bool]:
        """(the number of a state, whether it is new), reached from `before` by its move `at`."""
        number = self._numbers.setdefault(key, len(self._from))
        fresh = number == len(self._from)
        if fresh:
            self._from.append((before, at))
            self._onward.append(set())
        return number, fresh

    def go(self, here: int, there: int, call: Call) -> None:
        self.calls += 1
        if isinstance(call, ONWARD) and here != there:
            self._onward[here].add(there)

    def path(self, number: int) -> list[Call]:
        """The calls from the start to a state."""
        turns = []
        while number:
            number, at = self._from[number]
            turns.append(at)
        place, calls = start(self._world), []
        for at in reversed(turns):
            calls.append(list(moves(self._world, place))[at])
            make(place, calls[-1])
        return calls

    def told(self, number: int, call: Call | None, message: str) -> str:
        calls = [*self.path(number), *([] if call is None else [call])]
        return "\n".join([message, "after:", *(f"  {one}" for one in calls)])

    def longest(self) -> int:
        """The most calls onward from any state.

        Raises  Broken if there is a circle.
        """
        before: list[list[int]] = [[] for _ in self._onward]
        left = list(map(len, self._onward))
        for here, ends in enumerate(self._onward):
            for there in ends:
                before[there].append(here)
        ready = [number for number, count in enumerate(left) if not count]
        steps, done = [0] * len(left), 0
        while ready:
            there = ready.pop()
            done += 1
            for here in before[there]:
                steps[here] = max(steps[here], steps[there] + 1)
                left[here] -= 1
                if not left[here]:
                    ready.append(here)
        if done < len(left):
            round_and_round = next(number for number, count in enumerate(left) if count)
            raise Broken(self.told(round_and_round, None, "plans and commits never end"))
        return max(steps)


def key_of(place: Place) -> bytes:
    """Equal for places that differ in nothing that matters."""
    results = [
        [(type(outcome).__name__, getattr(outcome, "token", None)) for outcome in result.outcomes]
        for result in place.results
    ]
    unsent = [one.id for one in place.unsent]
    value = (canonical(place.core.scheduler), place.now, unsent, results)
    # Version 2 writes equal values alike, whether or not they are one object.
    return hashlib.blake2b(marshal.dumps(value, 2), digest_size=16).digest()


# --- keeping a place: pickle copies what changes, and leaves frozen values as they are

_FROZEN = frozenset({Steady, Request, Context, StepPlan, StepResult, Span, CoreSetup, Limits})

Kept = tuple[bytes, list[Any]]
"""A place as bytes, and the frozen values in it."""


class _Pickler(pickle.Pickler):
    def __init__(self, to: io.BytesIO, values: list[Any]) -> None:
        super().__init__(to, protocol=5)
        self._values = values

    def persistent_id(self, value: Any) -> int | None:
        if type(value) not in _FROZEN:
            return None
        self._values.append(value)
        return len(self._values) - 1

    def reducer_override(self, value: Any) -> Any:
        if type(value) is WeakValueDictionary:
            return WeakValueDictionary, (dict(value),)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, kept: bytes, values: list[Any]) -> None:
        super().__init__(io.BytesIO(kept))
        self.persistent_load = values.__getitem__


def kept(place: Place) -> Kept:
    to, values = io.BytesIO(), []
    _Pickler(to, values).dump(place)
    return to.getvalue(), values


def restored(kept: Kept) -> Place:
    place = _Unpickler(*kept).load()
    assert isinstance(place, Place)
    return place
