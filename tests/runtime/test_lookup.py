"""Prompt lookup guesses what followed the last tokens before."""

from random import Random

import pytest

from octavo.runtime.lookup import PromptLookup


def test_it_guesses_what_followed() -> None:
    text = PromptLookup([1, 2, 3, 4, 5, 6, 9, 1, 2])
    assert text.guess(3) == (3, 4, 5)
    text.append(3)
    assert text.guess(9) == (4, 5, 6, 9, 1, 2, 3, 4, 5), "it may come again as a whole"
    text.append(7)
    assert text.guess(3) == (), "3, 7 was never seen"


def test_the_newest_of_the_longest_matches_counts() -> None:
    assert PromptLookup([1, 2, 5, 1, 2, 6, 1, 2]).guess(1) == (6,)
    assert PromptLookup([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2]).guess(1) == (5,)


def test_repetition_goes_on() -> None:
    assert PromptLookup([4, 4, 4]).guess(4) == (4, 4, 4, 4)
    assert PromptLookup([3, 8, 3, 8]).guess(5) == (3, 8, 3, 8, 3)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3]])
def test_short_texts_have_nothing_to_guess_from(tokens: list[int]) -> None:
    assert PromptLookup(tokens).guess(4) == ()


def test_guesses_do_not_depend_on_when_they_are_asked_for(seed: int) -> None:
    random = Random(seed)
    for _ in range(50):
        start = random.choices(range(4), k=random.randint(0, 9))
        asked = PromptLookup(start)
        for _ in range(30):
            if random.random() < 0.5:
                count = random.randint(1, 5)
                assert asked.guess(count) == PromptLookup(start).guess(count)
            token = random.randrange(4)
            asked.append(token)
            start = [*start, token]
