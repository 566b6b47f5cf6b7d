"""In what form each weight matrix is kept, and how matrices become integers.

    none     bfloat16
    stored   the integers of the checkpoint where it holds some that the kernels run; else bfloat16
    int8     8 bits; integers of 8 bits or fewer that the checkpoint holds are kept as they are
    int4     4 bits, and 8 for the embedding and the head, whose errors nothing evens out

Matrices that are stacked take one form, the least that all of them fit into. Integers are
symmetric, with a float16 scale for each row and group of 32 inputs:

    8 bits   scale = max |w| / 127, rounded up to float16; an error of half a scale at most
    4 bits   scale = w / -8 for the w of largest magnitude, so that it is met; the other end of the
             range reaches 7: an error of half a scale, and up to one scale there

Source  the scale of four bits is that of Q4_0 (github.com/ggml-org/ggml, src/ggml-quants.c).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from octavo.config import Quantization
from octavo.ops.api import F16, F32, GROUP, PANEL, U8, Quantised
from octavo.units import ceil_div


@dataclass(frozen=True, slots=True)
class Form:
    """Bits of an element, and whether groups have offsets."""

    bits: Literal[16, 8, 4]
    offsets: bool = False

    @property
    def integer_bits(self) -> Literal[8, 4]:
        assert self.bits != 16, "no integers"
        return self.bits

    def nbytes(self, rows: int, columns: int) -> int:
        """What a matrix takes once packed."""
        groups = ceil_div(columns, GROUP)
        factors = 0 if self.bits == 16 else 4 if self.offsets else 2
        return ceil_div(rows, PANEL) * PANEL * groups * (GROUP * self.bits // 8 + factors)


BF16_FORM, INT8, INT4, INT4_OFFSETS = Form(16), Form(8), Form(4), Form(4, offsets=True)

STORED_FORMS = {
    "Q8_0": INT8,
    "Q5_0": INT8,
    "Q4_0": INT4,
    "Q4_1": INT4_OFFSETS,
    "Q4_K": INT4_OFFSETS,
}
"""Encodings whose integers the kernels run. All are kept exactly but for Q4_K, whose scales are
products that float16 rounds, by 2^-12 at most: an eighth of what bfloat16 makes of its weights."""


def form_of(kinds: Iterable[str], quantization: Quantization, *, table: bool = False) -> Form:
    """The form of matrices stored as `kinds` and stacked; `table`: of the embedding or the head."""
    stored = {STORED_FORMS.get(kind, BF16_FORM) for kind in kinds}
    if quantization == "none":
        return BF16_FORM
    if quantization == "stored":
        return _common(stored)
    if quantization == "int8" or table:
        return INT8
    return stored.pop() if len(stored) == 1 and max(form.bits for form in stored) == 4 else INT4


def _common(forms: set[Form]) -> Form:
    """The least form that holds all of these exactly."""
    if len(forms) == 1:
        return next(iter(forms))
    return INT8 if forms <= {INT8, INT4} else BF16_FORM


def quantise(rows: F32, bits: Literal[8, 4]) -> Quantised:
    """The rows [N, K] as integers. They must be finite; scales beyond float16 come out infinite.

    Cost     about 3 ns an element.
    """
    count, columns = rows.shape
    groups = ceil_div(columns, GROUP)
    padded = rows
    if columns % GROUP:
        padded = np.zeros((count, groups * GROUP), np.float32)
        padded[:, :columns] = rows
    grouped = padded.reshape(count, groups, GROUP)
    scales = _scales8(grouped) if bits == 8 else _scales4(grouped)
    wide = scales.astype(np.float32)
    usual = (wide != 0) & np.isfinite(wide)
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=usual)
    integers = grouped * inverse[:, :, None]
    np.rint(integers, out=integers)
    if bits == 8:
        np.clip(integers, -127, 127, out=integers)
        values = integers.astype(np.int8).reshape(count, -1).view(np.uint8)
    else:
        integers += 8
        np.clip(integers, 0, 15, out=integers)
        values = pack_nibbles(integers.astype(np.uint8)).reshape(count, -1)
    return Quantised(bits, columns, values, scales)


def _scales8(grouped: F32) -> F16:
    exact = np.maximum(grouped.max(axis=2), -grouped.min(axis=2)) / np.float32(127)
    rounded = _as_float16(exact)
    above: F16 = np.nextafter(rounded, np.float16(np.inf))
    return np.where(rounded < exact, above, rounded).astype(np.float16)


def _scales4(grouped: F32) -> F16:
    high, low = grouped.max(axis=2), grouped.min(axis=2)
    extreme = np.where(high > -low, high, low)
    return _as_float16(extreme / np.float32(-8))


def _as_float16(values: F32) -> F16:
    with np.errstate(over="ignore"):  # infinite scales are refused later
        return values.astype(np.float16)


def pack_nibbles(integers: U8) -> U8:
    """Groups [..., 32] of numbers below 16 as bytes [..., 16]: input j beside input 16 + j."""
    packed: U8 = integers[..., : GROUP // 2] | integers[..., GROUP // 2 :] << np.uint8(4)
    return packed


def widened(matrix: Quantised) -> Quantised:
    """A matrix of 4 bits without offsets as one of 8 bits with the same values."""
    integers = np.zeros((matrix.rows, matrix.scales.shape[1] * GROUP), np.int8)
    integers[:, : matrix.columns] = matrix.integers()
    return Quantised(8, matrix.columns, integers.view(np.uint8), matrix.scales)


def taken(matrix: Quantised, rows: slice | np.ndarray[tuple[int], np.dtype[np.intp]]) -> Quantised:
    """Some rows of a matrix, or all in another order."""
    offsets = None if matrix.offsets is None else np.ascontiguousarray(matrix.offsets[rows])
    return Quantised(
        matrix.bits,
        matrix.columns,
        np.ascontiguousarray(matrix.values[rows]),
        np.ascontiguousarray(matrix.scales[rows]),
        offsets,
    )
