"""Lengths learned from answers, and the most that many sequences need at once."""

from random import Random

import pytest

from octavo.core.prediction import LEAST_KNOWN, WINDOW, AnswerLengths, Growing, growth


def learned(*lengths: int) -> AnswerLengths:
    known = AnswerLengths()
    for length in lengths:
        known.learn(length)
    return known


def test_nothing_is_predicted_from_too_few() -> None:
    assert learned(*[5] * (LEAST_KNOWN - 1)).predict(0, 99) == 99
    assert learned(*[5] * LEAST_KNOWN).predict(0, 99) == 5


def test_what_is_there_already_is_a_condition() -> None:
    """Of 40 answers half have 10 tokens, half 50: who has 10 will have 50."""
    known = learned(*[10] * 25, *[50] * 20)
    assert known.predict(0, 99) == 10
    assert known.predict(10, 99) == 50
    assert known.predict(10, 30) == 30, "no more than was asked for"
    assert known.predict(50, 99) == 99, "longer than all that are known"


def test_old_answers_are_forgotten(seed: int) -> None:
    random, known = Random(seed), AnswerLengths()
    lengths = [random.randint(1, 500) for _ in range(WINDOW + 300)]
    for length in lengths:
        known.learn(length)
    fresh = learned(*lengths[-WINDOW:])
    assert [known.predict(n, 512) for n in range(500)] == [
        fresh.predict(n, 512) for n in range(500)
    ]


def test_the_most_is_needed_just_before_one_ends() -> None:
    """Blocks of 10. The short one needs 2, the long one 5: together 4 when the short one ends, and
    then its 3 + 2 come back."""
    assert growth([Growing(3, 20), Growing(1, 50)], 10, 1) == 4
    assert growth([Growing(3, 20), Growing(1, 90)], 10, 1) == 9 - 3
    assert growth([Growing(3, 20), Growing(1, 50)], 10, 2) == 8
    assert growth([], 10, 1) == growth([Growing(5, 0)], 10, 1) == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_growth_is_what_a_walk_through_time_finds(groups: int, seed: int) -> None:
    random = Random(seed)
    for _ in range(200):
        members = [
            Growing(random.randint(0, 9), 4 * random.randint(0, 9))
            for _ in range(random.randint(1, 6))
        ]
        needs = [
            sum(groups * t / 4 for one in members if one.positions >= t)
            - sum(one.blocks for one in members if one.positions < t)
            for t in range(41)
        ]
        assert growth(members, 4, groups) == max(0, *(needs[4 * n] for n in range(10)))
