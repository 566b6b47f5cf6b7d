"""The ops in C++, in one of several instruction sets chosen when the backend is made.

A call costs about 1 µs beyond the kernel. Arguments are checked in C++, where it is cheap: a wrong
type raises TypeError, a wrong shape, order or index ValueError; nothing has been written then.
"""

import os
from collections.abc import Callable, Sequence

import numpy as np
from ml_dtypes import bfloat16

from octavo import _native
from octavo.errors import ConfigError
from octavo.ops.api import (
    BF16,
    BF16_FORM,
    F32,
    I32,
    INT4,
    INT4_OFFSETS,
    INT6,
    INT6_OFFSETS,
    INT8,
    U8,
    U16,
    Activation,
    Batch,
    Draws,
    Encoded,
    Entries,
    Form,
    KVPages,
    KVPool,
    Norm,
    NotFinite,
    Packed,
    Penalties,
    Quantised,
    Rope,
    Weight,
)
from octavo.ops.costs import Products
from octavo.ops.encodings import ENCODINGS

ISA_VARIABLE = "OCTAVO_ISA"

GATES: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}

KINDS = {kind: number for number, kind in enumerate(ENCODINGS)}
"""In the order of `Kind` in encoded.h."""

FORMS = {BF16_FORM: 0, INT8: 1, INT4: 2, INT4_OFFSETS: 3, INT6: 4, INT6_OFFSETS: 5}
"""As `Encoding` of packed.h counts them."""

PRODUCTS: dict[Products, int] = {
    "bf16": FORMS[BF16_FORM],
    "int8": FORMS[INT8],
    "int6": FORMS[INT6],
    "int4": FORMS[INT4],
}

_UNLIKE = "weights that are stacked must have one encoding and as many columns"


def available_sets() -> tuple[str, ...]:
    """The instruction sets this machine runs, the quickest first."""
    return tuple(_native.available_sets())


