"""The integers that checkpoints store, as the kernels run them, and how groups of them are packed.

What the products use is what `dequantize` makes of the checkpoint, bit for bit, but for Q4_K in
four bits, whose scales and minimums are products that float16 rounds, by 2^-12 of themselves at
most: an eighth of what bfloat16 makes of its weights.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.ops.api import (
    BF16_FORM,
    F16,
    GROUP,
    INT4,
    INT4_OFFSETS,
    INT6,
    INT6_OFFSETS,
    INT8,
    SIXES_ZERO,
    U8,
    Encoded,
    Form,
    Quantised,
)
from octavo.ops.encodings import (
    ENCODINGS,
    fifth_bits,
    nibbles,
    quants_q4_k,
    quants_q5_k,
    quants_q6_k,
    six_bit_factors,
)

I8 = npt.NDArray[np.int8]

STORED_FORMS = {
    "Q8_0": (INT8,),
    "Q6_K": (INT6,),
    "Q5_0": (INT6, INT6_OFFSETS, INT8),
    "Q5_1": (INT6_OFFSETS,),
    "Q5_K": (INT6_OFFSETS,),
    "Q4_0": (INT4, INT6, INT6_OFFSETS, INT8),
    "Q4_1": (INT4_OFFSETS, INT6_OFFSETS),
    "Q4_K": (INT4_OFFSETS, INT6_OFFSETS),
}
"""The forms that hold the integers of an encoding, the least first. Other encodings have none."""


class Groups(NamedTuple):
    """What is stored of groups of 32: scale · s · q, or scale · s · q + offset · t.

    Shapes   q int8 [groups, 32]; scales, offsets float16 [groups]; multiples int8 [groups, 2]: s of
             either half, or s and t. Without multiples all are 1.
    """

    q: I8
    scales: F16
    offsets: F16 | None = None
    multiples: I8 | None = None


def least_form(kinds: Iterable[str]) -> Form:
    """The least form that holds the integers of all of these; else that of bfloat16."""
    held = [set(STORED_FORMS.get(kind, ())) for kind in kinds]
    common = set.intersection(*held)
    return min(common, key=lambda form: (form.bits, form.offsets), default=BF16_FORM)


def stored_integers(matrix: Encoded) -> Quantised:
    """The integers and factors of a matrix, in a form of `STORED_FORMS`."""
    form = matrix.form
    groups = GROUPS[matrix.kind](matrix.stored.reshape(-1, ENCODINGS[matrix.kind].block_bytes))
    scales, offsets, multiples = groups.scales, groups.offsets, groups.multiples
    if form.bits == 8:
        values = groups.q.view(np.uint8)
    elif form.bits == 4:
        values = pack_nibbles((groups.q + np.int8(0 if form.offsets else 8)).view(np.uint8))
        if multiples is not None and offsets is not None:
            scales, offsets = _product(scales, multiples[:, 0]), _product(offsets, multiples[:, 1])
        multiples = None
    else:
        values = pack_sixes((groups.q + np.int8(SIXES_ZERO)).view(np.uint8))
        if multiples is None:
            multiples = np.ones((len(scales), 2), np.int8)
    if form.offsets and offsets is None:
        offsets = np.zeros_like(scales)

    def rows(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        return np.ascontiguousarray(array).reshape(matrix.rows, -1)

    return Quantised(
        form.integer_bits,
        matrix.columns,
        rows(values).view(np.uint8),
        rows(scales).view(np.float16),
        None if offsets is None else rows(offsets).view(np.float16),
        None if multiples is None else rows(multiples).view(np.int8),
    )


def pack_nibbles(integers: U8) -> U8:
    """Groups [..., 32] of numbers below 16 as bytes [..., 16]: input j beside input 16 + j."""
    packed: U8 = integers[..., : GROUP // 2] | integers[..., GROUP // 2 :] << np.uint8(4)
    return packed


def pack_sixes(integers: U8) -> U8:
    """Groups [..., 32] of numbers below 64 as bytes [..., 24], as `Quantised` has them."""
    quads = integers.reshape(*integers.shape[:-1], 2, 4, 4)
    shifts = np.array([0, 2, 4], np.uint8)[:, None]
    top = (quads[..., 3:, :] >> shifts) << np.uint8(6)
    packed: U8 = (quads[..., :3, :] | top).reshape(*integers.shape[:-1], -1)
    return packed


def _product(factors: F16, multiples: I8) -> F16:
    with np.errstate(over="ignore"):  # a damaged scale may be infinite; weights are checked later
        return (factors.astype(np.float32) * multiples).astype(np.float16)


def _half(blocks: U8, start: int) -> F16:
    return blocks.view(np.float16)[:, start // 2].copy()


def _signed(quants: U8, zero: int) -> I8:
    signed: I8 = quants.view(np.int8) - np.int8(zero)
    return signed


def _groups_q8_0(blocks: U8) -> Groups:
    return Groups(blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _groups_q5_0(blocks: U8) -> Groups:
    quants = nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])
    return Groups(_signed(quants, 16), _half(blocks, 0))


def _groups_q5_1(blocks: U8) -> Groups:
    quants = nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return Groups(_signed(quants, 0), _half(blocks, 0), _half(blocks, 2))


def _groups_q4_0(blocks: U8) -> Groups:
    return Groups(_signed(nibbles(blocks[:, 2:]), 8), _half(blocks, 0))


def _groups_q4_1(blocks: U8) -> Groups:
    return Groups(_signed(nibbles(blocks[:, 4:]), 0), _half(blocks, 0), _half(blocks, 2))


def _groups_k(blocks: U8, quants: U8) -> Groups:
    """Of `quants` [blocks, 8, 32] with six-bit scales and minimums, which are subtracted."""
    multiples = np.stack(six_bit_factors(blocks[:, 4:16]), axis=2)
    scales, minimums = np.repeat(blocks[:, :4].copy().view(np.float16), 8, axis=0).T
    return Groups(
        _signed(quants, 0).reshape(-1, GROUP),
        scales,
        -minimums,
        multiples.view(np.int8).reshape(-1, 2),
    )


def _groups_q4_k(blocks: U8) -> Groups:
    return _groups_k(blocks, quants_q4_k(blocks))


def _groups_q5_k(blocks: U8) -> Groups:
    return _groups_k(blocks, quants_q5_k(blocks))


def _groups_q6_k(blocks: U8) -> Groups:
    return Groups(
        _signed(quants_q6_k(blocks), 32).reshape(-1, GROUP),
        np.repeat(_half(blocks, 208), 8),
        None,
        blocks[:, 192:208].view(np.int8).reshape(-1, 2),
    )


GROUPS: dict[str, Callable[[U8], Groups]] = {
    "Q8_0": _groups_q8_0,
    "Q6_K": _groups_q6_k,
    "Q5_0": _groups_q5_0,
    "Q5_1": _groups_q5_1,
    "Q5_K": _groups_q5_k,
    "Q4_0": _groups_q4_0,
    "Q4_1": _groups_q4_1,
    "Q4_K": _groups_q4_k,
}
