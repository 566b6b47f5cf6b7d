"""Packing matrices as checkpoints encode them: the bits are those of the numpy formulas.

The code is the same for every instruction set, so that one will do.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.models.test_gguf import finite_blocks

from octavo.ops.api import (
    BF16,
    F32,
    INT4,
    INT4_OFFSETS,
    INT6,
    INT6_OFFSETS,
    INT8,
    Encoded,
    Form,
    NotFinite,
    Ops,
    Packed,
)
from octavo.ops.encodings import ENCODINGS, dequantize, rounded
from octavo.ops.integers import integers_of
from octavo.ops.native import NativeOps
from octavo.ops.reference import ReferenceOps
from octavo.ops.stored import STORED_FORMS

DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

LARGEST = np.uint32(0x7F7F7FFF)
"""The bits of the largest float32 that rounds to a finite bfloat16."""


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(threads=request.param)


def random_matrix(rng: np.random.Generator, kind: str, rows: int, columns: int) -> Encoded:
    """Any bytes at all, but no scale that is infinite or NaN."""
    encoding = ENCODINGS[kind]
    blocks = rows * columns // encoding.block
    raw = rng.integers(0, 256, (blocks, encoding.block_bytes), np.uint8)
    return Encoded(kind, columns, finite_blocks(kind, raw).reshape(rows, -1))


def widths(kind: str) -> tuple[int, ...]:
    """Columns below, at and beyond what is read at a time; odd ones where blocks allow it."""
    block = ENCODINGS[kind].block
    return {1: (1, 7, 256, 517), 32: (32, 256, 544)}.get(block, (256, 768))


def assert_bits(packed: Packed, expected: BF16, ops: Ops) -> None:
    np.testing.assert_array_equal(ops.unpack(packed).view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("kind", ENCODINGS)
def test_packing_rounds_as_the_formula(kind: str, rng: np.random.Generator, ops: NativeOps) -> None:
    for columns in widths(kind):
        matrix = random_matrix(rng, kind, 37, columns)
        assert_bits(ops.pack(matrix), rounded(matrix), ops)


def test_matrices_of_different_kinds_are_stacked(rng: np.random.Generator, ops: NativeOps) -> None:
    parts = [random_matrix(rng, kind, 21, 256) for kind in ("Q4_1", "BF16", "Q6_K", "F32")]
    plain = rng.standard_normal((5, 256), np.float32).astype(ml_dtypes.bfloat16)
    expected = np.concatenate([plain, *map(rounded, parts)])
    assert_bits(ops.pack([plain, *parts]), expected, ops)
    assert_bits(ops.pack_gated(*parts[:2]), np.concatenate([*map(rounded, parts[:2])]), ops)


FORMS = [
    (kind, form)
    for kind in ENCODINGS
    for form in (INT8, INT6, INT6_OFFSETS, INT4, INT4_OFFSETS)
    if form in (INT8, INT4, *STORED_FORMS.get(kind, ()))
]


def usual_floats(rng: np.random.Generator, columns: int) -> F32:
    """Weights of many sizes, none too large for float16; groups of zeros; equal extremes."""
    sizes = np.exp2(rng.integers(-30, 12, (37, columns // 32 + 1), np.int64).astype(np.float32))
    floats = rng.standard_normal((37, columns), np.float32)
    floats *= sizes.repeat(32, axis=1)[:, :columns]
    floats[5], floats[6] = 0, -0.0
    floats[7] = np.where(np.arange(columns) % 3 == 0, -1.5, 1.5)
    return floats


def matrices(rng: np.random.Generator, kind: str, form: Form) -> Iterator[Encoded]:
    """Random bytes and, where floats are stored, usual ones."""
    for columns in widths(kind):
        yield replace(random_matrix(rng, kind, 37, columns), form=form)
        if kind in DTYPES:
            stored = usual_floats(rng, columns).astype(DTYPES[kind]).view(np.uint8)
            yield Encoded(kind, columns, stored, form)


def embedded(ops: Ops, matrix: Encoded) -> F32:
    """All rows as floats: scale · q + offset, whatever the order in memory."""
    out = np.full((matrix.rows, matrix.columns), np.nan, np.float32)
    ops.embed(ops.pack(matrix), np.arange(matrix.rows, dtype=np.int32), out)
    return out


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_packing_makes_the_integers_of_the_formula(
    kind: str, form: Form, rng: np.random.Generator, ops: NativeOps
) -> None:
    for matrix in matrices(rng, kind, form):
        found, expected = embedded(ops, matrix), integers_of(matrix).dequantised()
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


EXACT = [pair for pair in FORMS if pair[1] in STORED_FORMS.get(pair[0], ())]
EXACT.remove(("Q4_K", INT4_OFFSETS))  # its factors are rounded: see test_integers.py


@pytest.mark.parametrize(("kind", "form"), EXACT)
def test_stored_weights_are_those_of_the_formula(
    kind: str, form: Form, rng: np.random.Generator, ops: NativeOps
) -> None:
    """Whatever the bytes."""
    for columns in widths(kind):
        matrix = replace(random_matrix(rng, kind, 37, columns), form=form)
        found, expected = embedded(ops, matrix), dequantize(kind, matrix.stored).reshape(37, -1)
        np.testing.assert_array_equal(found, expected)


def test_stacked_matrices_take_one_form(rng: np.random.Generator, ops: NativeOps) -> None:
    """Stored integers beside rounded floats, at rows that are no multiple of a panel."""
    parts = [replace(random_matrix(rng, k, 21, 544), form=INT8) for k in ("Q8_0", "F32", "Q4_0")]
    packed = ops.pack(parts)
    out = np.empty((63, 544), np.float32)
    ops.embed(packed, np.arange(63, dtype=np.int32), out)
    expected = np.concatenate([integers_of(part).dequantised() for part in parts])
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
    with pytest.raises(ValueError, match="one encoding"):
        ops.pack([parts[0], replace(parts[1], form=INT4)])
    with pytest.raises(ValueError, match="one encoding"):
        ops.pack([parts[0], integers_of(parts[0])])


def test_a_gated_pair_of_integers(rng: np.random.Generator, ops: NativeOps) -> None:
    """Gives what the pair gives that numpy made integers of."""
    pair = [replace(random_matrix(rng, "F16", 40, 96), form=INT4) for _ in range(2)]
    x = rng.standard_normal((3, 96), np.float32)
    found, expected = np.empty((3, 40), np.float32), np.empty((3, 40), np.float32)
    ops.linear(x, ops.pack_gated(*pair), found, gated="silu")
    ops.linear(x, ops.pack_gated(*map(integers_of, pair)), expected, gated="silu")
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("form", [INT4_OFFSETS, INT6, INT6_OFFSETS])
def test_six_bits_and_offsets_must_be_stored(
    form: Form, rng: np.random.Generator, ops: NativeOps
) -> None:
    matrix = replace(random_matrix(rng, "F32", 3, 64), form=form)
    with pytest.raises(ValueError, match="stores no such integers"):
        ops.pack(matrix)
    with pytest.raises(ValueError, match="stores no such integers"):
        ReferenceOps().pack(matrix)


def test_a_float16_is_read_whatever_its_bits(ops: NativeOps) -> None:
    """Subnormal numbers and both zeros among them."""
    bits = np.arange(65536, dtype=np.uint16)
    finite = bits[np.isfinite(bits.view(np.float16))].reshape(-1, 256)
    matrix = Encoded("F16", 256, finite.view(np.uint8))
    expected = finite.view(np.float16).astype(np.float32).astype(ml_dtypes.bfloat16)
    assert_bits(ops.pack(matrix), expected, ops)


@pytest.mark.parametrize("reference", [False, True], ids=["native", "reference"])
def test_it_is_told_what_is_not_read_any_more(reference: bool, rng: np.random.Generator) -> None:
    ops: Ops = ReferenceOps() if reference else NativeOps(threads=2)
    told: list[int] = []
    ops.pack([random_matrix(rng, "Q4_0", 21, 64) for _ in range(3)], done=told.append)
    assert told == [0, 1, 2]


def test_bytes_need_no_alignment(rng: np.random.Generator, ops: NativeOps) -> None:
    for kind in ENCODINGS:
        matrix = random_matrix(rng, kind, 3, 256)
        room = np.zeros(matrix.stored.size + 1, np.uint8)
        moved = room[1:].reshape(matrix.stored.shape)
        moved[...] = matrix.stored
        assert_bits(ops.pack(Encoded(kind, 256, moved)), rounded(matrix), ops)


def ending_in(bits: np.ndarray) -> Callable[[np.random.Generator], Encoded]:
    """A matrix of floats whose last element has these bits."""
    kind = {4: "F32", 2: "BF16"}[bits.itemsize]

    def matrix(rng: np.random.Generator) -> Encoded:
        made = random_matrix(rng, kind, 19, 33)
        made.stored[-1, -bits.itemsize :] = bits.view(np.uint8)
        return made

    return matrix


def scaled_by(kind: str, at: int, bits: int) -> Callable[[np.random.Generator], Encoded]:
    """A matrix one of whose scales has these bits."""

    def matrix(rng: np.random.Generator) -> Encoded:
        made = random_matrix(rng, kind, 19, 512)
        made.stored[7, at : at + 2] = np.array([bits], np.uint16).view(np.uint8)
        return made

    return matrix


@pytest.mark.parametrize(
    "faulty",
    [
        ending_in(np.array([0x7F800000], np.uint32)),
        ending_in(np.array([0xFFFFFFFF], np.uint32)),
        ending_in(np.array([LARGEST + 1], np.uint32)),
        ending_in(np.array([0xFF80], np.uint16)),
        ending_in(np.array([0x7FFF], np.uint16)),
        scaled_by("Q4_0", 0, 0x7C00),
        scaled_by("Q4_1", 2, 0xFC00),
        scaled_by("Q8_0", 34, 0x7E01),
        scaled_by("Q5_0", 22, 0x7C00),
        scaled_by("Q5_1", 26, 0x7E01),
        scaled_by("Q4_K", 2, 0x7C00),
        scaled_by("Q5_K", 176, 0xFC00),
        scaled_by("Q6_K", 418, 0xFC01),
    ],
)
@pytest.mark.parametrize("reference", [False, True], ids=["native", "reference"])
def test_what_is_not_finite_is_refused(
    faulty: Callable[[np.random.Generator], Encoded], reference: bool, rng: np.random.Generator
) -> None:
    matrix = faulty(rng)
    assert_refused(matrix, rng, reference)
    if np.isfinite(matrix.stored[-1, -4:].copy().view(np.float32)) and matrix.kind == "F32":
        return  # too large for bfloat16, but not as a float
    assert_refused(replace(matrix, form=INT8), rng, reference)
    for form in STORED_FORMS.get(matrix.kind, (INT4,)):
        assert_refused(replace(matrix, form=form), rng, reference)


@pytest.mark.parametrize("form", [INT8, INT4])
def test_scales_beyond_float16_are_refused(form: Form, rng: np.random.Generator) -> None:
    scale = 127 if form == INT8 else 8
    for reference in (False, True):
        for size, refused in ((65504, False), (65519, False), (65520, True), (1e30, True)):
            floats = np.ones((20, 64), np.float32)
            floats[18, 40] = size * scale
            matrix = Encoded("F32", 64, floats.view(np.uint8), form)
            if refused or (size > 65504 and form == INT8):  # eight bits round scales up
                assert_refused(matrix, rng, reference)
            else:
                (ReferenceOps() if reference else NativeOps(threads=2)).pack(matrix)


def assert_refused(matrix: Encoded, rng: np.random.Generator, reference: bool) -> None:
    ops: Ops = ReferenceOps() if reference else NativeOps(threads=2)
    sound = np.ones((matrix.rows, matrix.columns), np.float32).view(np.uint8)
    other = Encoded("F32", matrix.columns, sound, matrix.form)
    if matrix.form.offsets or matrix.form.bits == 6:
        blocks = rng.integers(0, 60, matrix.stored.shape, np.uint8)
        other = replace(matrix, stored=blocks)
    with pytest.raises(NotFinite) as refused:
        ops.pack([other, matrix, other, matrix])
    assert refused.value.part == 1
    with pytest.raises(NotFinite) as refused:
        ops.pack_gated(other, matrix)
    assert refused.value.part == 1


def test_the_largest_finite_number_is_kept(rng: np.random.Generator, ops: NativeOps) -> None:
    matrix = ending_in(np.array([LARGEST], np.uint32))(rng)
    assert_bits(ops.pack(matrix), rounded(matrix), ops)


def test_wrong_bytes_are_named(rng: np.random.Generator, ops: NativeOps) -> None:
    matrix = random_matrix(rng, "Q4_0", 4, 64)
    with pytest.raises(ValueError, match="size 54 on axis 1, it has 36"):
        ops.pack(Encoded("Q4_0", 96, matrix.stored))
    with pytest.raises(ValueError, match="whole blocks"):
        ops.pack(Encoded("Q4_0", 63, matrix.stored))
    with pytest.raises(ValueError, match="as many columns"):
        ops.pack([matrix, random_matrix(rng, "Q4_0", 4, 32)])
