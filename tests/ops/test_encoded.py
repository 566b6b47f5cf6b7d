"""Packing matrices as checkpoints encode them: the bits are those of the numpy formulas.

The code is the same for every instruction set, so that one will do.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from tests.models.test_gguf import finite_blocks

from octavo.ops.api import BF16, Encoded, NotFinite, Ops, Packed
from octavo.ops.encodings import ENCODINGS, rounded
from octavo.ops.native import NativeOps
from octavo.ops.reference import ReferenceOps

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


def test_a_float16_is_read_whatever_its_bits(ops: NativeOps) -> None:
    """Subnormal numbers and both zeros among them."""
    bits = np.arange(65536, dtype=np.uint16)
    finite = bits[np.isfinite(bits.view(np.float16))].reshape(-1, 256)
    matrix = Encoded("F16", 256, finite.view(np.uint8))
    expected = finite.view(np.float16).astype(np.float32).astype(ml_dtypes.bfloat16)
    assert_bits(ops.pack(matrix), expected, ops)


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
        scaled_by("Q4_K", 2, 0x7C00),
        scaled_by("Q6_K", 418, 0xFC01),
    ],
)
@pytest.mark.parametrize("reference", [False, True], ids=["native", "reference"])
def test_what_is_not_finite_is_refused(
    faulty: Callable[[np.random.Generator], Encoded], reference: bool, rng: np.random.Generator
) -> None:
    ops: Ops = ReferenceOps() if reference else NativeOps(threads=2)
    matrix = faulty(rng)
    sound = random_matrix(rng, "F32", matrix.rows, matrix.columns)
    with pytest.raises(NotFinite) as refused:
        ops.pack([sound, matrix, sound, matrix])
    assert refused.value.part == 1
    with pytest.raises(NotFinite) as refused:
        ops.pack_gated(sound, matrix)
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
    with pytest.raises(ValueError, match="columns"):
        ops.pack([matrix, random_matrix(rng, "Q4_0", 4, 32)])
