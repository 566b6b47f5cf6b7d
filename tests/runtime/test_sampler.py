"""The sampler against its definitions: filters, the draw, and independence of the batch."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.core.plan import Bind, RowFailed, Sampled
from octavo.core.request import Penalty, Request, Sampling
from octavo.ops.reference import ReferenceOps
from octavo.runtime.edits import Edits
from octavo.runtime.sampler import Draw, Sampler, uniform

VOCABULARY = 50


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Written from the paper on its own, on 64-bit products, as a check of `uniform`."""
    for step in range(10):
        k0, k1 = (key[0] + step * 0x9E3779B9) % 2**32, (key[1] + step * 0xBB67AE85) % 2**32
        low, high = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (
            (high >> 32) ^ counter[1] ^ k0,
            high % 2**32,
            (low >> 32) ^ counter[3] ^ k1,
            low % 2**32,
        )
    return counter


def logits_of(rng: np.random.Generator, scale: float = 2.0) -> np.ndarray:
    return (rng.standard_normal(VOCABULARY) * scale).astype(np.float32)


def draws(logits: np.ndarray, count: int = 4000, **settings: float) -> np.ndarray:
    """How often each token is drawn over `count` positions."""
    one = request(seed=11, **{"temperature": 1.0, **settings})
    rows = np.tile(logits, (count, 1))
    asked = [Draw(0, position, one) for position in range(2, 2 + count)]
    outcomes = Sampler(ReferenceOps(), max_rows=count).sample(rows, asked)
    tokens = [outcome.token for outcome in outcomes if isinstance(outcome, Sampled)]
    assert len(tokens) == count
    return np.bincount(tokens, minlength=VOCABULARY)


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


