"""`Ops` that take the time of every call: the same results, from the backend behind them.

Nothing of it is in a kernel or in the core; an engine is measured by being built with it.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from octavo.ops import costs
from octavo.ops.api import (
    BF16,
    F32,
    I32,
    Activation,
    Batch,
    Draws,
    Encoded,
    Entries,
    KVPages,
    KVPool,
    Norm,
    Ops,
    Packed,
    Penalties,
    Quantised,
    Rope,
    Weight,
)
from octavo.ops.costs import Cost, Products

PRODUCTS_OF: dict[int, Products] = {16: "bf16", 8: "int8", 6: "int6", 4: "int4"}
"""By the bits of an element."""


class Measured(NamedTuple):
    """One call of an op: when it began and ended, on the clock of engines.

    `weight` is the matrix, where there is one; `form` what its elements are.
    """

    op: str
    began_s: float
    ended_s: float
    cost: Cost
    weight: Packed | None = None
    form: Products = "bf16"


class MeasuredOps:
    """Tells `told` of every call that computes; packing is not measured."""

    def __init__(self, ops: Ops, told: Callable[[Measured], object]) -> None:
        self._ops = ops
        self._told = told
        self._forms: dict[int, Products] = {}
        """By id: packed matrices live as long as their model."""

    @property
    def name(self) -> str:
        return self._ops.name

    def pack(
        self, weight: Weight | Sequence[Weight], *, done: Callable[[int], None] | None = None
    ) -> Packed:
        parts = list(weight) if isinstance(weight, Sequence) else [weight]
        return self._known(self._ops.pack(parts, done=done), parts[0])

    def pack_gated(self, gate: Weight, up: Weight) -> Packed:
        return self._known(self._ops.pack_gated(gate, up), gate)

    def unpack(self, weight: Packed) -> BF16:
        return self._ops.unpack(weight)

    def embed(self, table: Packed, tokens: I32, out: F32) -> None:
        self._run(
            "embed",
            lambda: self._ops.embed(table, tokens, out),
            lambda: costs.embed(table, tokens, out),
            table,
        )

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
        self._run(
            "linear",
            lambda: self._ops.linear(x, weight, out, norm=norm, bias=bias, add=add, gated=gated),
            lambda: costs.linear(x, weight, out, norm=norm, bias=bias, add=add),
            weight,
        )

    def rms_norm(self, x: F32, norm: Norm, out: F32) -> None:
        self._run(
            "rms_norm",
            lambda: self._ops.rms_norm(x, norm, out),
            lambda: costs.rms_norm(x, norm, out),
        )

    def rope_write_kv(self, qkv: F32, batch: Batch, rope: Rope | None, kv: KVPages) -> None:
        self._run(
            "rope_write_kv",
            lambda: self._ops.rope_write_kv(qkv, batch, rope, kv),
            lambda: costs.rope_write_kv(qkv, rope, kv),
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
        self._run(
            "paged_attention",
            lambda: self._ops.paged_attention(qkv, batch, kv, out, scale=scale, window=window),
            lambda: costs.paged_attention(batch, kv, out, window=window),
        )

    def copy_blocks(self, pool: KVPool, sources: I32, targets: I32) -> None:
        self._run(
            "copy_blocks",
            lambda: self._ops.copy_blocks(pool, sources, targets),
            lambda: costs.copy_blocks(pool, sources),
        )

    def take_rows(self, x: F32, rows: I32, out: F32) -> None:
        self._run(
            "take_rows", lambda: self._ops.take_rows(x, rows, out), lambda: costs.take_rows(out)
        )

    def argmax(self, logits: F32, out: I32, logprob: F32) -> None:
        self._run(
            "argmax", lambda: self._ops.argmax(logits, out, logprob), lambda: costs.argmax(logits)
        )

    def likeliest(self, logits: F32, rows: I32, ids: I32, values: F32) -> None:
        self._run(
            "likeliest",
            lambda: self._ops.likeliest(logits, rows, ids, values),
            lambda: costs.likeliest(logits, rows, ids),
        )

    def add_bias(self, logits: F32, entries: Entries, bias: F32, before: F32) -> None:
        self._run(
            "add_bias",
            lambda: self._ops.add_bias(logits, entries, bias, before),
            lambda: costs.add_bias(entries),
        )

    def penalise(self, logits: F32, entries: Entries, penalties: Penalties, before: F32) -> None:
        self._run(
            "penalise",
            lambda: self._ops.penalise(logits, entries, penalties, before),
            lambda: costs.penalise(entries),
        )

    def mask(self, logits: F32, rows: I32, allowed: I32) -> None:
        self._run(
            "mask",
            lambda: self._ops.mask(logits, rows, allowed),
            lambda: costs.mask(logits, allowed),
        )

    def draw(self, logits: F32, rows: I32, draws: Draws, out: I32) -> None:
        self._run(
            "draw",
            lambda: self._ops.draw(logits, rows, draws, out),
            lambda: costs.draw(logits, rows),
        )

    def _known(self, packed: Packed, weight: Weight) -> Packed:
        if isinstance(weight, Encoded):
            self._forms[id(packed)] = PRODUCTS_OF[weight.form.bits]
        elif isinstance(weight, Quantised):
            self._forms[id(packed)] = PRODUCTS_OF[weight.bits]
        return packed

    def _run(
        self,
        op: str,
        call: Callable[[], object],
        cost: Callable[[], Cost],
        weight: Packed | None = None,
    ) -> None:
        began_s = time.monotonic()
        call()
        ended_s = time.monotonic()
        form = self._forms.get(id(weight), "bf16")
        self._told(Measured(op, began_s, ended_s, cost(), weight, form))
