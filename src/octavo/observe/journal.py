"""The journal: what went into the core and what it decided, one line of JSON a call.

    {"octavo_journal":1,"octavo":"0.1.0","started_at":…,"setup":{…}}      a run begins
    {"call":"submit","now":…,"request":{…},"said":[]}
    {"call":"plan","now":…,"plan":{"id":0,"spans":[[row,start,stop,[tokens],samples]],…}}
    {"call":"commit","now":…,"plan":0,"outcomes":[[row,token]],"said":[["Finished",{…}]]}

Lines are only ever appended; a later run of the server adds its own after those before. A journal
holds the token ids of prompts and answers, so that only its owner may read the file. Left out are
log-probabilities and `Token` events: nothing is decided by the former, the outcomes say the latter.
"""

import fcntl
import itertools
import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

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
from octavo.core.events import CancelReason, Decision, Event, Finished, PromptScored, Refused, Token
from octavo.core.plan import (
    Bind,
    BlockCopy,
    Candidate,
    Drawn,
    Move,
    Returned,
    RowFailed,
    Sampled,
    Span,
    StepPlan,
    StepResult,
    TableWrite,
)
from octavo.core.request import Request
from octavo.errors import ConfigError, JournalError

logger = logging.getLogger(__name__)

FORMAT = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line of a run: `started_at` on the wall clock, in seconds since 1970."""

    octavo_journal: int
    octavo: str
    started_at: float
    setup: CoreSetup


@dataclass(frozen=True, slots=True)
class Entry:
    """A call, what the core answered, and on which line that stands."""

    line: int
    call: Call
    answer: Answer


@dataclass(frozen=True, slots=True)
class Torn:
    """A line that was not written to its end: the process was killed, or is writing it now."""

    line: int


class Journal:
    """Appends every call to a file. An observer: it never raises once it is open.

    When the file cannot be written any more (a full disk, say) the journal ends with one warning.

    Cost     one write a call, two calls a step; see `docs/explain.md`.
    Raises   JournalError: the file cannot be opened, holds something else, or is in use.
    """

    def __init__(self, path: Path, setup: CoreSetup, *, octavo: str, started_at: float) -> None:
        self._path = path
        descriptor = _open_for_appending(path)
        self._descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)
        header = Header(octavo_journal=FORMAT, octavo=octavo, started_at=started_at, setup=setup)
        try:
            _write(descriptor, _joint(descriptor) + msgspec.json.encode(header) + b"\n")
        except OSError as error:
            raise JournalError(f"cannot write the journal {path}: {error.strerror}") from error

    def observe(self, call: Call, answer: Answer) -> None:
        if not self.close.alive:
            return
        try:
            _write(self._descriptor, encode(call, answer) + b"\n")
        except OSError as error:
            self.close()
            logger.warning(
                "the journal %s ends here, serving goes on: %s", self._path, error.strerror
            )


def _open_for_appending(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalError(f"cannot open the journal {path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        head = os.pread(descriptor, len(_HEAD), 0)
    except OSError as error:
        os.close(descriptor)
        raise JournalError(
            f"the journal {path} cannot be used, perhaps another engine writes it: {error.strerror}"
        ) from error
    if head and head != _HEAD:
        os.close(descriptor)
        raise JournalError(f"{path} is no journal of format {FORMAT}; name another file")
    return descriptor


_HEAD = b'{"octavo_journal":%d,' % FORMAT


def _joint(descriptor: int) -> bytes:
    """What must stand between the end of the file and a new run: a torn last line is ended."""
    size = os.fstat(descriptor).st_size
    return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def _write(descriptor: int, line: bytes) -> None:
    written = os.write(descriptor, line)
    if written < len(line):
        raise OSError(None, "the disk is full")


# --- writing


class _Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    id: int
    spans: tuple[tuple[int, int, int, tuple[int, ...], bool], ...]
    binds: tuple[tuple[int, str, int], ...] = ()
    writes: tuple[tuple[int, int, int, tuple[int, ...]], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    decisions: tuple[tuple[str, Any], ...] = ()
    moves: tuple[tuple[Literal["out", "in"], int, int], ...] = ()
    returned: tuple[tuple[int, int, int], ...] = ()
    answered: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Of binds that say it: the row, and what its branch has answered."""
    drafts: tuple[tuple[int, int], ...] = ()
    """Of spans that allow any: the row, and how many."""


class _Submit(msgspec.Struct, frozen=True, tag="submit", tag_field="call"):
    now: float
    request: Request
    said: tuple[tuple[str, Any], ...]


class _Cancel(msgspec.Struct, frozen=True, tag="cancel", tag_field="call", omit_defaults=True):
    now: float
    request_id: str
    said: tuple[tuple[str, Any], ...]
    branch: int | None = None
    reason: CancelReason = "abort"


class _Drop(msgspec.Struct, frozen=True, tag="drop", tag_field="call"):
    now: float
    hold: str


class _Flush(msgspec.Struct, frozen=True, tag="flush", tag_field="call"):
    now: float


