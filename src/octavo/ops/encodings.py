"""How checkpoints encode elements: what they mean in float32, bfloat16 and as integers.

Each encoding stores a row as blocks of `block` elements in `block_bytes` bytes. d and m are float16
scales, q the packed integers.

    F32, F16, BF16                    as they are
    Q4_0  d q[16]                     d · (q − 8)             low nibbles first, then high ones
    Q4_1  d m q[16]                   d · q + m
    Q5_0  d h[4] q[16]                d · (q − 16)            fifth bits in h
    Q5_1  d m h[4] q[16]              d · q + m
    Q8_0  d q[32]                     d · q
    Q4_K  d m s[12] q[128]            (d · s) · q − (m · t)   8 sub-blocks of 32, 6-bit s and t
    Q5_K  d m s[12] h[32] q[128]      (d · s) · q − (m · t)
    Q6_K  q[128] h[64] s[16] d        (d · s) · (q − 32)      16 sub-blocks of 16, signed 8-bit s

Source  GGUF specification; ggml's block structures (github.com/ggml-org/ggml, src/ggml-common.h).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo.ops.api import Encoded

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
BF16 = npt.NDArray[Any]

CHUNK_ELEMENTS = 64 * 1024
"""Pieces whose temporaries stay near the core."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How `block` elements lie in `block_bytes` bytes, and how to read them.

    `decode` takes uint8 [blocks, block_bytes] and gives float32 [blocks, block].
    """

    block: int
    block_bytes: int
    decode: Callable[[U8], F32]

    def nbytes(self, count: int) -> int:
        return count // self.block * self.block_bytes


def rounded(matrix: Encoded) -> BF16:
    """The matrix [N, K] in bfloat16: what `Ops.pack` makes of it."""
    return dequantize_bf16(matrix.kind, matrix.stored).reshape(matrix.rows, matrix.columns)


def dequantize(kind: str, raw: U8) -> F32:
    """All elements of a tensor stored as `kind`, float32 and flat."""
    encoding = ENCODINGS[kind]
    with np.errstate(all="ignore"):  # a damaged scale may be infinite; weights are checked later
        return encoding.decode(raw.reshape(-1, encoding.block_bytes)).reshape(-1)


def dequantize_bf16(kind: str, raw: U8) -> BF16:
    """The same rounded to bfloat16, ties to even, and flat."""
    if kind == "BF16":
        return raw.view(ml_dtypes.bfloat16)
    encoding = ENCODINGS[kind]
    blocks = raw.reshape(-1, encoding.block_bytes)
    out = np.empty((len(blocks), encoding.block), np.uint16)
    step = CHUNK_ELEMENTS // encoding.block
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            values = encoding.decode(blocks[start : start + step])
            _round_into(values, out[start : start + step])
    return out.reshape(-1).view(ml_dtypes.bfloat16)


def _round_into(values: F32, out: npt.NDArray[np.uint16]) -> None:
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    out[...] = rounded
    finite = np.isfinite(values)
    if not finite.all():  # the sum above can carry a NaN into the sign
        out[~finite] = values[~finite].astype(ml_dtypes.bfloat16).view(np.uint16)


def _scale(blocks: U8, start: int) -> F32:
    """The float16 at byte `start` of each block, float32 [blocks, 1]."""
    return blocks.view(np.float16)[:, start // 2, None].astype(np.float32)


def nibbles(packed: U8) -> U8:
    """Low nibbles, then high ones, of each run of bytes: [..., n] to [..., 2n].

    Runs move as single opaque elements: numpy's inner loops over 16 or 32 bytes are mostly
    overhead (measured: 1.1 ns an element against 0.3).
    """
    run = np.dtype((np.void, packed.shape[-1]))
    low = packed.view(run)[..., 0].copy()
    bits = low.view(np.uint8)
    out = np.empty((*low.shape, 2), run)
    out[..., 1] = (bits >> np.uint8(4)).view(run)
    bits &= np.uint8(15)
    out[..., 0] = low
    return out.view(np.uint8).reshape(*packed.shape[:-1], -1)


def fifth_bits(packed: U8) -> U8:
    """Bit i of a block's four bytes, as 0 or 16: [blocks, 4] to [blocks, 32]."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _decode_f32(blocks: U8) -> F32:
    return blocks.view(np.float32)


