"""`rms_norm` and `take_rows` against float64, and a row against itself in other company."""

import numpy as np
import pytest
from tests.ops.arrays import guarded, margin_is_kept, random_norm

from octavo.ops.native import NativeOps
from octavo.ops.reference import ReferenceOps


@pytest.mark.parametrize("width", [1, 3, 64, 65, 576, 1027])
def test_norm_agrees_with_float64(rng: np.random.Generator, ops: NativeOps, width: int) -> None:
    x = (rng.standard_normal((23, width)) * rng.uniform(1e-3, 1e3, (23, 1))).astype(np.float32)
    norm = random_norm(rng, width)
    out, around = guarded(23, width)
    ops.rms_norm(x, norm, out)
    expected, _ = guarded(23, width)
    ReferenceOps().rms_norm(x, norm, expected)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert margin_is_kept(around)
    again, _ = guarded(23, width)
    ops.rms_norm(x, norm, again)
    assert (out == again).all()


def test_a_normed_row_has_the_same_bits_in_any_company(
    rng: np.random.Generator, ops: NativeOps
) -> None:
    x, norm = rng.standard_normal((40, 577), np.float32), random_norm(rng, 577)
    together, _ = guarded(40, 577)
    ops.rms_norm(x, norm, together)
    for row in range(40):
        alone, _ = guarded(1, 577)
        ops.rms_norm(x[row : row + 1], norm, alone)
        assert (alone[0] == together[row]).all()


def test_norm_in_place(rng: np.random.Generator, ops: NativeOps) -> None:
    x, norm = rng.standard_normal((5, 100), np.float32), random_norm(rng, 100)
    out, _ = guarded(5, 100)
    ops.rms_norm(x, norm, out)
    ops.rms_norm(x, norm, x)
    assert (x == out).all()


def test_take_rows(rng: np.random.Generator, ops: NativeOps) -> None:
    x = rng.standard_normal((20, 37), np.float32)
    rows = rng.integers(0, 20, 11).astype(np.int32)
    out, around = guarded(11, 37)
    ops.take_rows(x, rows, out)
    assert (out == x[rows]).all()
    assert margin_is_kept(around)
    with pytest.raises(ValueError, match=r"rows\[0\] must be in \[0, 20\), it is 20"):
        ops.take_rows(x, np.array([20], np.int32), out[:1])
