"""Matrices as integers: what they hold, and how far they are from the floats."""

import gguf
import numpy as np
import pytest
from tests.models.test_gguf import finite_blocks

from octavo.ops.api import INT4_OFFSETS, U8, Encoded, Form, Quantised
from octavo.ops.encodings import ENCODINGS, dequantize
from octavo.ops.integers import integers_of, quantise
from octavo.ops.stored import STORED_FORMS, pack_sixes


def kept(kind: str, raw: U8, rows: int, columns: int, form: Form | None = None) -> Quantised:
    form = form or STORED_FORMS[kind][0]
    return integers_of(Encoded(kind, columns, raw.reshape(rows, -1), form))


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


@pytest.mark.parametrize(("kind", "form"), [(k, f) for k, fs in STORED_FORMS.items() for f in fs])
def test_integers_of_a_file_are_the_floats_of_a_file(
    kind: str, form: Form, rng: np.random.Generator
) -> None:
    encoding = ENCODINGS[kind]
    raw = finite_blocks(kind, rng.integers(0, 256, (60, encoding.block_bytes), np.uint8))
    expected = dequantize(kind, raw).reshape(15, -1)
    matrix = kept(kind, raw, *expected.shape, form)
    if (kind, form) != ("Q4_K", INT4_OFFSETS):
        np.testing.assert_array_equal(matrix.dequantised(), expected)
        return
    # Both factors are rounded to float16; they may cancel, and huge ones overflow.
    assert matrix.offsets is not None
    usual = np.isfinite(matrix.scales) & np.isfinite(matrix.offsets)
    usual = np.repeat(usual, 32, axis=1)
    slack = np.repeat(15 * np.abs(matrix.scales.astype(np.float32)), 32, axis=1)
    slack += np.repeat(np.abs(matrix.offsets.astype(np.float32)), 32, axis=1)
    with np.errstate(invalid="ignore"):
        error = np.abs(matrix.dequantised() - expected)
    assert usual.mean() > 0.3
    assert (error[usual] <= slack[usual] * 2.0**-11 + 1e-6).all()


def test_six_bits_are_packed_and_unpacked(rng: np.random.Generator) -> None:
    integers = rng.integers(0, 64, (9, 3, 32), np.uint8)
    packed, ones = pack_sixes(integers).reshape(9, -1), np.ones((9, 6), np.int8)
    assert packed.shape == (9, 3 * 24)
    matrix = Quantised(6, 90, packed, np.ones((9, 3), np.float16), multiples=ones)
    np.testing.assert_array_equal(matrix.integers() + 32, integers.reshape(9, -1)[:, :90])


@pytest.mark.parametrize("kind", STORED_FORMS)
def test_integers_of_a_file_are_the_floats_of_the_gguf_package(
    kind: str, rng: np.random.Generator
) -> None:
    raw = rng.integers(0, 256, (60, ENCODINGS[kind].block_bytes), np.uint8)
    raw = finite_blocks(kind, raw)
    number = gguf.GGMLQuantizationType[kind]
    expected = gguf.quants.dequantize(raw, number).reshape(15, -1)
    for form in STORED_FORMS[kind]:
        if (kind, form) != ("Q4_K", INT4_OFFSETS):
            found = kept(kind, raw, *expected.shape, form).dequantised()
            np.testing.assert_array_equal(found, expected)


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
