"""Lives: what became of each request, gathered from the calls of the core and its answers.

The same gathering serves a journal read from a file and a server at work, where only the last
requests are kept. Nothing here holds token ids.
"""

import re
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from octavo.core.budget import Limits
from octavo.core.calls import Answer, Call, Commit, Plan, SetLimits, Submit
from octavo.core.events import (
    Admitted,
    Chunked,
    Decision,
    Deferred,
    Evicted,
    Finished,
    HoldDropped,
    HoldExpired,
    Pinned,
    PinRefused,
    Preempted,
    Refused,
)
from octavo.core.plan import RowFailed, StepPlan, StepResult
from octavo.core.request import Request, branch_name
from octavo.errors import UnknownRequest

_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")
"""What the HTTP APIs put before an id."""

_LEAST_WAIT_S = 1e-3
"""Shorter waits are not told."""

Phase = Literal["waiting", "prefill", "decode", "preempted", "ended"]


@dataclass(frozen=True, slots=True)
class Arrived:
    """The request came when so many others ran and waited."""

    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Waited:
    """Not computed for a while. `behind` stood first in the queue (empty: the request itself),
    `limit` is what it was short of, `missing` how much. Without a limit a step was under way. With
    the limit "prefix" `behind` was computing the beginning of this one's prompt."""

    behind: str
    limit: str
    missing: int


@dataclass(frozen=True, slots=True)
class Filled:
    """So many positions were computed in so many spans before the next token could be drawn;
    `shortened` of them so that a step would not outlast the TPOT target of others."""

    tokens: int
    chunks: int
    shortened: int = 0


@dataclass(frozen=True, slots=True)
class Drew:
    """The first token of the answer, or the first after a preemption."""

    first: bool


@dataclass(frozen=True, slots=True)
class Reused:
    """Cached blocks were reused for it: what they held is no longer cached."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Relimited:
    """An operator changed limits while it was there: (name, before, after) of each."""

    changes: tuple[tuple[str, object, object], ...]


What = (
    Arrived
    | Waited
    | Admitted
    | Filled
    | Drew
    | Reused
    | Deferred
    | Preempted
    | Pinned
    | PinRefused
    | HoldDropped
    | Relimited
    | Finished
    | Refused
)


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a request from `at_s` to `until_s`, on the engine's clock."""

    at_s: float
    until_s: float
    what: What


@dataclass(slots=True)
class Life:
    """One request so far. `blocks` holds (time, blocks held) at each change."""

    id: str
    prompt_tokens: int
    max_tokens: int
    priority: int
    arrived_s: float
    moments: list[Moment] = field(default_factory=list)
    phases: list[tuple[float, Phase]] = field(default_factory=list)
    blocks: list[tuple[float, int]] = field(default_factory=list)
    tables: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each layer group the first table entry that holds a block, and the table's length."""
    row: int = -1
    filling: bool = False
    """Since the last admission no token has been drawn."""
    answer_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    evictions: int = 0
    ended_s: float | None = None
    ending: Finished | Refused | None = None

    @property
    def phase(self) -> Phase:
        return self.phases[-1][1]

    def copy(self) -> "Life":
        """What later calls do not change."""
        moments, phases, blocks = list(self.moments), list(self.phases), list(self.blocks)
        return replace(self, moments=moments, phases=phases, blocks=blocks)

    def enter(self, phase: Phase, now: float) -> None:
        if not self.phases or self.phase != phase:
            self.phases.append((now, phase))

    def cover(self, group: int, index: int, stop: int, now: float) -> None:
        """The table of `group` has blocks from `index` to `stop`, and those it had."""
        first, before = self.tables.get(group, (index, stop))
        self.tables[group] = (first, max(before, stop))
        self.hold(now)

    def give_back(self, group: int, first: int, now: float) -> None:
        self.tables[group] = (first, self.tables[group][1])
        self.hold(now)

    def hold(self, now: float) -> None:
        self.blocks.append((now, sum(stop - first for first, stop in self.tables.values())))

    def tell(self, what: What, now: float, since: float | None = None) -> None:
        self.moments.append(Moment(now if since is None else since, now, what))

    def tell_again(self, what: Deferred | Filled | Reused, now: float) -> None:
        """As `tell`, in one moment with the last one if that was of the same kind."""
        last = self.moments[-1]
        merged = _merged(last.what, what)
        if merged is None:
            self.tell(what, now)
        else:
            self.moments[-1] = Moment(last.at_s, now, merged)


