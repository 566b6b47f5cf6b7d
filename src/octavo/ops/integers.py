"""How a matrix becomes integers: those that a checkpoint stores where they fit, or rounded floats.

Integers are symmetric, with a float16 scale for each row and group of 32 inputs:

    8 bits   scale = max |w| / 127, rounded up to float16; an error of half a scale at most
    4 bits   scale = w / -8 for the w of largest magnitude, so that it is met; the other end of the
             range reaches 7: an error of half a scale, and up to one scale there

Source  the scale of four bits is that of Q4_0 (github.com/ggml-org/ggml, src/ggml-quants.c).
"""

from typing import Literal

import numpy as np

from octavo.ops.api import F16, F32, GROUP, Encoded, Quantised
from octavo.ops.encodings import dequantize
from octavo.ops.stored import STORED_FORMS, pack_nibbles, stored_integers
from octavo.units import ceil_div


def integers_of(matrix: Encoded) -> Quantised:
    """The matrix as integers of its form. Scales of rows that are not finite are not, either."""
    bits = matrix.form.integer_bits
    if matrix.form in STORED_FORMS.get(matrix.kind, ()):
        return stored_integers(matrix)
    if matrix.form.offsets or bits == 6:
        raise ValueError(f"a matrix of {matrix.kind} stores no such integers")
    floats = dequantize(matrix.kind, matrix.stored).reshape(matrix.rows, matrix.columns)
    with np.errstate(invalid="ignore"):
        return quantise(floats, bits)


def quantise(rows: F32, bits: Literal[8, 4]) -> Quantised:
    """The rows [N, K] as integers. Scales beyond float16 come out infinite."""
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
    exact = np.abs(grouped).max(axis=2) / np.float32(127)
    rounded = _as_float16(exact)
    with np.errstate(over="ignore"):
        above: F16 = np.nextafter(rounded, np.float16(np.inf))
    return np.where(rounded < exact, above, rounded).astype(np.float16)


def _scales4(grouped: F32) -> F16:
    high, low = grouped.max(axis=2), grouped.min(axis=2)
    extreme = np.where(high > -low, high, low)
    return _as_float16(extreme / np.float32(-8) + np.float32(0))  # no zero has a sign


def _as_float16(values: F32) -> F16:
    with np.errstate(over="ignore"):  # infinite scales are refused later
        return values.astype(np.float16)