def _decode_f16(blocks: U8) -> F32:
    return blocks.view(np.float16).astype(np.float32)


def _decode_bf16(blocks: U8) -> F32:
    return (blocks.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _decode_q4_0(blocks: U8) -> F32:
    out = (nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8)).astype(np.float32)
    out *= _scale(blocks, 0)
    return out


def _decode_q4_1(blocks: U8) -> F32:
    out = nibbles(blocks[:, 4:]).astype(np.float32)
    out *= _scale(blocks, 0)
    out += _scale(blocks, 2)
    return out


def _decode_q5_0(blocks: U8) -> F32:
    quants = nibbles(blocks[:, 6:])
    quants |= fifth_bits(blocks[:, 2:6])
    out = (quants.view(np.int8) - np.int8(16)).astype(np.float32)
    out *= _scale(blocks, 0)
    return out


def _decode_q5_1(blocks: U8) -> F32:
    quants = nibbles(blocks[:, 8:])
    quants |= fifth_bits(blocks[:, 4:8])
    out = quants.astype(np.float32)
    out *= _scale(blocks, 0)
    out += _scale(blocks, 2)
    return out


def _decode_q8_0(blocks: U8) -> F32:
    out = blocks[:, 2:].view(np.int8).astype(np.float32)
    out *= _scale(blocks, 0)
    return out


def six_bit_factors(packed: U8) -> tuple[U8, U8]:
    """Scales and minimums of the 8 sub-blocks, [blocks, 12] to two [blocks, 8].

    Bytes 0–3 hold the scales of sub-blocks 0–3, bytes 4–7 their minimums, six bits each; bytes 8–11
    the low four bits of scales and minimums 4–7, whose high two bits top the earlier bytes.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    return scales, minimums


def _affine_k(blocks: U8, quants: U8) -> F32:
    """(d · s) · q − (m · t) for `quants` [blocks, 8, 32]."""
    scales, minimums = (of.astype(np.float32) for of in six_bit_factors(blocks[:, 4:16]))
    scales *= _scale(blocks, 0)
    minimums *= _scale(blocks, 2)
    out = quants.astype(np.float32)
    out *= scales[:, :, None]
    out -= minimums[:, :, None]
    return out.reshape(-1, 256)


def quants_q4_k(blocks: U8) -> U8:
    return nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)


def quants_q5_k(blocks: U8) -> U8:
    quants = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[:, None, 16:48] >> shifts) & np.uint8(1)
    high <<= np.uint8(4)
    quants |= high
    return quants


def quants_q6_k(blocks: U8) -> U8:
    # Two halves of 128: 64 bytes of low nibbles and 32 bytes of two-bit tops, for four runs of 32.
    quants = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)
    high <<= np.uint8(4)
    quants |= high
    return quants.reshape(-1, 16, 16)


def _decode_q4_k(blocks: U8) -> F32:
    return _affine_k(blocks, quants_q4_k(blocks))


def _decode_q5_k(blocks: U8) -> F32:
    return _affine_k(blocks, quants_q5_k(blocks))


def _decode_q6_k(blocks: U8) -> F32:
    out = (quants_q6_k(blocks).view(np.int8) - np.int8(32)).astype(np.float32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scales *= _scale(blocks, 208)
    out *= scales[:, :, None]
    return out.reshape(-1, 256)


ENCODINGS = {
    "F32": Encoding(1, 4, _decode_f32),
    "F16": Encoding(1, 2, _decode_f16),
    "BF16": Encoding(1, 2, _decode_bf16),
    "Q4_0": Encoding(32, 18, _decode_q4_0),
    "Q4_1": Encoding(32, 20, _decode_q4_1),
    "Q5_0": Encoding(32, 22, _decode_q5_0),
    "Q5_1": Encoding(32, 24, _decode_q5_1),
    "Q8_0": Encoding(32, 34, _decode_q8_0),
    "Q4_K": Encoding(256, 144, _decode_q4_k),
    "Q5_K": Encoding(256, 176, _decode_q5_k),
    "Q6_K": Encoding(256, 210, _decode_q6_k),
}
