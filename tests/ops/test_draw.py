"""Drawing in every instruction set, against the formula in float64 and against itself."""

from collections.abc import Iterator

import numpy as np
import pytest

from octavo.ops.api import F32, F64, I32, Draws
from octavo.ops.native import NativeOps
from octavo.ops.reference import ReferenceOps


def how(count: int, **settings: object) -> Draws:
    fields: dict[str, object] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "point": 0.5,
        "top_n_sigma": 0.0,
        "typical_p": 1.0,
        "xtc_threshold": 1.0,
        **settings,
    }
    doubles = dict.fromkeys(("top_p", "point", "typical_p", "xtc_threshold"), np.float64)
    kinds = {"top_k": np.int32, **doubles}
    return Draws(
        **{
            name: np.ascontiguousarray(np.broadcast_to(value, count), kinds.get(name, np.float32))
            for name, value in fields.items()
        }
    )


def drawn(ops: NativeOps | ReferenceOps, logits: F32, draws: Draws) -> I32:
    out = np.full(len(draws.point), -7, np.int32)
    ops.draw(logits, np.arange(len(out), dtype=np.int32), draws, out)
    return out


SETTINGS = (
    {},
    {"temperature": 0.3},
    {"temperature": 30.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.9999999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 20.0, "top_k": 9000, "top_p": 0.8},
)
"""Of those that `off_by` knows."""


def cases(rng: np.random.Generator, vocabulary: int) -> Iterator[tuple[F32, Draws]]:
    for settings in SETTINGS:
        logits = (rng.standard_normal((16, vocabulary)) * rng.uniform(0.5, 4)).astype(np.float32)
        logits[1] = np.round(logits[1])  # many equal
        logits[2, rng.random(vocabulary) < 0.9] = -np.inf
        logits[2, rng.integers(vocabulary)] = 3
        logits[3, -1] = 60  # certain
        logits[4] += 5000
        points = rng.random(16)
        points[:2] = 0.0, 1 - 2.0**-53
        yield logits, how(16, **{**settings, "point": points})


def off_by(logits: F32, draws: Draws, row: int, token: int) -> float:
    """How far the point lies outside the share of `token` among those kept, in float64.

    By rounding a few more may be kept that weigh next to nothing, and of those that weigh as much
    as the least of those kept others than in float64.
    """
    temperature, top_k, top_p, min_p, point, *_ = (float(values[row]) for values in draws)
    weights = np.exp((logits[row].astype(np.float64) - logits[row].max()) / temperature)
    order = np.argsort(-weights, kind="stable")
    order = order[weights[order] > 0]
    count = min(int(top_k) or len(order), len(order))
    if top_p < 1:
        before = np.cumsum(weights[order[:count]]) - weights[order[:count]]
        share = top_p * weights[order[:count]].sum()
        count = max(1, np.count_nonzero(before < share))
    count = np.count_nonzero(weights[order[:count]] >= min_p)
    kept, least = np.sort(order[:count]), weights[order[count - 1]]
    total = weights[kept].sum()
    beyond = np.cumsum(weights[order[count:]]) - weights[order[count:]] <= 1e-5 * total
    equal = np.abs(weights - least) <= 1e-5 * least
    doubtful = {*order[count:][beyond].tolist(), *np.flatnonzero(equal).tolist()}
    assert token in kept or token in doubtful, f"{token} is not kept"
    shares = np.cumsum(np.where(np.isin(np.arange(len(weights)), kept), weights, 0)) / total
    low = shares[token - 1] if token else 0.0
    slack = weights[list(doubtful)].sum() / total if len(doubtful) > 1 else 0.0
    return float(max(low - point, point - shares[token], 0.0) - slack)


@pytest.mark.parametrize("vocabulary", [1, 7, 4096, 4099, 49152])
def test_what_is_drawn_is_what_the_formula_draws(
    ops: NativeOps, rng: np.random.Generator, vocabulary: int
) -> None:
    for logits, draws in cases(rng, vocabulary):
        for row, token in enumerate(drawn(ops, logits, draws)):
            assert off_by(logits, draws, row, int(token)) <= 2e-5, (draws, row)


@pytest.mark.parametrize("vocabulary", [50, 4099])
def test_the_formula_in_float64_is_met(rng: np.random.Generator, vocabulary: int) -> None:
    for logits, draws in cases(rng, vocabulary):
        for row, token in enumerate(drawn(ReferenceOps(), logits, draws)):
            assert off_by(logits, draws, row, int(token)) <= 1e-9, (draws, row)