class NativeOps:
    """`Ops` on the CPU. Threads share the work of one call; calls take turns.

    `isa` names an instruction set; None takes the one that OCTAVO_ISA names, else the quickest.
    Threads do not survive a fork: in the child, the calling thread does all the work.

    Raises   ConfigError: the set is unknown, not built, or this machine lacks it.
    """

    def __init__(self, *, threads: int, isa: str | None = None) -> None:
        if threads < 1:
            raise ConfigError(f"threads must be at least 1, not {threads}")
        wanted = isa if isa is not None else os.environ.get(ISA_VARIABLE, "")
        try:
            self._backend = _native.Backend(threads, wanted)
        except ValueError as error:
            raise ConfigError(f"{error}: choose one with --isa or {ISA_VARIABLE}") from error

    @property
    def name(self) -> str:
        return f"native-{self.isa}"

    @property
    def isa(self) -> str:
        return str(self._backend.isa)

    @property
    def threads(self) -> int:
        return int(self._backend.threads)

    def pack(
        self, weight: Weight | Sequence[Weight], *, done: Callable[[int], None] | None = None
    ) -> Packed:
        parts = [weight] if isinstance(weight, np.ndarray | Encoded | Quantised) else list(weight)
        return self._pack(parts, gated=False, done=done)

    def pack_gated(self, gate: Weight, up: Weight) -> Packed:
        return self._pack([gate, up], gated=True)

    def _pack(
        self, parts: list[Weight], *, gated: bool, done: Callable[[int], None] | None = None
    ) -> Packed:
        quantised = [part for part in parts if isinstance(part, Quantised)]
        if not quantised:
            return self._pack_encoded([_encoded(part) for part in parts], gated, done)
        kinds = {(part.columns, _encoding(part)) for part in quantised}
        if len(kinds) > 1 or len(quantised) < len(parts):
            raise ValueError(_UNLIKE)
        columns, encoding = kinds.pop()
        return self._backend.pack_quantised(
            [_arrays(part) for part in quantised], columns, encoding, gated
        )

    def _pack_encoded(
        self, parts: list[Encoded], gated: bool, done: Callable[[int], None] | None
    ) -> Packed:
        kinds = {(part.columns, FORMS[part.form]) for part in parts}
        if len(kinds) > 1:
            raise ValueError(_UNLIKE)
        columns, encoding = kinds.pop()
        packed, faulty = self._backend.pack(
            [(KINDS[part.kind], part.stored) for part in parts], columns, encoding, gated, done
        )
        if faulty >= 0:
            raise NotFinite(faulty)
        weight: Packed = packed
        return weight

    def unpack(self, weight: Packed) -> BF16:
        matrix = np.empty((weight.rows, weight.columns), bfloat16)
        self._backend.unpack(weight, _bits(matrix))
        return matrix

    def embed(self, table: Packed, tokens: I32, out: F32) -> None:
        self._backend.embed(table, tokens, out)

    def linear(
        self,
        x: F32,
        weight: Packed,
        out: F32,
        *,
        norm: Norm | None = None,
        bias: F32 | None = None,
        add: bool = False,
        gated: Activation | None = None,
    ) -> None:
        norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        self._backend.linear(x, weight, out, norm_weight, eps, bias, add, GATES[gated])

    def rms_norm(self, x: F32, norm: Norm, out: F32) -> None:
        self._backend.rms_norm(x, norm.weight, norm.eps, out)

    def rope_write_kv(self, qkv: F32, batch: Batch, rope: Rope | None, kv: KVPages) -> None:
        cos, sin = (None, None) if rope is None else (rope.cos, rope.sin)
        self._backend.rope_write_kv(
            qkv, _rows(batch), cos, sin, _elements(kv.pool), kv.layer, kv.table
        )

    def paged_attention(
        self,
        qkv: F32,
        batch: Batch,
        kv: KVPages,
        out: F32,
        *,
        scale: float,
        window: int | None = None,
    ) -> None:
        self._backend.paged_attention(
            qkv, _rows(batch), _elements(kv.pool), kv.layer, kv.table, out, scale, window or 0
        )

    def copy_blocks(self, pool: KVPool, sources: I32, targets: I32) -> None:
        self._backend.copy_blocks(_elements(pool), sources, targets)

    def argmax(self, logits: F32, out: I32, logprob: F32) -> None:
        self._backend.argmax(logits, out, logprob)

    def likeliest(self, logits: F32, rows: I32, ids: I32, values: F32) -> None:
        self._backend.likeliest(logits, rows, ids, values)

    def add_bias(self, logits: F32, entries: Entries, bias: F32, before: F32) -> None:
        self._backend.add_bias(logits, entries, bias, before)

    def penalise(self, logits: F32, entries: Entries, penalties: Penalties, before: F32) -> None:
        self._backend.penalise(logits, entries, penalties, before)

    def mask(self, logits: F32, rows: I32, allowed: I32) -> None:
        self._backend.mask(logits, rows, allowed)

    def draw(self, logits: F32, rows: I32, draws: Draws, out: I32) -> None:
        self._backend.draw(logits, rows, draws, out)

    def take_rows(self, x: F32, rows: I32, out: F32) -> None:
        self._backend.take_rows(x, rows, out)

    def multiply(self, products: Products, operands: U8, rounds: int, out: F32) -> float:
        """Multiply and add on registers (tiles: out of `operands`), as `linear` does with such
        weights; in `len(out)` pieces of so many rounds, each of which writes what it got.

        Returns  the operations done; 0 if the instruction set has no such products.
        """
        return self._backend.multiply(operands, rounds, PRODUCTS[products], out)

    def read(self, operands: U8, out: F32) -> None:
        """Read all of `operands` once, in `len(out)` pieces, each of which writes a sum."""
        self._backend.read(operands, out)


def _rows(batch: Batch) -> tuple[I32, I32, I32]:
    return batch.positions, batch.query_start, batch.context


def _encoded(weight: Weight) -> Encoded:
    if isinstance(weight, Encoded):
        return weight
    bits = _bits(weight)
    return Encoded("BF16", bits.shape[-1], bits.view(np.uint8))


def _encoding(weight: Quantised) -> int:
    return FORMS[Form(weight.bits, weight.offsets is not None)]


def _arrays(weight: Quantised) -> tuple[U8, U16, U16 | None, U8 | None]:
    offsets = None if weight.offsets is None else weight.offsets.view(np.uint16)
    multiples = None if weight.multiples is None else weight.multiples.view(np.uint8)
    return weight.values, weight.scales.view(np.uint16), offsets, multiples


def _elements(pool: KVPool) -> KVPool:
    if pool.dtype not in (bfloat16, np.uint8):
        raise TypeError(f"pools must be bfloat16, or uint8 for int8 with scales, not {pool.dtype}")
    return pool if pool.dtype == np.uint8 else _bits(pool)


def _bits(matrix: Weight) -> BF16:
    """The same memory as uint16: the buffer protocol knows no bfloat16."""
    assert isinstance(matrix, np.ndarray)
    if matrix.dtype != bfloat16:
        raise TypeError(f"weights must be bfloat16, not {matrix.dtype}")
    return matrix.view(np.uint16)
