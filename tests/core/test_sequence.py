"""Watermarks, states and endings of one sequence."""

import pytest

from octavo.core.prefix_cache import Context
from octavo.core.request import Request
from octavo.core.sequence import NO_ROW, TRANSITIONS, Sequence, State


def sequence(**fields: object) -> Sequence:
    request = Request(**{"id": "a", "prompt": (1, 2, 3), "max_tokens": 4, **fields})
    return Sequence(request, order=0, context=Context(), block_size=2, groups=1, now=1.0)


def served(one: Sequence, count: int, token: int | None = None) -> None:
    start = one.scheduled
    one.schedule(count, plan_id=0)
    one.compute(start, start + count)
    if token is not None:
        one.append(token, -0.5, now=2.0)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("target", State)
def test_only_the_moves_of_the_table_are_legal(state: State, target: State) -> None:
    one = sequence()
    one.state = state
    if target in TRANSITIONS[state]:
        one.become(target)
        assert one.state is target
    else:
        with pytest.raises(AssertionError):
            one.become(target)


def test_demand_is_what_is_not_scheduled_yet() -> None:
    one = sequence()
    one.admit(row=0, cached=1, now=1.0)
    assert one.demand == 2
    served(one, 1)
    assert one.demand == 1
    one.schedule(1, plan_id=1)
    assert (one.promised, one.length, one.demand) == (1, 4, 1)
    one.schedule(1, plan_id=2)
    assert (one.promised, one.length, one.demand) == (2, 5, 1)


def test_the_last_token_needs_no_keys_and_values() -> None:
    one = sequence(max_tokens=2)
    one.admit(row=0, cached=0, now=1.0)
    served(one, 3, token=9)
    assert one.demand == 1
    served(one, 1, token=9)
    assert (one.answer_length, one.demand) == (2, 0)


def test_preemption_keeps_tokens_and_drops_all_else() -> None:
    one = sequence()
    one.admit(row=2, cached=0, now=1.0)
    served(one, 3, token=9)
    one.preempt()
    assert one.tokens == [1, 2, 3, 9]
    assert (one.computed, one.scheduled, one.row, one.epoch) == (0, 0, NO_ROW, 1)
    one.admit(row=1, cached=2, now=5.0)
    served(one, 2, token=8)
    receipt = one.receipt(9.0)
    assert (receipt.preemptions, receipt.recomputed_tokens, receipt.cached_tokens) == (1, 1, 0)
    assert (receipt.admitted_s, receipt.first_token_s, receipt.finished_s) == (1.0, 2.0, 9.0)


def test_what_was_found_and_lost_before_it_was_used_is_not_computed_again() -> None:
    one = sequence()
    one.admit(row=0, cached=2, now=1.0)
    one.preempt()
    one.admit(row=0, cached=0, now=2.0)
    served(one, 3, token=9)
    assert one.receipt(9.0).recomputed_tokens == 0
    one.preempt()
    one.admit(row=0, cached=1, now=3.0)
    served(one, 3, token=9)
    assert one.receipt(9.0).recomputed_tokens == 2


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([5], None),
        ([7], None),
        ([5, 7], ("stop", 7)),
        ([5, 5, 5, 5], ("length", None)),
        ([5, 5, 5, 7], ("stop", 7)),
    ],
)
def test_an_answer_ends_at_a_stop_token_after_the_minimum_or_at_its_length(
    answer: list[int], expected: tuple[str, int | None] | None
) -> None:
    one = sequence(stop_token_ids=frozenset({7}), min_tokens=1, emitted=tuple(answer))
    assert one.ending() == expected
