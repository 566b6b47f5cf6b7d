"""What is written to rows of logits, and the likeliest of them, against the formulas."""

import numpy as np
import pytest

from octavo.ops.api import F32, Entries, Penalties
from octavo.ops.native import NativeOps
from octavo.ops.reference import ReferenceOps


def entries_of(rng: np.random.Generator, rows: int, vocabulary: int) -> Entries:
    """A few rows, in any order, one of them with no token at all."""
    chosen = rng.permutation(rows)[: max(1, rows - 2)].astype(np.int32)
    counts = rng.integers(1, vocabulary, len(chosen))
    counts[0] = 0
    ids = [rng.permutation(vocabulary)[:count].astype(np.int32) for count in counts]
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return Entries(chosen, start, np.concatenate(ids))


def penalties_of(rng: np.random.Generator, entries: Entries) -> Penalties:
    rows = len(entries.rows)
    return Penalties(
        counts=rng.integers(0, 4, len(entries.ids)).astype(np.int32),
        repetition=rng.choice([0.5, 1.0, 1.3], rows).astype(np.float32),
        presence=rng.uniform(-2, 2, rows).astype(np.float32),
        frequency=rng.uniform(-2, 2, rows).astype(np.float32),
    )


def logits_of(rng: np.random.Generator, rows: int, vocabulary: int) -> F32:
    logits = (rng.standard_normal((rows, vocabulary)) * 3).astype(np.float32)
    logits[rng.random(logits.shape) < 0.05] = -np.inf
    logits[rng.random(logits.shape) < 0.05] = 0.0
    return logits


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 2), (3, 7), (8, 500)])
def test_a_penalty_is_its_formula(
    ops: NativeOps, rng: np.random.Generator, rows: int, vocabulary: int
) -> None:
    """As in transformers' RepetitionPenaltyLogitsProcessor, and OpenAI's text on the others."""
    logits, entries = logits_of(rng, rows, vocabulary), entries_of(rng, rows, vocabulary)
    penalties, before = penalties_of(rng, entries), np.empty(len(entries.ids), np.float32)
    expected, there = logits.astype(np.float64), []
    for index, row in enumerate(entries.rows):
        for place in range(entries.start[index], entries.start[index + 1]):
            token, count = entries.ids[place], penalties.counts[place]
            there.append(logits[row, token])
            value, repetition = expected[row, token], float(penalties.repetition[index])
            value = value / repetition if value > 0 else value * repetition
            value -= float(penalties.frequency[index]) * count
            expected[row, token] = value - float(penalties.presence[index]) * (count > 0)
    twin = logits.copy()
    ops.penalise(logits, entries, penalties, before)
    assert before.tolist() == there
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    ReferenceOps().penalise(twin, entries, penalties, np.empty_like(before))
    np.testing.assert_array_equal(logits, twin)


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 2), (3, 7), (8, 500)])
def test_a_bias_is_added(
    ops: NativeOps, rng: np.random.Generator, rows: int, vocabulary: int
) -> None:
    logits, entries = logits_of(rng, rows, vocabulary), entries_of(rng, rows, vocabulary)
    bias = rng.uniform(-100, 100, len(entries.ids)).astype(np.float32)
    expected, before = logits.copy(), np.empty_like(bias)
    row_of = np.repeat(entries.rows, np.diff(entries.start))
    there = logits[row_of, entries.ids]
    expected[row_of, entries.ids] += bias
    twin = logits.copy()
    ops.add_bias(logits, entries, bias, before)
    np.testing.assert_array_equal(logits, expected)
    np.testing.assert_array_equal(before, there)
    ReferenceOps().add_bias(twin, entries, bias, before)
    np.testing.assert_array_equal(twin, expected)


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 500, 49152])
def test_a_mask_leaves_what_it_allows(
    ops: NativeOps, rng: np.random.Generator, vocabulary: int
) -> None:
    logits, rows = logits_of(rng, 6, vocabulary), np.array([5, 0, 3], np.int32)
    words = -(-vocabulary // 32)
    allowed = rng.integers(0, 2**32, (3, words), np.uint32).view(np.int32)
    allowed[1, : words // 2] = 0
    allowed[2, words // 2 :] = -1
    expected = logits.copy()
    for row, bits in zip(rows, allowed.view(np.uint32).tolist(), strict=True):
        for token in range(vocabulary):
            if not bits[token // 32] >> token % 32 & 1:
                expected[row, token] = -np.inf
    twin = logits.copy()
    ops.mask(logits, rows, allowed)
    np.testing.assert_array_equal(logits, expected)
    ReferenceOps().mask(twin, rows, allowed)
    np.testing.assert_array_equal(twin, expected)


@pytest.mark.parametrize("vocabulary", [1, 3, 17, 4099, 49152])
def test_the_likeliest_come_in_order(
    ops: NativeOps, rng: np.random.Generator, vocabulary: int
) -> None:
    logits = logits_of(rng, 5, vocabulary)
    logits[1] = np.round(logits[1])  # many equal
    logits[2] = np.sort(logits[2])  # each greater than those before
    rows = np.array([4, 1, 2], np.int32)
    for wanted in {1, min(5, vocabulary), min(20, vocabulary), min(50, vocabulary)}:
        for each in (ops, ReferenceOps()):
            ids = np.empty((3, wanted), np.int32)
            values = np.empty((3, wanted), np.float32)
            each.likeliest(logits, rows, ids, values)
            for index, row in enumerate(rows):
                order = sorted(range(vocabulary), key=lambda token: (-logits[row, token], token))
                assert ids[index].tolist() == order[:wanted]
                assert values[index].tolist() == logits[row, order[:wanted]].tolist()


def test_a_row_does_not_depend_on_the_others_or_on_the_threads(
    ops: NativeOps, rng: np.random.Generator
) -> None:
    alone = NativeOps(threads=1, isa=ops.isa)
    logits, entries = logits_of(rng, 9, 3000), entries_of(rng, 9, 3000)
    penalties = penalties_of(rng, entries)
    together, singly = logits.copy(), logits.copy()
    ops.penalise(together, entries, penalties, np.empty(len(entries.ids), np.float32))
    for index, row in enumerate(entries.rows):
        part = slice(entries.start[index], entries.start[index + 1])
        one = Entries(
            np.zeros(1, np.int32),
            np.array([0, part.stop - part.start], np.int32),
            entries.ids[part].copy(),
        )
        own = Penalties(
            penalties.counts[part].copy(), *(each[index : index + 1] for each in penalties[1:])
        )
        alone.penalise(singly[row : row + 1], one, own, np.empty(len(one.ids), np.float32))
    np.testing.assert_array_equal(together, singly)


def test_what_does_not_fit_is_refused(ops: NativeOps) -> None:
    logits, before = np.zeros((2, 5), np.float32), np.zeros(3, np.float32)
    rows, start = np.array([1], np.int32), np.array([0, 3], np.int32)
    ids, bias = np.array([0, 2, 4], np.int32), np.zeros(3, np.float32)
    for wrong, named in (
        (Entries(rows + 1, start, ids), "rows"),
        (Entries(rows, start, ids + 1), "ids"),
        (Entries(rows, start - 1, ids), "start"),
        (Entries(rows, start[:1], ids), "start"),
        (Entries(rows, start, ids[:2].copy()), "before"),
    ):
        with pytest.raises(ValueError, match=named):
            ops.add_bias(logits, wrong, bias, before)
    entries = Entries(rows, start, ids)
    with pytest.raises(ValueError, match="bias"):
        ops.add_bias(logits, entries, bias[:1], before)
    good = Penalties(np.zeros(3, np.int32), *(np.ones(1, np.float32) for _ in range(3)))
    with pytest.raises(ValueError, match="counts"):
        ops.penalise(logits, entries, good._replace(counts=good.counts[:1]), before)
    with pytest.raises(ValueError, match="presence"):
        ops.penalise(logits, entries, good._replace(presence=np.ones(2, np.float32)), before)
    for wrong_rows, words in ((rows + 1, 1), (rows, 2), (np.array([0, 1], np.int32), 1)):
        with pytest.raises(ValueError, match="rows|allowed"):
            ops.mask(logits, wrong_rows, np.zeros((1, words), np.int32))
    with pytest.raises(ValueError, match="columns"):
        ops.likeliest(logits, rows, np.zeros((1, 6), np.int32), np.zeros((1, 6), np.float32))
    assert (logits == 0).all()