def _merged(before: What, now: What) -> What | None:
    match before, now:
        case Filled(tokens, chunks, shortened), Filled():
            return Filled(tokens + now.tokens, chunks + now.chunks, shortened + now.shortened)
        case Reused(blocks), Reused():
            return Reused(blocks + now.blocks)
        case Deferred(_, limit, missing), Deferred() if limit == now.limit:
            return replace(now, missing=max(missing, now.missing))
    return None


class Lives:
    """An observer. Keeps every request that is live and, of the others, the last `ended`.

    Cost     a few microseconds a step; O(1) a span and a new block, nothing a token besides.
    """

    def __init__(self, *, ended: int | None = 256) -> None:
        self._limit = ended
        self._lives: dict[str, Life] = {}
        """Of each branch that is live, by the name that decisions give it."""
        self._names: dict[tuple[str, int], str] = {}
        """That name, by how events say it."""
        self._ended: OrderedDict[str, Life] = OrderedDict()
        self._rows: dict[int, Life] = {}
        self._drawing: dict[int, list[Life]] = {}
        """For each plan in flight who draws the first token since an admission."""
        self._aside: dict[str, Moment] = {}
        """Since when who waits for another to compute its beginning."""
        self._queue: deque[Moment] = deque(maxlen=None if ended is None else 4096)
        """What the head of the queue waited for."""
        self._given_s: dict[int, float] = {}
        """When each block was last given to a request."""
        self._lock = threading.Lock()
        self.started_s: float | None = None

    def observe(self, call: Call, answer: Answer) -> None:
        with self._lock:
            if self.started_s is None:
                self.started_s = call.now
            match call:
                case Submit(now, request):
                    self._submitted(request, now)
                case Plan(now):
                    if isinstance(answer, StepPlan):
                        self._planned(answer, now)
                case Commit(now, result):
                    self._committed(result, now)
                case SetLimits(now, limits) if isinstance(answer, Limits):
                    self._relimited(answer, limits, now)
            if isinstance(answer, tuple):
                for event in answer:
                    if isinstance(event, Finished | Refused):
                        self._end(event, call.now)

    def named(self, request_id: str) -> Life | None:
        """The latest request of this id, as it is now; `ID#1` is its second branch."""
        with self._lock:
            life = self._lives.get(request_id) or self._ended.get(request_id)
            return None if life is None else self._with_waiting(life.copy())

    def newest(self, name: str) -> tuple[Phase, tuple[Moment, ...]] | None:
        """The phase of the live request that decisions call `name`, and its newest moments: the
        last decision about it, then what it waits for. None if there is no such request.

        Cost     O(1): not the whole story, for those who look at many often.
        """
        with self._lock:
            life = self._lives.get(name)
            if life is None:
                return None
            steps = Filled | Drew | Reused
            decided = (one for one in reversed(life.moments) if not isinstance(one.what, steps))
            moments = [next(decided)]  # the first one says that it arrived
            if life.row < 0:
                cause = self._aside.get(name) or (self._queue[-1] if self._queue else None)
                if cause is not None and cause.until_s >= life.arrived_s:
                    moments.append(_named_self(cause, name))
            return life.phase, tuple(moments)

    def given_s(self, block: int) -> float | None:
        """When a block was last given to a request, as a new one or as one that was found."""
        return self._given_s.get(block)

    def find(self, name: str) -> Life | None:
        """The request of this id, of the id in its API answer, or the only one that begins so.

        Raises  UnknownRequest: more than one begins so.
        """
        bare = re.sub(f"^({'|'.join(_PREFIXES)})", "", name)
        exact = self.named(name) or self.named(bare)
        if exact is not None:
            return exact
        close = [life.id for life in self.all() if life.id.startswith(bare)]
        if len(close) > 1:
            raise UnknownRequest(
                f"{len(close)} requests begin with {name!r}, such as {close[0]} and {close[1]};"
                " give more of the id"
            )
        return self.named(close[0]) if close else None

    def all(self) -> list[Life]:
        """All requests that are kept, in order of arrival."""
        with self._lock:
            lives = [life.copy() for life in (*self._ended.values(), *self._lives.values())]
        return sorted(lives, key=lambda life: life.arrived_s)

    # --- what happens

    def _submitted(self, request: Request, now: float) -> None:
        if any(name == request.id for name, _ in self._names):
            return
        running, waiting = len(self._rows), len(self._lives) - len(self._rows)
        for number, own in enumerate(request.split()):
            name = branch_name(request.id, number)
            life = Life(name, len(request.prompt), request.max_tokens, request.priority, now)
            life.answer_tokens = len(request.emitted)
            life.tell(Arrived(running, waiting), now)
            life.enter("waiting", now)
            self._lives[name] = life
            self._names[request.id, own.sampling.branch] = name

    def _planned(self, plan: StepPlan, now: float) -> None:
        for gone in plan.returned:
            if gone.row in self._rows:
                self._rows[gone.row].give_back(gone.group, gone.first, now)
        first: Deferred | None = None
        for decision in plan.decisions:
            if isinstance(decision, Deferred) and self._lives[decision.request_id].row < 0:
                self._back(decision.request_id, now)
                if decision.limit == "prefix":
                    self._put_aside(decision, now)
                else:
                    first = decision
            else:
                self._decided(decision, now)
        self._note_queue(first, now)
        short = {
            d.request_id for d in plan.decisions if isinstance(d, Chunked) and d.limit == "slo"
        }
        for write in plan.writes:
            stop = write.index + len(write.blocks)
            self._rows[write.row].cover(write.group, write.index, stop, now)
            self._given_s.update(dict.fromkeys(write.blocks, now))
        for span in plan.spans:
            life = self._rows[span.row]
            if span.samples:
                life.answer_tokens += 1
            if life.filling:
                shortened = int(life.id in short)
                life.tell_again(Filled(span.stop - span.start, 1, shortened), now)
                if span.samples:
                    life.filling = False
                    self._drawing.setdefault(plan.id, []).append(life)

    def _put_aside(self, decision: Deferred, now: float) -> None:
        waits = Waited(decision.behind, decision.limit, decision.missing)
        self._aside[decision.request_id] = Moment(now, now, waits)

    def _back(self, name: str, now: float) -> None:
        """It no longer waits for another, if it did."""
        aside = self._aside.pop(name, None)
        if aside is not None and now - aside.at_s > _LEAST_WAIT_S:
            self._lives[name].tell(aside.what, now, since=aside.at_s)

    def _decided(self, decision: Decision, now: float) -> None:
        match decision:
            case Admitted(request_id, row):
                self._back(request_id, now)
                life = self._lives[request_id]
                if not decision.resumed:
                    life.cached_tokens = decision.cached_tokens
                life.row, life.filling = row, True
                self._rows[row] = life
                life.enter("prefill", now)
                life.tell(decision, now)
            case Preempted(request_id):
                life = self._lives[request_id]
                life.preemptions += 1
                life.swaps += decision.mode == "swap"
                life.enter("preempted", now)
                life.tell(decision, now)
                self._leave(life, now)
                self._lives[decision.beneficiary].tell(decision, now)
            case Evicted(_, beneficiary):
                life = self._lives[beneficiary]
                life.evictions += 1
                life.tell_again(Reused(1), now)
            case Deferred(request_id):
                self._lives[request_id].tell_again(decision, now)
            case Pinned(request_id) | PinRefused(request_id):
                told = self._lives.get(request_id) or self._ended.get(request_id)
                if told is not None:
                    told.tell(decision, now)
            case HoldDropped(_, beneficiary):
                self._lives[beneficiary].tell(decision, now)
            case Chunked() | HoldExpired():
                pass  # its span says as much; nobody's life

    def _note_queue(self, first: Deferred | None, now: float) -> None:
        """The head of the queue waits for this from now on, until the next plan says otherwise."""
        what = Waited("", "", 0)
        if first is not None:
            what = Waited(first.request_id, first.limit, first.missing)
        if self._queue:
            last = self._queue[-1]
            assert isinstance(last.what, Waited)
            self._queue[-1] = replace(last, until_s=now)
            if (last.what.behind, last.what.limit) == (what.behind, what.limit):
                missing = max(last.what.missing, what.missing)
                self._queue[-1] = Moment(last.at_s, now, replace(what, missing=missing))
                return
        self._queue.append(Moment(now, now, what))

    def _committed(self, result: StepResult, now: float) -> None:
        failed = {outcome.row for outcome in result.outcomes if isinstance(outcome, RowFailed)}
        for life in self._drawing.pop(result.plan_id, ()):
            if life.ending is None and life.row >= 0 and life.row not in failed:
                life.enter("decode", now)
                life.tell(Drew(not any(isinstance(m.what, Drew) for m in life.moments)), now)

    def _relimited(self, before: Limits, after: Limits, now: float) -> None:
        pairs = [(f.name, getattr(before, f.name), getattr(after, f.name)) for f in fields(after)]
        what = Relimited(tuple(change for change in pairs if change[1] != change[2]))
        if what.changes:
            for life in self._lives.values():
                life.tell(what, now)

    def _end(self, event: Finished | Refused, now: float) -> None:
        if isinstance(event, Finished):
            keys = [(event.request_id, event.branch)]
        else:
            keys = [key for key in self._names if key[0] == event.request_id]
        if isinstance(event, Finished) or event.limit != "id":
            for key in keys:
                self._back(self._names[key], now)
                self._end_one(self._lives.pop(self._names.pop(key)), event, now)

    def _end_one(self, life: Life, event: Finished | Refused, now: float) -> None:
        self._leave(life, now)
        life.enter("ended", now)
        life.ending, life.ended_s = event, now
        if isinstance(event, Finished):
            life.answer_tokens = event.receipt.completion_tokens
        life.tell(event, now)
        self._ended.pop(life.id, None)
        self._ended[life.id] = life
        if self._limit is not None and len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def _leave(self, life: Life, now: float) -> None:
        if life.row >= 0:
            del self._rows[life.row]
            life.row, life.filling = -1, False
            life.tables.clear()
            life.hold(now)

    # --- what is told of waiting

    def _with_waiting(self, life: Life) -> Life:
        """With a moment for each cause of its waiting, from what the queue's head waited for."""
        aside = self._aside.get(life.id)
        if aside is not None:
            life.tell(aside.what, self._until(), since=aside.at_s)
        waits = [moment for span in _waiting(life, self._until()) for moment in self._causes(*span)]
        own = [_named_self(moment, life.id) for moment in waits]
        # Of what happens at one time the waiting comes last, or ends what follows it.
        life.moments = sorted([*life.moments, *own], key=lambda moment: moment.at_s)
        return life

    def _until(self) -> float:
        return self._queue[-1].until_s if self._queue else 0.0

    def _causes(self, start: float, stop: float) -> Iterable[Moment]:
        for cause in self._queue:
            at_s, until_s = max(cause.at_s, start), min(cause.until_s, stop)
            if until_s - at_s > _LEAST_WAIT_S and isinstance(cause.what, Waited):
                yield Moment(at_s, until_s, cause.what)


def _waiting(life: Life, now: float) -> Iterable[tuple[float, float]]:
    """From when to when it waited, each time, but not for another to compute its beginning."""
    aside = [
        (moment.at_s, moment.until_s)
        for moment in life.moments
        if isinstance(moment.what, Waited) and moment.what.limit == "prefix"
    ]
    ends = [at_s for at_s, _ in life.phases[1:]] + [max(now, life.arrived_s)]
    for (at_s, phase), end_s in zip(life.phases, ends, strict=True):
        if phase in ("waiting", "preempted"):
            for since_s, until_s in aside:
                if at_s <= since_s and until_s <= end_s:
                    yield at_s, since_s
                    at_s = until_s
            yield at_s, end_s


def _named_self(moment: Moment, request_id: str) -> Moment:
    assert isinstance(moment.what, Waited)
    if moment.what.behind != request_id:
        return moment
    return replace(moment, what=replace(moment.what, behind=""))