class _PlanCall(msgspec.Struct, frozen=True, tag="plan", tag_field="call"):
    now: float
    plan: _Plan | None


class _Commit(msgspec.Struct, frozen=True, tag="commit", tag_field="call", omit_defaults=True):
    now: float
    plan: int
    outcomes: tuple[tuple[int, int | str], ...]
    said: tuple[tuple[str, Any], ...]
    moved: int = 0
    drafted: tuple[tuple[int, int, int, tuple[int, ...]], ...] = ()
    """Of outcomes with drafts or more tokens: the row, how many were drafted and kept, and what
    followed."""
    ended: tuple[int, ...] = ()
    """The rows whose answers have come to the end of their grammar."""
    rounds: tuple[tuple[int, float], ...] = ()
    """Rounds of guesses: positions and seconds."""
    candidates: tuple[tuple[int, tuple[tuple[int, float], ...]], ...] = ()
    """Of beams: the row, and what each may go on with, with its score."""


class _SetLimits(msgspec.Struct, frozen=True, tag="set_limits", tag_field="call"):
    now: float
    limits: Limits
    before: Limits


_Line = _Submit | _Cancel | _PlanCall | _Commit | _Drop | _Flush | _SetLimits

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Line)


def encode(call: Call, answer: Answer) -> bytes:
    """One line, without its end. Equal lines mean equal calls and answers."""
    match call:
        case Plan(now):
            assert answer is None or isinstance(answer, StepPlan)
            return _encoder.encode(_PlanCall(now, None if answer is None else _plan(answer)))
        case Commit(now, result):
            outcomes = tuple(
                (outcome.row, outcome.token if isinstance(outcome, Sampled) else outcome.message)
                for outcome in result.outcomes
            )
            drafted = tuple(
                (one.row, one.drafted, one.kept, tuple(drawn.token for drawn in one.more))
                for one in result.outcomes
                if isinstance(one, Sampled) and (one.drafted or one.more)
            )
            ended = tuple(
                one.row for one in result.outcomes if isinstance(one, Sampled) and one.ended
            )
            candidates = tuple(
                (one.row, tuple((each.token, each.score) for each in one.candidates))
                for one in result.outcomes
                if isinstance(one, Sampled) and one.candidates
            )
            said = _said(answer)
            return _encoder.encode(
                _Commit(
                    now,
                    result.plan_id,
                    outcomes,
                    said,
                    result.moved,
                    drafted,
                    ended,
                    result.rounds,
                    candidates,
                )
            )
        case Submit(now, request):
            return _encoder.encode(_Submit(now, request, _said(answer)))
        case Cancel(now, request_id, branch, reason):
            return _encoder.encode(_Cancel(now, request_id, _said(answer), branch, reason))
        case Drop(now, hold):
            return _encoder.encode(_Drop(now, hold))
        case Flush(now):
            return _encoder.encode(_Flush(now))
        case SetLimits(now, limits):
            assert isinstance(answer, Limits)
            return _encoder.encode(_SetLimits(now, limits, answer))


def _plan(plan: StepPlan) -> _Plan:
    return _Plan(
        id=plan.id,
        spans=tuple((s.row, s.start, s.stop, s.tokens, s.samples) for s in plan.spans),
        binds=tuple((b.row, b.request.id, b.request.sampling.branch) for b in plan.binds),
        writes=tuple((w.row, w.group, w.index, w.blocks) for w in plan.writes),
        copies=tuple((copy.source, copy.target) for copy in plan.copies),
        decisions=_named(plan.decisions),
        moves=tuple((move.kind, move.block, move.slot) for move in plan.moves),
        returned=tuple((one.row, one.group, one.first) for one in plan.returned),
        answered=tuple((b.row, b.answered) for b in plan.binds if b.answered),
        drafts=tuple((s.row, s.drafts) for s in plan.spans if s.drafts),
    )


def _sampled(
    row: int,
    token: int,
    ended: bool,
    candidates: Iterable[tuple[int, float]],
    drafted: int = 0,
    kept: int = 0,
    more: Iterable[int] = (),
) -> Sampled:
    return Sampled(
        row,
        token,
        0.0,
        more=tuple(Drawn(each, 0.0) for each in more),
        kept=kept,
        drafted=drafted,
        ended=ended,
        candidates=tuple(Candidate(each, score, 0.0) for each, score in candidates),
    )


def _said(answer: Answer) -> tuple[tuple[str, Any], ...]:
    assert isinstance(answer, tuple)
    return _named(event for event in answer if not isinstance(event, Token | PromptScored))


def _named(records: Iterable[Decision | Event]) -> tuple[tuple[str, Any], ...]:
    return tuple((type(record).__name__, record) for record in records)


# --- reading


def read_journal(path: Path) -> Iterator[Header | Entry | Torn]:
    """The lines of a journal, in order; the file may still be written.

    Raises   JournalError: the file cannot be read, is none, is of another format, or is damaged.
    """
    reader = _Reader(path)
    try:
        with path.open("rb") as file:
            lines = enumerate(itertools.chain(file, [b""]), 1)
            number, line = next(lines)
            for next_number, following in lines:
                yield reader.read(number, line, following)
                number, line = next_number, following
            if number == 1:
                raise JournalError(f"{path} is empty, no journal")
    except OSError as error:
        raise JournalError(f"cannot read the journal {path}: {error.strerror}") from error