def test_each_is_drawn_as_often_as_it_weighs(ops: NativeOps, rng: np.random.Generator) -> None:
    """Points spread evenly: each token of those kept has as many as its share, give or take one."""
    logits = (rng.standard_normal(50) * 2).astype(np.float32)
    points = (np.arange(4000) + 0.5) / 4000
    rows = np.tile(logits, (4000, 1))
    weights = np.exp((logits.astype(np.float64) - logits.max()) / 1.3)
    order = np.argsort(-weights)
    reached = np.cumsum(weights[order]) / weights.sum()
    kept = {
        "plain": order,
        "top_k": order[:5],
        "top_p": order[: int(np.searchsorted(reached, 0.8)) + 1],
        "min_p": np.flatnonzero(weights >= 0.2),
    }
    asked = {"plain": {}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.2}}
    for name, ids in kept.items():
        expected = np.zeros(50)
        expected[ids] = weights[ids] / weights[ids].sum() * 4000
        draws = how(4000, temperature=1.3, point=points, **asked[name])
        counts = np.bincount(drawn(ops, rows, draws), minlength=50)
        assert (np.abs(counts - expected) <= 1.01).all(), name


def kept_by(logits: F32, draws: Draws, row: int) -> tuple[F64, I32]:
    """The weights and, by id, the tokens that the filters of llama.cpp keep, one after the other
    and token by token, in float64."""
    one = Draws(*(values[row].item() for values in draws))
    finite = [float(logit) for logit in logits[row] if np.isfinite(logit)]
    high, mean = max(finite), sum(finite) / len(finite)
    deviation = (sum((logit - mean) ** 2 for logit in finite) / len(finite)) ** 0.5
    weights = np.exp((logits[row].astype(np.float64) - high) / one.temperature)
    least = high - one.top_n_sigma * deviation if one.top_n_sigma > 0 else -np.inf
    kept = [token for token in np.argsort(-weights, kind="stable") if weights[token] > 0]
    kept = [token for token in kept if logits[row, token] >= least]
    kept = kept[: one.top_k or None]
    if one.typical_p < 1:
        total = weights[kept].sum()
        shares = {token: weights[token] / total for token in kept}
        entropy = -sum(share * np.log(share) for share in shares.values())
        nearest = sorted(kept, key=lambda token: abs(-np.log(shares[token]) - entropy))
        reached, count = 0.0, 0
        while count < len(nearest) and (count == 0 or reached <= one.typical_p):
            reached, count = reached + shares[nearest[count]], count + 1
        near = set(nearest[:count])
        kept = [token for token in kept if token in near]
    if one.top_p < 1:
        reached, count, share = 0.0, 0, one.top_p * weights[kept].sum()
        while count < len(kept) and (count == 0 or reached < share):
            reached, count = reached + weights[kept[count]], count + 1
        kept = kept[:count]
    kept = [token for token in kept if weights[token] >= one.min_p * weights[kept[0]]]
    if one.xtc_threshold <= 0.5:
        total = weights[kept].sum()
        above = sum(weights[token] >= one.xtc_threshold * total for token in kept)
        kept = kept[max(0, above - 1) :]
    return weights, np.sort(np.array(kept, np.int32))


FILTERS = (
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.3, "temperature": 3.0},
    {"top_n_sigma": 1e-6},
    {"typical_p": 0.2},
    {"typical_p": 0.9, "temperature": 2.0},
    {"typical_p": 1e-9},
    {"typical_p": 0.6, "top_k": 30, "top_p": 0.9},
    {"xtc_threshold": 0.05},
    {"xtc_threshold": 0.5},
    {"xtc_threshold": 1e-4, "min_p": 0.1},
    {"xtc_threshold": 0.02, "typical_p": 0.8, "top_n_sigma": 2.1, "top_k": 40},
)


