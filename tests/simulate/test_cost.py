"""The runner that computes nothing says how long it would have taken."""

import pytest

from octavo.core.plan import Bind, Move, Sampled, Span, StepPlan
from octavo.core.request import Request
from octavo.simulate.cost import STOP, WORD, Cost, CostRunner


def test_a_step_costs_its_base_its_tokens_and_its_moves() -> None:
    cost = Cost(base_s=1.0, token_s=0.1, move_s=0.01)
    assert cost.seconds(5) == pytest.approx(1.5)
    assert cost.seconds(5, 2) == pytest.approx(1.52)
    assert cost.seconds(0, 2) == pytest.approx(0.02)


def test_answers_have_the_lengths_that_were_given() -> None:
    runner = CostRunner(Cost(base_s=1.0, token_s=0.5, move_s=0.25), {"a": 2})
    bind = Bind(0, Request(id="a", prompt=(5, 6), max_tokens=9, stop_token_ids=frozenset({STOP})))
    moves = (Move("out", 1, 0), Move("in", 2, 1))
    first = StepPlan(0, (bind,), (), (), (Span(0, 0, 2, (5, 6), True),), (), moves)
    result = runner.execute(first)
    assert (result.outcomes, result.moved) == ((Sampled(0, WORD, 0.0),), 2)
    assert runner.now == pytest.approx(2.5)
    second = runner.execute(StepPlan(1, (), (), (), (Span(0, 2, 3, (WORD,), True),), ()))
    assert (second.outcomes, second.moved) == ((Sampled(0, STOP, 0.0),), 0)
