"""How many drafts are worth their price."""

import pytest

from octavo.core.acceptance import FIRST_RATE, MOST, PROBE, Acceptance


def test_a_draft_is_worth_it_while_it_is_likelier_right_than_its_price() -> None:
    one = Acceptance(rate=0.5)
    for price, worth in ((0.6, 0), (0.4, 1), (0.2, 2), (0.1, 3), (0.01, 6), (0.0, MOST)):
        assert one.worth(price) == worth
        if worth and worth < MOST:
            assert one.rate**worth >= price > one.rate ** (worth + 1)


def test_what_came_true_moves_the_rate() -> None:
    one = Acceptance()
    one.observe(4, 4)
    assert one.rate > FIRST_RATE
    high = one.rate
    one.observe(4, 0)
    assert one.rate < high
    assert (one.drafted, one.accepted) == (8, 4)
    before = one.rate
    one.observe(0, 0)
    assert one.rate == before, "nothing was guessed"
    for _ in range(200):
        one.observe(3, 3)
    assert one.rate == pytest.approx(1.0)
    assert one.worth(0.99) > 0


def test_a_wrong_guess_says_nothing_of_those_behind_it() -> None:
    """One of two tried was right, whatever was guessed beyond."""
    near, far = Acceptance(), Acceptance()
    near.observe(2, 1)
    far.observe(9, 1)
    assert near.rate == far.rate


def test_now_and_then_one_is_tried_again() -> None:
    one = Acceptance(rate=0.01)
    tried = [one.worth(0.5) for _ in range(3 * PROBE)]
    assert sum(tried) == 3
    assert max(tried) == 1
