"""DRY against its definition, token by token."""

from collections.abc import Sequence

import numpy as np
import pytest

from octavo.core.plan import Bind, Sampled
from octavo.core.request import Dry, Penalty, Request, Sampling
from octavo.ops.reference import ReferenceOps
from octavo.runtime.edits import Edits
from octavo.runtime.repeats import Repeats, suffix_lengths
from octavo.runtime.sampler import Draw, Sampler

WORDS = 5


def by_definition(dry: Dry, tokens: Sequence[int]) -> dict[int, float]:
    """What each token loses, as llama.cpp's sampler finds it, without any of its short cuts."""
    last = list(tokens) if dry.window is None else list(tokens[len(tokens) - dry.window :])
    if dry.window is not None and dry.window >= len(tokens):
        last = list(tokens)
    limit = len(last)
    for distance in range(len(last)):
        start = len(last) - 1 - distance
        matching = [
            len(breaker)
            for breaker in dry.breakers
            if len(breaker) <= distance + 1 and tuple(last[start : start + len(breaker)]) == breaker
        ]
        if matching:
            limit = distance + 1 - max(matching)
            break
    longest: dict[int, int] = {}
    for end in range(len(last) - 1):
        length = 0
        while length <= end and last[end - length] == last[len(last) - 1 - length]:
            length += 1
        length = min(length, limit)
        if length >= dry.allowed_length:
            token = last[end + 1]
            longest[token] = max(longest.get(token, 0), length)
    return {
        token: dry.multiplier * dry.base ** (length - dry.allowed_length)
        for token, length in longest.items()
        if (token,) not in dry.breakers
    }


def found(repeats: Repeats) -> dict[int, float]:
    bias = repeats.bias()
    if bias is None:
        return {}
    return {
        token: -value for token, value in zip(bias.ids.tolist(), bias.values.tolist(), strict=True)
    }


CASES = (
    Dry(multiplier=0.8),
    Dry(multiplier=2.0, base=1.0, allowed_length=1),
    Dry(multiplier=1.0, allowed_length=3, window=10),
    Dry(multiplier=1.0, window=1),
    Dry(multiplier=1.0, breakers=((0,),)),
    Dry(multiplier=1.0, breakers=((0, 1), (0, 1, 2), (3, 3))),
    Dry(multiplier=1.0, window=7, breakers=((4,), (2, 2), (2, 1))),
)


@pytest.mark.parametrize("dry", CASES, ids=str)
def test_a_token_loses_what_the_definition_says(rng: np.random.Generator, dry: Dry) -> None:
    told = 0
    for _ in range(20):
        prompt = rng.integers(WORDS, size=rng.integers(1, 40)).tolist()
        repeats = Repeats(dry, prompt)
        for token in rng.integers(WORDS, size=40).tolist():
            expected = by_definition(dry, prompt)
            assert found(repeats) == pytest.approx(expected)
            assert found(Repeats(dry, prompt)) == pytest.approx(expected)
            told += len(expected)
            repeats.append(token)
            prompt.append(token)
    assert told or dry.window == 1


def test_the_lengths_of_equal_ends(rng: np.random.Generator) -> None:
    for text in ([1], [1, 1, 1, 1], *(rng.integers(3, size=60).tolist() for _ in range(20))):
        lengths = suffix_lengths(text)
        for end in range(len(text) - 1):
            length = int(lengths[end])
            assert text[end + 1 - length : end + 1] == text[len(text) - length :]
            assert length == end + 1 or text[end - length] != text[-1 - length]
        assert lengths[-1] == 0


def test_one_token_over_and_over_is_followed_without_delay() -> None:
    repeats = Repeats(Dry(multiplier=1.0), [7] * 20_000)
    for _ in range(600):
        repeats.append(7)
    assert found(repeats) == {7: pytest.approx(1e30)}


def test_a_draw_leaves_the_repetition(rng: np.random.Generator) -> None:
    """1 2 3 4 … 1 2 3: after these 4 is likeliest, until it loses too much."""
    logits = np.zeros(20, np.float32)
    logits[4], logits[9] = 5.0, 3.0
    answered = (1, 2, 3, 4, 8, 1, 2, 3)
    for multiplier, expected in ((0.5, 4), (2.0, 9)):
        dry = Dry(multiplier=multiplier, base=2.0)
        request = Request(
            id="r", prompt=(5,), max_tokens=99, sampling=Sampling(dry=dry, penalty=Penalty())
        )
        draw = Draw(0, 9, request, Edits.of(Bind(0, request, answered)))
        (outcome,) = Sampler(ReferenceOps(), max_rows=1).sample(logits[None].copy(), [draw])
        assert isinstance(outcome, Sampled)
        assert outcome.token == expected
        exact = np.log(np.exp(logits.astype(np.float64)).sum())
        assert outcome.logprob == pytest.approx(float(logits[expected]) - exact, abs=1e-5)
