"""How many drafts are worth their price."""

import pytest

from octavo.core.acceptance import FIRST_RATE, LEAST_GAIN, MOST, SHARE, Acceptance, Experience


def tokens_a_time(rate: float, price: float, drafts: int) -> float:
    """What so many drafts bring for what they cost."""
    return sum(rate**j for j in range(drafts + 1)) / (1 + price * drafts)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8, 0.99, 1.0])
@pytest.mark.parametrize("price", [0.01, 0.1, 0.3, 0.49])
def test_as_many_are_tried_as_bring_most_tokens(rate: float, price: float) -> None:
    tried = Acceptance(rate=rate).worth(price)
    best = max(tokens_a_time(rate, price, drafts) for drafts in range(MOST + 1))
    gained = tokens_a_time(rate, price, tried)
    assert gained == pytest.approx(best if best >= LEAST_GAIN else 1.0)


def test_free_ones_are_all_tried_and_dear_ones_none() -> None:
    assert Acceptance(rate=0.5).worth(0.0) > 32
    assert Acceptance(rate=0.5).worth(0.6) == 0
    assert Acceptance(rate=0.5).worth(0.45) == 0, "it would gain a twentieth at most"
    assert Acceptance(rate=1.0).worth(1.1) == 0


def test_what_came_true_moves_the_rate() -> None:
    one = Acceptance(rate=FIRST_RATE)
    one.observe(4, 4, 10)
    assert one.rate is not None
    assert one.rate > FIRST_RATE
    high = one.rate
    one.observe(4, 0, 11)
    assert one.rate < high
    assert (one.drafted, one.accepted, one.reached) == (8, 4, 11)
    before = one.rate
    one.observe(0, 0, 12)
    assert (one.rate, one.reached) == (before, 11), "nothing was guessed"
    for _ in range(200):
        one.observe(3, 3, 20)
    assert one.rate == pytest.approx(1.0)
    assert one.worth(0.9) > 0


def test_a_wrong_guess_says_nothing_of_those_behind_it() -> None:
    """One of two tried was right, whatever was guessed beyond."""
    near, far = Acceptance(rate=0.6), Acceptance(rate=0.6)
    near.observe(2, 1, 5)
    far.observe(9, 1, 5)
    assert near.rate == far.rate


@pytest.mark.parametrize("price", [0.1, 0.5, 2.0])
def test_tries_that_bring_nothing_take_their_share_of_time_and_no_more(price: float) -> None:
    one, tried = Acceptance(rate=0.01), 0
    for _ in range(5_000):
        if count := one.worth(price):
            assert count == 1
            tried += 1
            one.observe(1, 0, 0)
    assert 0.8 * SHARE <= price * tried / 5_000 <= SHARE


def test_a_debt_is_paid_before_it_is_made() -> None:
    """A draft that is always right, for half the price of a token, saves a share of each; when they
    have saved as much as it costs to begin, drafts begin, and go on."""
    one = Acceptance(rate=1.0)
    waited = 0
    while not one.worth(0.5, debt=20.0):
        waited += 1
    assert 20 <= waited <= 45
    assert one.worth(0.5, debt=20.0), "it may take several steps to begin"
    one.observe(3, 3, 10)
    assert one.worth(0.5, debt=0.1)


def test_a_new_one_begins_as_those_before_it_went() -> None:
    experience = Experience()
    for _ in range(500):
        experience.observe(4, 0)
    one = Acceptance()
    one.begin(experience.rate)
    assert one.rate is not None
    assert one.rate < 0.01
    one.begin(0.9)
    assert one.rate < 0.01, "it has one of its own"