@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 2, 50, 4099])
def test_the_filters_of_llama_cpp(
    ops: NativeOps, rng: np.random.Generator, vocabulary: int, settings: dict[str, object]
) -> None:
    """Both backends keep what the definitions keep; where rounding decides, one more or less."""
    for _ in range(3):
        logits = (rng.standard_normal((6, vocabulary)) * rng.uniform(0.5, 3)).astype(np.float32)
        logits[2, rng.random(vocabulary) < 0.5] = -np.inf
        logits[2, rng.integers(vocabulary)] = 3
        draws = how(6, **{**settings, "point": rng.random(6)})
        native, plain = drawn(ops, logits, draws), drawn(ReferenceOps(), logits, draws)
        for row in range(6):
            weights, kept = kept_by(logits, draws, row)
            shares = np.cumsum(weights[kept]) / weights[kept].sum()
            expected = int(kept[np.searchsorted(shares, draws.point[row], side="right")])
            slack = 1e-5 if vocabulary <= 50 else 2e-3
            for token in (native[row], plain[row]):
                if token == expected:
                    continue
                place = int(np.searchsorted(kept, token))
                before = shares[place - 1] if place else 0.0
                after = shares[min(place, len(kept) - 1)]
                assert before - slack <= draws.point[row] <= after + slack, (row, token, expected)


def test_the_filters_of_llama_cpp_keep_what_weighs_as_it_weighs(
    ops: NativeOps, rng: np.random.Generator
) -> None:
    logits = (rng.standard_normal(50) * 2).astype(np.float32)
    points = (np.arange(4000) + 0.5) / 4000
    rows = np.tile(logits, (4000, 1))
    for settings in FILTERS:
        draws = how(4000, point=points, **settings)
        weights, kept = kept_by(rows, draws, 0)
        expected = np.zeros(50)
        expected[kept] = weights[kept] / weights[kept].sum() * 4000
        counts = np.bincount(drawn(ops, rows, draws), minlength=50)
        assert (np.abs(counts - expected) <= 1.01).all(), settings


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0, "top_k": 1}])
def test_the_lowest_of_the_best_is_kept(ops: NativeOps, settings: dict[str, object]) -> None:
    logits = np.zeros((9, 5000), np.float32)
    logits[:, [1700, 2300, 4000]] = 3.5
    draws = how(9, point=np.linspace(0, 0.99, 9), **settings)
    assert (drawn(ops, logits, draws) == 1700).all()


def test_a_temperature_as_small_as_can_be_takes_the_best(ops: NativeOps) -> None:
    logits = np.linspace(-3, 3, 5000, dtype=np.float32)[None]
    draws = how(1, temperature=np.finfo(np.float32).tiny, point=0.999)
    assert drawn(ops, logits, draws) == [4999]


def test_a_row_of_which_nothing_is_finite_gives_none(
    ops: NativeOps, rng: np.random.Generator
) -> None:
    logits = rng.standard_normal((3, 5000), np.float32)
    logits[1] = -np.inf
    for settings in ({}, {"top_k": 3}, {"min_p": 0.1}):
        tokens = drawn(ops, logits, how(3, **settings))
        assert tokens[1] == -1
        assert (tokens[[0, 2]] >= 0).all()


def test_a_row_does_not_depend_on_the_others_or_on_the_threads(
    ops: NativeOps, rng: np.random.Generator
) -> None:
    alone = NativeOps(threads=1, isa=ops.isa)
    all_on = how(16, top_n_sigma=2.0, typical_p=0.9, xtc_threshold=0.01, point=rng.random(16))
    rows = rng.standard_normal((16, 9000), np.float32)
    for logits, draws in (*cases(rng, 9000), (rows, all_on)):
        together = drawn(ops, logits, draws)
        order = rng.permutation(16)
        shuffled = np.empty(16, np.int32)
        ops.draw(
            logits,
            order.astype(np.int32),
            Draws(*(np.ascontiguousarray(values[order]) for values in draws)),
            shuffled,
        )
        assert (shuffled == together[order]).all()
        for row in range(16):
            one = Draws(*(values[row : row + 1].copy() for values in draws))
            assert drawn(alone, logits[row : row + 1], one) == [together[row]]


def test_what_does_not_fit_is_refused(ops: NativeOps) -> None:
    logits, out = np.zeros((2, 5), np.float32), np.zeros(2, np.int32)
    rows = np.arange(2, dtype=np.int32)
    with pytest.raises(ValueError, match="rows"):
        ops.draw(logits, rows + 1, how(2), out)
    with pytest.raises(ValueError, match="top_k"):
        ops.draw(logits, rows, how(2)._replace(top_k=np.zeros(1, np.int32)), out)
    with pytest.raises(TypeError, match="top_p"):
        ops.draw(logits, rows, how(2)._replace(top_p=np.ones(2, np.float32)), out)  # type: ignore[arg-type]