def deviation(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's chi-square as a normal deviate: beyond 5 about once in three million.

    Source  Wilson & Hilferty 1931, the cube root of chi-square over its degrees of freedom.
    """
    total = counts.sum()
    often = expected * total >= 5
    assert counts[expected == 0].sum() == 0, "a token of no weight was drawn"
    difference = counts[often] - expected[often] * total
    freedom = max(int(often.sum()) - 1, 1)
    ratio = float((difference**2 / (expected[often] * total)).sum()) / freedom
    spread = 2 / (9 * freedom)
    return float((np.cbrt(ratio) - (1 - spread)) / np.sqrt(spread))


def test_the_generator_gives_the_published_words() -> None:
    # Known answers of Philox4x32-10 from the authors' test vectors: counter 0, key 0.
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert uniform([0], [0], [0]) == [(0x6627E8D5 << 21 | 0xE169C58D >> 11) / 2**53]


def test_uniform_depends_on_seed_branch_and_position_alone(rng: np.random.Generator) -> None:
    seeds = [int(seed) for seed in rng.integers(2**63, size=50)]
    branches, positions = list(range(50)), [int(at) for at in rng.integers(2**40, size=50)]
    expected = []
    for seed, branch, position in zip(seeds, branches, positions, strict=True):
        counter = (position % 2**32, position >> 32, branch, 0)
        words = philox(counter, (seed % 2**32, seed >> 32))
        expected.append((words[0] << 21 | words[1] >> 11) / 2**53)
    assert uniform(seeds, branches, positions).tolist() == expected
    assert [
        uniform([s], [b], [p])[0] for s, b, p in zip(seeds, branches, positions, strict=True)
    ] == expected
    assert len({*uniform([7] * 50, branches, [7] * 50)}) == 50


def test_plain_sampling_follows_the_softmax(rng: np.random.Generator) -> None:
    logits = logits_of(rng)
    for temperature in (0.5, 1.0, 3.0):
        counts = draws(logits, temperature=temperature)
        assert deviation(counts, softmax(logits, temperature)) < 5


def test_top_k_keeps_the_k_likeliest(rng: np.random.Generator) -> None:
    logits = logits_of(rng)
    kept = np.argsort(-logits)[:5]
    expected = np.zeros(VOCABULARY)
    expected[kept] = softmax(logits[kept])
    assert deviation(draws(logits, top_k=5), expected) < 5


def test_top_p_keeps_the_fewest_that_reach_the_share(rng: np.random.Generator) -> None:
    logits = logits_of(rng)
    order = np.argsort(-logits)
    reached = np.cumsum(softmax(logits)[order])
    kept = order[: int(np.searchsorted(reached, 0.8)) + 1]
    expected = np.zeros(VOCABULARY)
    expected[kept] = softmax(logits[kept])
    assert deviation(draws(logits, top_p=0.8), expected) < 5


def test_min_p_keeps_those_near_the_likeliest(rng: np.random.Generator) -> None:
    logits = logits_of(rng)
    probabilities = softmax(logits)
    kept = np.flatnonzero(probabilities >= 0.2 * probabilities.max())
    expected = np.zeros(VOCABULARY)
    expected[kept] = softmax(logits[kept])
    assert deviation(draws(logits, min_p=0.2), expected) < 5


def test_top_n_sigma_keeps_those_near_the_greatest_logit(rng: np.random.Generator) -> None:
    """The same ones at any temperature."""
    logits = logits_of(rng)
    kept = np.flatnonzero(logits >= logits.max() - 1.2 * logits.astype(np.float64).std())
    assert 1 < len(kept) < VOCABULARY
    for temperature in (0.5, 1.0, 4.0):
        expected = np.zeros(VOCABULARY)
        expected[kept] = softmax(logits[kept], temperature)
        counts = draws(logits, top_n_sigma=1.2, temperature=temperature)
        assert deviation(counts, expected) < 5


def test_typical_p_keeps_the_least_surprising(rng: np.random.Generator) -> None:
    """Those whose surprise is nearest to the mean, until they have more than that share."""
    logits = logits_of(rng)
    probabilities = softmax(logits)
    surprise = -np.log(probabilities)
    order = np.argsort(np.abs(surprise - (probabilities * surprise).sum()))
    kept = order[: int((np.cumsum(probabilities[order]) <= 0.4).sum()) + 1]
    expected = np.zeros(VOCABULARY)
    expected[kept] = softmax(logits[kept])
    assert deviation(draws(logits, typical_p=0.4), expected) < 5


def test_xtc_leaves_out_the_top_choices_with_its_probability() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05] + [0.0] * 45) + 1e-30).astype(np.float32)
    plain = softmax(logits)
    without = plain.copy()
    without[[0, 1]] = 0  # of those that have a tenth, 0.1 and 0.15 … the least stays
    without[2] = 0
    without /= without.sum()
    for probability in (0.0, 0.3, 1.0):
        counts = draws(logits, xtc_probability=probability, xtc_threshold=0.099)
        expected = (1 - probability) * plain + probability * without
        assert deviation(counts, expected) < 5
    one_above = draws(logits, xtc_probability=1.0, xtc_threshold=0.35)
    assert deviation(one_above, plain) < 5


def test_xtc_is_decided_apart_from_the_draw() -> None:
    seeds, branches, positions = list(range(4000)), [3] * 4000, [9] * 4000
    first, second = (uniform(seeds, branches, positions, stream=stream) for stream in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.08
    assert abs(second.mean() - 0.5) < 0.03


def test_top_p_after_top_k_sees_what_top_k_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1] + [1e-30] * 46)).astype(np.float32)
    # Of the two kept by top_k the first has 4/7, so that a share of 0.5 needs no second.
    assert draws(logits, 200, top_k=2, top_p=0.5)[0] == 200
    assert draws(logits, 200, top_p=0.5)[1] > 0


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}],
    ids=lambda settings: next(iter(settings)),
)
def test_every_way_to_ask_for_the_best_gives_the_lowest_of_the_best(
    settings: dict[str, float],
) -> None:
    logits = np.zeros(VOCABULARY, np.float32)
    logits[[17, 23, 40]] = 3.5
    counts = draws(logits, 50, **settings)
    assert counts[17] == 50


def sampled(logits: np.ndarray, requests: list[Request]) -> tuple[Sampled | RowFailed, ...]:
    rows = [Draw(row, len(r.prompt), r) for row, r in enumerate(requests)]
    return Sampler(ReferenceOps(), max_rows=8).sample(logits, rows)


def request(**sampling: float) -> Request:
    return Request(id="r", prompt=(1, 2), max_tokens=9, sampling=Sampling(**sampling))  # type: ignore[arg-type]


def test_a_row_does_not_depend_on_its_neighbours(rng: np.random.Generator) -> None:
    logits = np.stack([logits_of(rng) for _ in range(4)])
    requests = [
        request(temperature=0.9, seed=5, top_p=0.9),
        request(),
        request(temperature=1.3, seed=6, top_k=7),
        request(temperature=1.0, seed=7),
    ]
    together = sampled(logits.copy(), requests)
    alone = [sampled(logits[[i]].copy(), [requests[i]])[0] for i in range(4)]
    backwards = sampled(logits[::-1].copy(), requests[::-1])[::-1]
    for i in range(4):
        for other in (alone[i], backwards[i]):
            assert isinstance(other, Sampled)
            assert isinstance(together[i], Sampled)
            assert (other.token, other.logprob) == (together[i].token, together[i].logprob)


def test_the_logprob_is_that_of_the_unfiltered_softmax(rng: np.random.Generator) -> None:
    logits = logits_of(rng)
    for one in (request(), request(temperature=2.0, seed=4, top_k=3)):
        (outcome,) = sampled(logits[None].copy(), [one])
        assert isinstance(outcome, Sampled)
        assert outcome.logprob == pytest.approx(np.log(softmax(logits)[outcome.token]), abs=1e-4)


def test_B069_no_end_token_is_drawn_before_min_tokens(rng: np.random.Generator) -> None:
    logits = logits_of(rng)
    best, second, third = (int(token) for token in np.argsort(-logits)[:3])
    ends = frozenset({best, second})
    asked = Request(id="r", prompt=(1, 2), max_tokens=9, min_tokens=2, stop_token_ids=ends)
    sampler = Sampler(ReferenceOps(), max_rows=8)
    tokens = []
    for position in (2, 3, 4):
        (outcome,) = sampler.sample(logits[None].copy(), [Draw(0, position, asked)])
        assert isinstance(outcome, Sampled)
        tokens.append(outcome.token)
    assert tokens == [third, third, best]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_fails_alone(rng: np.random.Generator, bad: float) -> None:
    logits = np.stack([logits_of(rng), logits_of(rng)])
    logits[0, 13] = bad
    outcomes = sampled(logits, [request(temperature=1.0), request()])
    assert isinstance(outcomes[0], RowFailed)
    assert isinstance(outcomes[1], Sampled)


def test_a_temperature_too_small_for_float32_takes_the_likeliest(rng: np.random.Generator) -> None:
    for temperature in (1e-30, 1e-40, 1e-50, 5e-324):
        logits = logits_of(rng)
        asked = [request(temperature=temperature, seed=seed) for seed in range(8)]
        for outcome in sampled(np.tile(logits, (8, 1)), asked):
            assert isinstance(outcome, Sampled)
            assert outcome.token == np.argmax(logits)


def test_a_row_of_which_nothing_may_be_drawn_fails_alone(rng: np.random.Generator) -> None:
    logits = np.stack([logits_of(rng) for _ in range(3)])
    logits[1, 4:] = -np.inf
    asked = [request(temperature=1.0, seed=seed) for seed in (1, 13, 2)]
    good = sampled(logits.copy(), asked)
    ends = frozenset({0, 1, 2, 3})
    asked[1] = replace(asked[1], min_tokens=1, stop_token_ids=ends)
    outcomes = sampled(logits, asked)
    assert outcomes[1] == RowFailed(1, "every token that may be drawn is masked")
    assert (outcomes[0], outcomes[2]) == (good[0], good[2])


def test_the_likeliest_tokens_are_those_of_the_model(rng: np.random.Generator) -> None:
    """Whatever sampling does, in the numbers that each row asks for, and only there."""
    logits = np.stack([logits_of(rng) for _ in range(5)])
    logits[4] = 0.0
    asked = [
        replace(request(temperature=3.0, seed=1), top_logprobs=4),
        request(),
        replace(request(penalty=Penalty(repetition=50.0)), top_logprobs=1),
        replace(request(logit_bias=((7, 99.0),)), top_logprobs=20),
        replace(request(), top_logprobs=3),
    ]
    draws = [Draw(row, 2, one, Edits.of(Bind(row, one))) for row, one in enumerate(asked)]
    outcomes = Sampler(ReferenceOps(), max_rows=5).sample(logits.copy(), draws)
    for row, (one, outcome) in enumerate(zip(asked, outcomes, strict=True)):
        assert isinstance(outcome, Sampled)
        logprobs = np.log(softmax(logits[row]))
        order = np.argsort(-logits[row], kind="stable")[: one.top_logprobs].tolist()
        assert [token for token, _ in outcome.top] == order
        assert [value for _, value in outcome.top] == pytest.approx(logprobs[order], abs=1e-4)
        assert dict(outcome.top).get(outcome.token, outcome.logprob) == outcome.logprob
        alone = Sampler(ReferenceOps(), max_rows=1).sample(logits[[row]].copy(), [draws[row]])
        assert alone == (outcome,)
    assert outcomes[3].token == 7  # type: ignore[union-attr]
