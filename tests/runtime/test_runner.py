"""The runner with a network that is a function of what it reads."""

import numpy as np
import pytest

from octavo.core.plan import Bind, BlockCopy, Move, RowFailed, Sampled, Span, StepPlan, TableWrite
from octavo.core.request import Request
from octavo.ops.api import BF16, F32, I32, Batch, KVLayout
from octavo.ops.reference import ReferenceOps
from octavo.runtime.movers import Mover
from octavo.runtime.runner import ModelRunner
from octavo.runtime.storage import KVStorage

VOCABULARY = 32
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=2, block_size=16)


class Successor:
    """Predicts the token after the one it reads; keeps the batches it was given."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.broken_token = -1

    def forward(self, batch: Batch, pool: BF16) -> F32:
        self.batches.append(batch)
        return self.logits(batch.logit_rows)

    def logits(self, rows: I32) -> F32:
        logits = np.zeros((len(rows), VOCABULARY), np.float32)
        for row, token in enumerate(self.batches[-1].tokens[rows]):
            logits[row, (token + 1) % VOCABULARY] = 5.0
            if token == self.broken_token:
                logits[row] = np.nan
        return logits


def make_runner() -> tuple[ModelRunner, Successor, KVStorage]:
    network, storage = Successor(), KVStorage(LAYOUT, 4)
    storage.poison()
    mover = Mover(storage, KVStorage(LAYOUT, 2))
    runner = ModelRunner(network, ReferenceOps(), storage, rows=3, max_context=64, mover=mover)
    return runner, network, storage


def plan(number: int, *, binds=(), writes=(), copies=(), spans=(), moves=()) -> StepPlan:  # type: ignore[no-untyped-def]
    return StepPlan(
        number, tuple(binds), tuple(writes), tuple(copies), tuple(spans), (), tuple(moves)
    )


def request(name: str) -> Request:
    return Request(id=name, prompt=(1, 2, 3), max_tokens=4)


def test_only_spans_that_sample_have_an_outcome() -> None:
    runner, network, _ = make_runner()
    result = runner.execute(
        plan(
            0,
            binds=[Bind(0, request("a")), Bind(2, request("b"))],
            writes=[TableWrite(0, 0, 0, (3,)), TableWrite(2, 0, 0, (1,))],
            spans=[Span(0, 0, 2, (1, 2), False), Span(2, 0, 3, (7, 8, 9), True)],
        )
    )
    assert result.plan_id == 0
    (outcome,) = result.outcomes
    assert isinstance(outcome, Sampled)
    assert (outcome.row, outcome.token) == (2, 10)
    np.testing.assert_array_equal(network.batches[0].tables[0], [[3], [1]])


def test_a_token_that_the_plan_does_not_know_yet_is_the_one_sampled_last() -> None:
    runner, network, _ = make_runner()
    runner.execute(
        plan(
            0,
            binds=[Bind(1, request("a"))],
            writes=[TableWrite(1, 0, 0, (0,))],
            spans=[Span(1, 0, 3, (4, 5, 6), True)],
        )
    )
    runner.execute(plan(1, spans=[Span(1, 3, 4, (), True)]))
    np.testing.assert_array_equal(network.batches[1].tokens, [7])


def test_a_row_that_is_not_finite_fails_alone() -> None:
    runner, network, _ = make_runner()
    network.broken_token = 2
    result = runner.execute(
        plan(
            0,
            binds=[Bind(0, request("a")), Bind(1, request("b"))],
            writes=[TableWrite(0, 0, 0, (0,)), TableWrite(1, 0, 0, (1,))],
            spans=[Span(0, 0, 1, (2,), True), Span(1, 0, 1, (4,), True)],
        )
    )
    assert [type(outcome) for outcome in result.outcomes] == [RowFailed, Sampled]


def test_blocks_are_copied_whole_and_before_anything_is_computed() -> None:
    runner, _, storage = make_runner()
    storage.pool[2] = 1.5
    runner.execute(
        plan(
            0,
            binds=[Bind(0, request("a"))],
            writes=[TableWrite(0, 0, 0, (0,))],
            copies=[BlockCopy(2, 0), BlockCopy(0, 3)],
            spans=[Span(0, 0, 1, (2,), True)],
        )
    )
    assert (storage.pool[[0, 3]] == 1.5).all()
    assert np.isnan(storage.pool[1].astype(np.float32)).all()


def test_moves_out_come_before_copies_and_moves_in_after_them() -> None:
    runner, _, storage = make_runner()
    storage.pool[0], storage.pool[1], storage.pool[2] = 1.0, 2.0, 3.0
    out = plan(0, copies=[BlockCopy(1, 0)], moves=[Move("out", 0, 1), Move("out", 2, 0)])
    assert runner.execute(out).moved == 2
    assert (storage.pool[0] == 2.0).all()
    back = plan(1, copies=[BlockCopy(2, 1)], moves=[Move("in", 2, 1), Move("in", 3, 0)])
    result = runner.execute(back)
    assert (result.plan_id, result.outcomes, result.moved) == (1, (), 2)
    assert [float(storage.pool[block].flat[0]) for block in range(4)] == [2.0, 3.0, 1.0, 3.0]


def scoring(count: int) -> Request:
    return Request(id="s", prompt=(4, 5, 9, 10, 11, 12), max_tokens=4, prompt_logprobs=count)


def test_prompts_are_scored_wherever_they_are_computed() -> None:
    """In any spans, more positions than there are rows of logits; the last token has no follower in
    the prompt, and answers are not scored."""
    sure, unlikely = 5 - np.log(31 + np.exp(5.0)), -np.log(31 + np.exp(5.0))
    expected = [(5, sure, 1), (9, unlikely, 2), (10, sure, 1), (11, sure, 1), (12, sure, 1)]
    tables = [TableWrite(row, 0, 0, (row,)) for row in range(2)]
    for spans in ([(0, 6)], [(0, 1), (1, 5), (5, 6)], [(0, 4), (4, 6)]):
        runner, _, _ = make_runner()
        told = []
        for number, (start, stop) in enumerate(spans):
            span = Span(1, start, stop, scoring(2).prompt[start:stop], stop == 6)
            binds = [Bind(1, scoring(2)), Bind(0, request("a"))] if number == 0 else []
            other = Span(0, number, number + 1, (20 + number,), True)
            result = runner.execute(plan(number, binds=binds, writes=tables, spans=[other, span]))
            for row, first, scores in result.scores:
                assert (row, first) == (1, start + 1)
                told += scores
        assert [(s.token, pytest.approx(s.logprob, abs=1e-5), s.rank) for s in told] == expected
        assert [[token for token, _ in s.top] for s in told][:2] == [[5, 0], [6, 0]]
        later = runner.execute(plan(9, spans=[Span(1, 6, 7, (13,), True)]))
        assert later.scores == ()


def test_a_prompt_that_is_not_finite_fails_alone() -> None:
    runner, network, _ = make_runner()
    network.broken_token = 9
    result = runner.execute(
        plan(
            0,
            binds=[Bind(0, scoring(0)), Bind(1, request("a"))],
            writes=[TableWrite(0, 0, 0, (0,)), TableWrite(1, 0, 0, (1,))],
            spans=[Span(0, 0, 6, scoring(0).prompt, True), Span(1, 0, 1, (4,), True)],
        )
    )
    assert {outcome.row: type(outcome) for outcome in result.outcomes} == {
        0: RowFailed,
        1: Sampled,
    }
    assert result.scores == ()
