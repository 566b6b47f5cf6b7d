"""Matrices as integers: what they hold, and how far they are from the floats."""

import gguf
import numpy as np
import pytest
from tests.models.test_gguf import finite_blocks

from octavo.ops.api import U8, Encoded, Quantised
from octavo.ops.encodings import ENCODINGS, STORED_FORMS, dequantize
from octavo.ops.integers import integers_of, quantise, widened


def kept(kind: str, raw: U8, rows: int, columns: int) -> Quantised:
    return integers_of(Encoded(kind, columns, raw.reshape(rows, -1), STORED_FORMS[kind]))


@pytest.mark.parametrize("columns", [32, 70, 256])
@pytest.mark.parametrize("size", [1e-5, 0.02, 3.0, 5e4])
def test_eight_bits_are_half_a_scale_from_the_floats(
    rng: np.random.Generator, columns: int, size: float
) -> None:
    rows = rng.standard_normal((50, columns), np.float32) * np.float32(size)
    rows[7] = 0
    matrix = quantise(rows, 8)
    error = np.abs(matrix.dequantised(np.float64) - rows)
    scales = np.repeat(matrix.scales.astype(np.float64), 32, axis=1)[:, :columns]
    assert (error <= scales * 0.5001).all()
    if size > 0.01:
        assert error.max() <= np.abs(rows).max() / 127 * 0.51


@pytest.mark.parametrize("columns", [32, 70, 256])
def test_four_bits_meet_the_largest_weight(rng: np.random.Generator, columns: int) -> None:
    rows = rng.standard_normal((50, columns), np.float32)
    rows[7] = 0
    matrix = quantise(rows, 4)
    values = matrix.dequantised(np.float64)
    scales = np.repeat(matrix.scales.astype(np.float64), 32, axis=1)[:, :columns]
    assert (np.abs(values - rows) <= np.abs(scales) * 1.001).all()
    assert (np.abs(values - rows) <= np.abs(scales) * 0.501).mean() > 0.98
    for group in range(columns // 32):
        part = np.s_[:, 32 * group : 32 * group + 32]
        largest = np.abs(rows[part]).argmax(axis=1)[:, None]
        found = np.take_along_axis(values[part], largest, axis=1)
        np.testing.assert_allclose(found, np.take_along_axis(rows[part], largest, 1), rtol=1e-3)


@pytest.mark.parametrize("kind", STORED_FORMS)
def test_integers_of_a_file_are_the_floats_of_a_file(kind: str, rng: np.random.Generator) -> None:
    encoding = ENCODINGS[kind]
    raw = finite_blocks(kind, rng.integers(0, 256, (60, encoding.block_bytes), np.uint8))
    expected = dequantize(kind, raw).reshape(15, -1)
    matrix = kept(kind, raw, *expected.shape)
    if kind != "Q4_K":
        np.testing.assert_array_equal(matrix.dequantised(), expected)
        return
    # Both factors are rounded to float16; they may cancel, and huge ones overflow.
    usual = np.isfinite(matrix.scales) & np.isfinite(matrix.offsets)
    usual = np.repeat(usual, 32, axis=1)
    slack = np.repeat(15 * np.abs(matrix.scales.astype(np.float32)), 32, axis=1)
    slack += np.repeat(np.abs(matrix.offsets.astype(np.float32)), 32, axis=1)
    with np.errstate(invalid="ignore"):
        error = np.abs(matrix.dequantised() - expected)
    assert usual.mean() > 0.3
    assert (error[usual] <= slack[usual] * 2.0**-11 + 1e-6).all()


def test_four_bits_fit_into_eight(rng: np.random.Generator) -> None:
    matrix = quantise(rng.standard_normal((9, 70), np.float32), 4)
    np.testing.assert_array_equal(widened(matrix).dequantised(), matrix.dequantised())


def test_what_gguf_writes_is_what_runs(rng: np.random.Generator) -> None:
    """Weights quantised by the gguf package are not quantised again."""
    floats = rng.standard_normal((16, 64), np.float32)
    for kind in ("Q8_0", "Q4_0", "Q4_1"):
        number = gguf.GGMLQuantizationType[kind]
        raw = gguf.quants.quantize(floats, number)
        matrix = kept(kind, raw, 16, 64)
        np.testing.assert_array_equal(
            matrix.dequantised(), gguf.quants.dequantize(raw, number).reshape(16, 64)
        )
