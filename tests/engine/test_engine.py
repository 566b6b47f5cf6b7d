"""The crank, turned with doubles for the runner."""

import logging
from dataclasses import replace

import pytest
from tests.observe.recording import Kept

from octavo.core.block_manager import BlockManager
from octavo.core.budget import Limits
from octavo.core.calls import Answer, Call, Cancel, Commit, Drop, Flush, Plan, SetLimits, Submit
from octavo.core.events import Admitted, Event, Finished, Refused, Token
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.engine.engine import Engine, Observer
from octavo.errors import InvalidRequest
from octavo.simulate.oracle import OracleRunner, answer_alone

VOCABULARY = 97


class Breaking:
    """An oracle whose step fails as a whole when told to."""

    def __init__(self, oracle: OracleRunner) -> None:
        self.broken = False
        self._oracle = oracle

    def execute(self, plan: StepPlan) -> StepResult:
        if self.broken:
            raise MemoryError("no room for the step")
        return self._oracle.execute(plan)


def make_engine(*observers: Observer) -> tuple[Engine, Breaking]:
    runner = Breaking(OracleRunner(blocks=16, block_size=4, vocabulary=VOCABULARY))
    manager = BlockManager(blocks=16, block_size=4)
    ticks = iter(range(10_000))
    scheduler = Scheduler(manager, Limits(sequences=4, tokens=16))
    engine = Engine(scheduler, runner, clock=lambda: float(next(ticks)), observers=observers)
    return engine, runner


