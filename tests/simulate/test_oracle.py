"""The oracle can fail: every way of breaking the core is found at the step that reads it."""

from dataclasses import replace
from random import Random

import pytest
from tests.core.planted import WRONG_CONTENT, Patch
from tests.core.serving import DRAWN, Setup

from octavo.core.plan import Bind, RowFailed, Sampled, Span, StepPlan, TableWrite
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.simulate.oracle import OracleRunner, WrongContent, answer_alone

REQUEST = Request(id="a", prompt=(4, 5, 6), max_tokens=5)


def plan(number: int, *spans: Span, **parts: tuple) -> StepPlan:
    empty = {"binds": (), "writes": (), "copies": (), "decisions": ()}
    return StepPlan(id=number, spans=spans, **{**empty, **parts})


def first_step(**changes: tuple) -> StepPlan:
    parts = {"binds": (Bind(0, REQUEST),), "writes": (TableWrite(0, 0, 0, (2, 1)),)}
    return plan(0, Span(0, 0, 3, (4, 5, 6), True), **{**parts, **changes})


def test_a_request_gets_the_answer_of_alone() -> None:
    oracle, answer = OracleRunner(blocks=4, block_size=2), answer_alone(REQUEST, 97)
    result = oracle.execute(first_step())
    assert result.outcomes == (Sampled(0, answer[0], 0.0),)
    result = oracle.execute(plan(1, Span(0, 3, 4, (answer[0],), True)))
    assert result.outcomes == (Sampled(0, answer[1], 0.0),)


def test_a_token_not_known_yet_is_the_one_sampled_last() -> None:
    oracle, answer = OracleRunner(blocks=4, block_size=2), answer_alone(REQUEST, 97)
    oracle.execute(first_step())
    assert oracle.execute(plan(1, Span(0, 3, 4, (), True))).outcomes[0].token == answer[1]


@pytest.mark.parametrize("wrong", [(2, 3), (1, 2), (0, 1)])
def test_a_wrong_table_entry_is_found(wrong: tuple[int, int]) -> None:
    oracle = OracleRunner(blocks=4, block_size=2)
    oracle.execute(first_step())
    with pytest.raises(WrongContent, match="a: position"):
        oracle.execute(plan(1, Span(0, 3, 4, (), True), writes=(TableWrite(0, 0, 0, wrong),)))


@pytest.mark.parametrize("other", [replace(REQUEST, salt="x"), replace(REQUEST, prompt=(9, 5, 6))])
def test_cells_of_another_salt_or_prefix_are_found(other: Request) -> None:
    oracle = OracleRunner(blocks=4, block_size=2)
    oracle.execute(first_step())
    with pytest.raises(WrongContent):
        oracle.execute(
            plan(
                1,
                Span(0, 2, 3, (6,), True),
                binds=(Bind(0, other),),
                writes=(TableWrite(0, 0, 0, (2, 1)),),
            )
        )


def test_groups_must_not_swap_their_blocks() -> None:
    oracle = OracleRunner(blocks=4, block_size=4, windows=(None, None))
    oracle.execute(first_step(writes=(TableWrite(0, 0, 0, (1,)), TableWrite(0, 1, 0, (2,)))))
    swapped = (TableWrite(0, 0, 0, (2,)), TableWrite(0, 1, 0, (1,)))
    with pytest.raises(WrongContent, match="group 0"):
        oracle.execute(plan(1, Span(0, 3, 4, (), True), writes=swapped))


def test_a_row_fails_from_a_position_on() -> None:
    oracle = OracleRunner(blocks=4, block_size=2)
    oracle.failing = {"a": 2}
    result = oracle.execute(
        plan(
            0,
            Span(0, 0, 2, (4, 5), False),
            binds=(Bind(0, REQUEST),),
            writes=(TableWrite(0, 0, 0, (2, 1)),),
        )
    )
    assert result.outcomes == ()
    (outcome,) = oracle.execute(plan(1, Span(0, 2, 3, (6,), True))).outcomes
    assert isinstance(outcome, RowFailed)


@pytest.mark.parametrize("emitted", range(6))
def test_the_answer_goes_on_from_what_was_emitted(emitted: int) -> None:
    answer = answer_alone(REQUEST, 97)
    assert answer_alone(replace(REQUEST, emitted=answer[:emitted]), 97) == answer
    stopping = replace(REQUEST, stop_token_ids=frozenset({answer[1]}))
    short = answer_alone(stopping, 97)
    assert short == answer[:2] or answer[0] == answer[1]
    assert answer_alone(replace(stopping, emitted=short), 97) == short


# --- broken cores: tests/core/planted.py. The traffic is the same for each.


def serve(setup: Setup, seed: int, requests_served: int) -> None:
    """Much traffic with shared beginnings through a small pool; nobody audits but the oracle."""
    random = Random(seed)
    scheduler, oracle = Scheduler(setup.manager(), setup.limits()), setup.oracle()
    starts = [tuple(random.choices(range(1, 90), k=12)) for _ in range(3)]
    tokens: dict[tuple[str, int], list[int]] = {}
    requests: dict[str, Request] = {}
    while len(requests) < requests_served or not scheduler.idle:
        if len(requests) < requests_served:
            start = random.choice(starts)[: random.choice([8, 10, 12])]
            tail = tuple(random.choices(range(1, 90), k=random.choice([0, 0, 1, 2, 7])))
            one = Request(
                id=str(len(requests)),
                prompt=start + tail,
                max_tokens=random.randint(1, 16),
                salt=random.choice(["", "x"]),
                priority=random.choice([0, 0, 0, 1]),
                branches=random.choice([1, 1, 3]),
                sampling=DRAWN,
            )
            requests[one.id] = one
            tokens |= {(one.id, branch): [] for branch in range(one.branches)}
            scheduler.submit(one, 0.0)
        step = scheduler.plan(0.0)
        if step is not None:
            for event in scheduler.commit(step, oracle.execute(step), 0.0):
                if hasattr(event, "token"):
                    tokens[event.request_id, event.branch].append(event.token)
    for (name, branch), sent in tokens.items():
        if tuple(sent) != answer_alone(requests[name].split()[branch], setup.vocabulary):
            raise WrongContent(f"{name}: another answer than alone")


SETUP = Setup(
    blocks=18,
    block_size=4,
    sequences=6,
    tokens=10,
    windows=(None, 7),
    host_blocks=12,
    preemption="swap",
    watermark_blocks=0,
)


def test_a_sound_core_is_found_sound(seed: int) -> None:
    serve(SETUP, seed, requests_served=200)


@pytest.mark.parametrize("breaks", WRONG_CONTENT)
def test_a_broken_core_is_found(breaks: Patch, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    breaks(monkeypatch)
    with pytest.raises(WrongContent):
        serve(SETUP, seed, requests_served=600)
