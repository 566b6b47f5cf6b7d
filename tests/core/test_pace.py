"""Pace: the line through the steps."""

from random import Random

import pytest

from octavo.core.pace import Pace


def test_nothing_is_known_before_the_first_step() -> None:
    pace = Pace()
    assert not pace.known
    assert (pace.seconds(100), pace.token_s, pace.base_s) == (0.0, 0.0, 0.0)


def test_it_finds_the_line() -> None:
    random, pace = Random(3), Pace()
    for _ in range(300):
        tokens = random.randint(1, 512)
        pace.observe(tokens, 0.02 + 0.001 * tokens)
    assert pace.base_s == pytest.approx(0.02)
    assert pace.token_s == pytest.approx(0.001)
    assert pace.seconds(1000) == pytest.approx(1.02)


def test_steps_of_one_size_are_charged_to_their_tokens() -> None:
    pace = Pace()
    for _ in range(10):
        pace.observe(64, 0.128)
    assert pace.token_s == pytest.approx(0.002)
    assert pace.seconds(64) == pytest.approx(0.128)


def test_the_recent_steps_weigh_most() -> None:
    random, pace = Random(4), Pace()
    for token_s in (0.001, 0.004):
        for _ in range(500):
            tokens = random.randint(1, 512)
            pace.observe(tokens, token_s * tokens)
    assert pace.token_s == pytest.approx(0.004, rel=0.01)


def test_a_line_that_would_fall_or_start_below_zero_does_not() -> None:
    falling, steep = Pace(), Pace()
    for tokens in (1, 10, 100):
        falling.observe(tokens, 1.0 / tokens)
        steep.observe(tokens, float(tokens * tokens))
    assert falling.token_s == 0.0
    assert falling.base_s > 0.0
    assert steep.base_s == pytest.approx(0.0)


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    pace = Pace()
    pace.observe(10, 0.0)
    assert not pace.known
    assert pace.seconds(10) == 0.0