def run(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
    return events


def test_an_idle_engine_has_nothing_to_say() -> None:
    engine, _ = make_engine()
    assert engine.step() == ()
    assert engine.status().steps == 0


def test_answers_come_as_tokens_and_one_end() -> None:
    engine, _ = make_engine()
    request = Request(id="a", prompt=(5, 6, 7), max_tokens=6)
    engine.submit(request)
    events = run(engine)
    tokens = [event.token for event in events if isinstance(event, Token)]
    assert tuple(tokens) == answer_alone(request, VOCABULARY)
    assert [type(event) for event in events if not isinstance(event, Token)] == [Finished]
    assert engine.status().blocks_owned == 0


def test_a_step_that_fails_ends_its_requests_and_no_other() -> None:
    engine, runner = make_engine()
    engine.submit(Request(id="victim", prompt=(1, 2), max_tokens=5))
    engine.step()
    runner.broken = True
    (ended,) = engine.step()
    assert isinstance(ended, Finished)
    assert (ended.request_id, ended.reason) == ("victim", "error")
    assert "MemoryError" in ended.message
    runner.broken = False
    later = Request(id="later", prompt=(1, 2), max_tokens=3)
    engine.submit(later)
    tokens = [event.token for event in run(engine) if isinstance(event, Token)]
    assert tuple(tokens) == answer_alone(later, VOCABULARY)
    status = engine.status()
    assert (status.failed_steps, status.blocks_free) == (1, 16)


def test_cancelled_requests_free_their_blocks_at_once() -> None:
    engine, _ = make_engine()
    engine.submit(Request(id="a", prompt=(1,) * 20, max_tokens=8))
    engine.step()
    assert engine.status().blocks_owned == 5
    (ended,) = engine.cancel("a")
    assert isinstance(ended, Finished)
    assert ended.reason == "abort"
    assert engine.status().blocks_owned == 0
    assert engine.cancel("a") == ()


def test_the_debug_log_has_every_decision_and_end_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, _ = make_engine()
    caplog.set_level(logging.DEBUG, logger="octavo.engine.engine")
    engine.submit(Request(id="elder", prompt=(1,) * 20, max_tokens=44))
    engine.submit(Request(id="younger", prompt=(2,) * 20, max_tokens=44))
    engine.submit(Request(id="giant", prompt=(3,) * 200, max_tokens=1))
    run(engine)
    text = caplog.text
    for record in (
        "Admitted(request_id='elder', row=0, tokens=20, cached_tokens=0, blocks_found=0,",
        "Chunked(request_id='elder', granted=16, demand=20",
        "Deferred(request_id='younger', limit='tokens'",
        "Preempted(request_id='younger', beneficiary='elder', mode='recompute'",
        "resumed=True",
        "Refused(request_id='giant', limit='blocks'",
        "Finished(request_id='elder', reason='length'",
    ):
        assert record in text, record
    assert "Token(" not in text


def test_nothing_is_logged_of_decisions_by_default(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = make_engine()
    caplog.set_level(logging.INFO, logger="octavo.engine.engine")
    engine.submit(Request(id="a", prompt=(1,) * 20, max_tokens=3))
    run(engine)
    assert caplog.records == []


def test_observers_are_told_every_call_and_answer() -> None:
    kept = Kept()
    engine, _ = make_engine(kept)
    engine.submit(Request(id="a", prompt=(1, 2), max_tokens=2))
    events = run(engine)
    engine.cancel("a")
    calls = [type(call) for call, _ in kept.told]
    assert calls == [Submit, Plan, Commit, Plan, Commit, Cancel]
    said = [event for call, answer in kept.told if isinstance(call, Commit) for event in answer]
    assert said == events
    times = [call.now for call, _ in kept.told]
    assert times == sorted(times)


def test_observers_are_told_what_changes_beside_the_requests() -> None:
    """Or a journal could not be replayed."""
    kept = Kept()
    engine, _ = make_engine(kept)
    engine.drop("a")
    engine.flush()
    before = engine.scheduler.limits
    engine.change_limits({"policy": "fair"})
    with pytest.raises(InvalidRequest):
        engine.change_limits({"max_num_seqs": 10**6})
    assert [call for call, _ in kept.told] == [
        Drop(1.0, "a"),
        Flush(2.0),
        SetLimits(3.0, replace(before, policy="fair")),
    ]
    assert [answer for _, answer in kept.told] == [(), (), before]


def test_an_observer_that_fails_is_dropped_and_the_answer_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        told = 0

        def observe(self, call: Call, answer: Answer) -> None:
            self.told += 1
            raise RuntimeError("I cannot see")

    failing, kept = Failing(), Kept()
    engine, _ = make_engine(failing, kept)
    request = Request(id="a", prompt=(1, 2), max_tokens=5)
    engine.submit(request)
    tokens = [event.token for event in run(engine) if isinstance(event, Token)]
    assert tuple(tokens) == answer_alone(request, VOCABULARY)
    assert failing.told == 1
    assert len(kept.told) == 11
    assert caplog.text.count("an observer failed") == 1


def test_B179_a_queue_has_a_bound_and_a_time_limit() -> None:
    """50 requests, some with four answers, at a queue of ten; some clients go, the rest waits for
    two seconds at most. Who is gone never starts."""
    kept = Kept()
    clock = [0.0]
    oracle = OracleRunner(blocks=64, block_size=4, vocabulary=VOCABULARY)
    limits = Limits(sequences=1, tokens=16, waiting=10, waiting_s=2.0)
    scheduler = Scheduler(BlockManager(blocks=64, block_size=4), limits)
    engine = Engine(scheduler, oracle, clock=lambda: clock[0], observers=[kept])
    engine.submit(Request(id="runs", prompt=(1, 2), max_tokens=30))
    engine.step()
    refused, taken, answers = [], [], 0
    for number in range(50):
        request = Request(
            id=f"r{number}", prompt=(3, 4), max_tokens=2, branches=4 if number % 3 == 2 else 1
        )
        events = engine.submit(request)
        if answers + request.branches > 10:
            (refusal,) = events
            assert isinstance(refusal, Refused)
            assert refusal.limit == "waiting"
            refused.append(request.id)
        else:
            assert events == ()
            answers += request.branches
            taken.append(request)
    assert (len(taken), len(refused)) == (7, 43)
    engine.cancel(taken[1].id)
    clock[0] = 1.9
    assert not [event for event in engine.step() if isinstance(event, Finished)]
    clock[0] = 2.1
    ends = [event for event in engine.step() if isinstance(event, Finished)]
    assert {end.request_id for end in ends} == {one.id for one in taken} - {taken[1].id}
    assert {end.reason for end in ends} == {"timeout"}
    assert len(ends) == 10 - taken[1].branches
    assert engine.status().waiting == 0
    run(engine)
    plans = [answer for _, answer in kept.told if isinstance(answer, StepPlan)]
    admitted = [d for plan in plans for d in plan.decisions if isinstance(d, Admitted)]
    assert [decision.request_id for decision in admitted] == ["runs"]
    assert engine.status().blocks_free == 64