class _Reader:
    """Keeps the live branches of requests, which plans name by their ids only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._live: dict[tuple[str, int], Request] = {}

    def read(self, number: int, line: bytes, following: bytes) -> Header | Entry | Torn:
        """`following` tells whether a broken line is torn: then it is the last of its run."""
        if number == 1 or line.startswith(b'{"octavo_journal"'):
            return self._header(number, line)
        try:
            if not line.endswith(b"\n"):
                return Torn(number)
            return self._entry(number, _decoder.decode(line))
        except (msgspec.ValidationError, ConfigError) as error:
            raise self._damaged(number, str(error)) from error
        except msgspec.DecodeError as error:
            if not following or following.startswith(b'{"octavo_journal"'):
                return Torn(number)
            raise self._damaged(number, str(error)) from error

    def _damaged(self, number: int, why: str) -> JournalError:
        return JournalError(f"{self._path}, line {number} is damaged: {why}")

    def _header(self, number: int, line: bytes) -> Header:
        self._live.clear()
        try:
            head = msgspec.json.decode(line)
            version = head.get("octavo_journal") if isinstance(head, dict) else None
            if version == FORMAT:
                return msgspec.convert(head, Header)
        except (msgspec.ValidationError, ConfigError) as error:
            raise self._damaged(number, str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError):
            version = None
        if version is None:
            raise JournalError(f"{self._path} is no journal of Octavo")
        raise JournalError(
            f"{self._path} is a journal of format {version}; this version reads format {FORMAT}"
        )

    def _entry(self, number: int, line: _Line) -> Entry:
        match line:
            case _Submit(now, request, said):
                events = self._events(number, said)
                if not events:
                    self._live |= {(own.id, own.sampling.branch): own for own in request.split()}
                return Entry(number, Submit(now, request), events)
            case _Cancel(now, request_id, said, branch, reason):
                call = Cancel(now, request_id, branch, reason)
                return Entry(number, call, self._events(number, said))
            case _Drop(now, hold):
                return Entry(number, Drop(now, hold), ())
            case _Flush(now):
                return Entry(number, Flush(now), ())
            case _PlanCall(now, plan):
                answer = None if plan is None else self._plan(number, plan)
                return Entry(number, Plan(now), answer)
            case _Commit(now, plan_id, outcomes, said, moved, drafted, ended, rounds, candidates):
                drafts, offers = {row: rest for row, *rest in drafted}, dict(candidates)
                result = StepResult(
                    plan_id,
                    tuple(
                        RowFailed(row, value)
                        if isinstance(value, str)
                        else _sampled(
                            row, value, row in ended, offers.get(row, ()), *drafts.get(row, ())
                        )
                        for row, value in outcomes
                    ),
                    moved,
                    rounds=rounds,
                )
                return Entry(number, Commit(now, result), self._events(number, said))

            case _SetLimits(now, limits, before):
                return Entry(number, SetLimits(now, limits), before)

    def _events(self, number: int, said: Iterable[tuple[str, Any]]) -> tuple[Event, ...]:
        events = tuple(self._record(number, name, fields, _EVENTS) for name, fields in said)
        for event in events:
            if isinstance(event, Finished):
                self._live.pop((event.request_id, event.branch), None)
        return events

    def _plan(self, number: int, plan: _Plan) -> StepPlan:
        unknown = [name for _, *name in plan.binds if tuple(name) not in self._live]
        if unknown:
            name, branch = unknown[0]
            raise self._damaged(number, f"branch {branch} of request {name} is not live")
        answered, drafts = dict(plan.answered), dict(plan.drafts)
        return StepPlan(
            id=plan.id,
            binds=tuple(
                Bind(row, self._live[name, branch], answered.get(row, ()))
                for row, name, branch in plan.binds
            ),
            writes=tuple(TableWrite(*write) for write in plan.writes),
            copies=tuple(BlockCopy(*copy) for copy in plan.copies),
            spans=tuple(Span(*span, drafts.get(span[0], 0)) for span in plan.spans),
            decisions=tuple(
                self._record(number, name, fields, _DECISIONS) for name, fields in plan.decisions
            ),
            moves=tuple(Move(*move) for move in plan.moves),
            returned=tuple(Returned(*one) for one in plan.returned),
        )

    def _record(self, number: int, name: str, fields: Any, kinds: dict[str, type[T]]) -> T:
        if name not in kinds:
            raise self._damaged(number, f"nothing is called {name!r}")
        return msgspec.convert(fields, kinds[name])


_DECISIONS: dict[str, type[Decision]] = {kind.__name__: kind for kind in get_args(Decision)}
_EVENTS: dict[str, type[Finished | Refused]] = {kind.__name__: kind for kind in (Finished, Refused)}
