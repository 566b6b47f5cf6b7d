"""octavo replay and octavo explain: what a journal says, and whether it would happen again."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from octavo.core.calls import Answer, Commit, Plan, Submit
from octavo.core.plan import StepPlan
from octavo.errors import ConfigError, JournalError, RequestError
from octavo.observe.explain import account, page, table
from octavo.observe.journal import Entry, Header, Torn, encode, read_journal
from octavo.observe.lives import Lives
from octavo.simulate.replay import ImpossibleCall, Replay

SHOWN = 400
"""How many characters of two versions are shown from a little before they differ."""


@dataclass(slots=True)
class _Tally:
    runs: int = 0
    requests: int = 0
    steps: int = 0
    torn: list[int] = field(default_factory=list)

    def count(self, entry: Entry) -> None:
        self.requests += isinstance(entry.call, Submit)
        self.steps += isinstance(entry.call, Plan) and entry.answer is not None

    def __str__(self) -> str:
        return f"runs {self.runs}, requests {self.requests:,}, steps {self.steps:,}"


def replay(arguments: Namespace) -> int:
    """Make every call of a journal again; 0 when every answer is the same, 1 when one differs.

    Raises   JournalError.
    """
    tally, core = _Tally(), None
    for line in read_journal(arguments.file):
        match line:
            case Header():
                core = _core_of(line, arguments.file)
                tally.runs += 1
            case Torn(number):
                tally.torn.append(number)
            case Entry():
                assert core is not None, "a header comes first"
                difference = _difference(core, line)
                if difference:
                    where = f"step {_step(line, tally)} of run {tally.runs}, line {line.line}"
                    sys.stdout.write(f"different at {where}\n{difference}")
                    return 1
                tally.count(line)
    for number in tally.torn:
        sys.stdout.write(f"line {number} was not written to its end and is left out\n")
    sys.stdout.write(f"equal: {tally}\n")
    return 0


def _core_of(header: Header, file: Path) -> Replay:
    try:
        return Replay(header.setup)
    except ConfigError as error:
        raise JournalError(f"{file} has a run that could not begin: {error}") from error


def _step(entry: Entry, tally: _Tally) -> int:
    if isinstance(entry.call, Commit):
        return entry.call.result.plan_id
    return entry.answer.id if isinstance(entry.answer, StepPlan) else tally.steps


def _difference(core: Replay, entry: Entry) -> str:
    """Both versions of an answer, from where they differ; empty when they are the same."""
    journal = encode(entry.call, entry.answer).decode()
    again = _again(core, entry)
    if again == journal:
        return ""
    start = next(
        (i for i, (a, b) in enumerate(zip(journal, again, strict=False)) if a != b),
        min(len(journal), len(again)),
    )
    start = max(0, start - SHOWN // 4)
    return f"  journal: {_cut(journal, start)}\n  replay:  {_cut(again, start)}\n"


def _again(core: Replay, entry: Entry) -> str:
    try:
        answer: Answer = core.answer(entry.call)
    except ImpossibleCall as error:
        return f"impossible: {error}"
    except (AssertionError, LookupError) as error:
        return f"the core breaks: {error!r}"
    return encode(entry.call, answer).decode()


def _cut(text: str, start: int) -> str:
    shown = text[start : start + SHOWN]
    return ("…" if start else "") + shown + ("…" if start + SHOWN < len(text) else "")


def explain(arguments: Namespace) -> int:
    """Tell the life of one request of a journal, or list all.

    Raises   JournalError; RequestError: the journal knows no such request, or several.
    """
    runs = list(_runs(arguments.file))
    if arguments.request is None:
        tables = [
            table([account(life, lives.started_s or 0.0) for life in lives.all()]) for lives in runs
        ]
        sys.stdout.write("\n".join(tables))
        return 0
    for lives in reversed(runs):
        life = lives.find(arguments.request)
        if life is not None:
            sys.stdout.write(page(account(life, lives.started_s or 0.0)))
            return 0
    raise RequestError(
        f"{arguments.file} knows no request {arguments.request!r};"
        f" octavo explain {arguments.file} lists all"
    )


def _runs(file: Path) -> Iterator[Lives]:
    lives: Lives | None = None
    for line in read_journal(file):
        if isinstance(line, Header):
            if lives is not None:
                yield lives
            lives = Lives(ended=None)
        elif isinstance(line, Entry):
            assert lives is not None, "a header comes first"
            try:
                lives.observe(line.call, line.answer)
            except (AssertionError, LookupError) as error:
                raise JournalError(
                    f"{file}, line {line.line} contradicts the lines before it: {error!r}"
                ) from error
    if lives is not None:
        yield lives
