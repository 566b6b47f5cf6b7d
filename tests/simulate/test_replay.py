"""Replay: the same calls give the same answers; another journal or another core does not."""

import dataclasses
from collections import Counter
from itertools import count
from pathlib import Path
from random import Random

import pytest
from tests.core.serving import Setup, prompt
from tests.observe.recording import Kept, core_setup, random_run, small_setup, watched

from octavo.core import policy
from octavo.core.calls import Answer, Call, Commit, CoreSetup, Plan
from octavo.core.plan import Sampled, StepPlan, StepResult
from octavo.core.request import Request
from octavo.observe.journal import Entry, Header, encode, read_journal
from octavo.simulate.replay import ImpossibleCall, Replay

KEPT = sorted((Path(__file__).parent.parent / "replay").glob("*.journal"))


def run_of(random: Random) -> tuple[CoreSetup, list[tuple[Call, Answer]]]:
    setup, kept = small_setup(random), Kept()
    random_run(random, watched(setup, kept))
    return core_setup(setup), kept.told


def replayed(setup: CoreSetup, told: list[tuple[Call, Answer]]) -> list[Answer]:
    core = Replay(setup)
    return [core.answer(call) for call, _ in told]


def test_the_same_calls_give_the_same_answers(seed: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(40):
        setup, told = run_of(Random(f"{seed} {number}"))
        assert replayed(setup, told) == [answer for _, answer in told]
        seen += kinds(told)
    for kind in ("Admitted", "Deferred", "Chunked", "Preempted", "Evicted", "abort", "error"):
        assert seen[kind], f"{kind} never happened: {seen}"


def kinds(told: list[tuple[Call, Answer]]) -> Counter[str]:
    """How often each decision was made, and each way to end."""
    found: Counter[str] = Counter()
    for _, answer in told:
        said = answer.decisions if isinstance(answer, StepPlan) else answer
        said = said if isinstance(said, tuple) else ()
        found.update(getattr(record, "reason", type(record).__name__) for record in said)
    return found


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_kept_journals_give_the_same_decisions(path: Path) -> None:
    """These were recorded once. A change of the scheduler on purpose records them again, with
    `python -m tests.replay.record` in the root of the repository."""
    header, *entries = read_journal(path)
    assert isinstance(header, Header)
    core = Replay(header.setup)
    for entry in entries:
        assert isinstance(entry, Entry)
        again = core.answer(entry.call)
        where = f"{path.name}, line {entry.line}"
        assert encode(entry.call, again) == encode(entry.call, entry.answer), where


def test_there_are_kept_journals() -> None:
    assert KEPT


def test_another_token_gives_other_answers(seed: int) -> None:
    setup, told = next(
        (setup, told)
        for setup, told in (run_of(Random(f"{seed} {run}")) for run in count())
        if any(isinstance(call, Commit) and answer for call, answer in told)
    )
    index, call = next(
        (index, call)
        for index, (call, answer) in enumerate(told)
        if isinstance(call, Commit) and answer
    )
    outcomes = tuple(
        outcome._replace(token=outcome.token + 1)
        if isinstance(outcome, Sampled)
        else dataclasses.replace(outcome, message="other")
        for outcome in call.result.outcomes
    )
    other = dataclasses.replace(call, result=StepResult(call.result.plan_id, outcomes))
    answers = replayed(setup, [*told[:index], (other, ())])
    assert answers[:index] == [answer for _, answer in told[:index]]
    assert answers[index] != told[index][1]


def test_another_policy_decides_otherwise(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded with the youngest as victim, replayed with nobody as victim."""
    kept = Kept()
    setup = Setup(blocks=6, block_size=2, sequences=3, tokens=32)
    serving = watched(setup, kept)
    random = Random(seed)
    for name in ("a", "b"):
        serving.submit(Request(id=name, prompt=prompt(random, 4), max_tokens=7))
    serving.finish()
    assert kinds(kept.told)["Preempted"]
    monkeypatch.setattr(policy, "victim_for", lambda sequence, running: None)
    core = Replay(core_setup(setup))
    first = next(
        index for index, (call, answer) in enumerate(kept.told) if core.answer(call) != answer
    )
    told = kept.told[first][1]
    assert isinstance(told, StepPlan)
    assert kinds([kept.told[first]])["Preempted"]


def test_calls_that_cannot_be_are_told(seed: int) -> None:
    core = Replay(core_setup(Setup()))
    core.answer(next(call for call, _ in run_of(Random(seed))[1]))
    with pytest.raises(ImpossibleCall, match="plan 3 is not in flight; none is"):
        core.answer(Commit(1.0, StepResult(3, ())))
    plan = core.answer(Plan(1.0))
    assert isinstance(plan, StepPlan)
    with pytest.raises(ImpossibleCall, match="has no token for rows 0"):
        core.answer(Commit(1.0, StepResult(plan.id, ())))
