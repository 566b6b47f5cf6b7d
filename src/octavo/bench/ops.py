"""Kernels alone: `linear` with packed matrices and paged attention in decode, beside the limits.

The best of several calls counts, for ops and limits alike: on a shared machine the others measure
its other users. Weights and KV go round in more copies than caches hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Literal

import numpy as np
from ml_dtypes import bfloat16

from octavo.models.spec import ModelSpec
from octavo.ops import costs
from octavo.ops.api import (
    F32,
    GROUP,
    SCALE_BYTES,
    TILE_TOKENS,
    Activation,
    Batch,
    KVLayout,
    KVPages,
    KVPool,
    KVType,
    Quantised,
    Weight,
)
from octavo.ops.ceilings import Ceilings, best_s
from octavo.ops.costs import Cost, Products
from octavo.ops.native import NativeOps
from octavo.units import ceil_div

BITS: dict[Products, Literal[8, 6, 4]] = {"int8": 8, "int6": 6, "int4": 4}

COLD_BYTES = 128 * 2**20
MOST_COPIES = 64
BUDGET_S = 0.3
"""For each figure."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A matrix [outputs, inputs], or a gated pair of them."""

    name: str
    outputs: int
    inputs: int
    gated: bool = False

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs * (2 if self.gated else 1)


def shapes_of(spec: ModelSpec) -> tuple[Shape, ...]:
    """The matrices of a model."""
    hidden = spec.hidden_size
    return (
        Shape("qkv", spec.qkv_size, hidden),
        Shape("output", hidden, spec.heads * spec.head_dim),
        Shape("gate, up", spec.ffn_size, hidden, gated=True),
        Shape("down", hidden, spec.ffn_size),
        Shape("head", spec.vocab_size, hidden),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRow:
    """`linear` of so many rows. `gops` counts products and sums; `share` is of the limit."""

    matrix: str
    inputs: int
    outputs: int
    form: Products
    rows: int
    us: float
    gops: float
    gb_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """One token of each sequence in one layer. `over_contiguous` is its time over that of the same
    kernel on KV in one piece."""

    sequences: int
    context: int
    dtype: KVType
    us: float
    gb_s: float
    share: float
    over_contiguous: float


class LinearCase:
    """`linear` with one matrix of random weights in one form: speed does not depend on them.

    `cached`: each call takes the same copy, so that caches hold as much of it as they can.
    """

    def __init__(
        self,
        ops: NativeOps,
        shape: Shape,
        form: Products,
        rng: np.random.Generator,
        *,
        cached: bool = False,
    ) -> None:
        copies = max(1, min(MOST_COPIES, COLD_BYTES // (2 * shape.weights)))
        weight = _weight_of(form, rng, shape)
        packed = [
            ops.pack_gated(weight, weight) if shape.gated else ops.pack(weight)
            for _ in range(1 if cached else copies)
        ]
        self.shape, self.form, self.nbytes = shape, form, packed[0].nbytes
        self._ops, self._rng, self._packed = ops, rng, cycle(packed)
        self._gate: Activation | None = "silu" if shape.gated else None

    def time(self, rows: int, budget_s: float = BUDGET_S) -> tuple[float, Cost]:
        """The shortest call with so many rows, in seconds, and what it costs at least."""
        x = self._rng.standard_normal((rows, self.shape.inputs), np.float32)
        out = np.empty((rows, self.shape.outputs), np.float32)
        cost = costs.linear(x, next(self._packed), out)
        seconds = best_s(
            lambda: self._ops.linear(x, next(self._packed), out, gated=self._gate), budget_s
        )
        return seconds, cost


class AttentionCase:
    """Sequences of one context length in a filled pool, their last `rows` positions to compute; the
    first `shared` positions are in the same blocks."""

    def __init__(
        self,
        rng: np.random.Generator,
        layout: KVLayout,
        *,
        heads: int,
        sequences: int,
        context: int,
        rows: int,
        shared: int = 0,
    ) -> None:
        count = ceil_div(context, layout.block_size)
        blocks = sequences * count
        self.pool = _filled(rng, layout, blocks)
        self.table = rng.permutation(blocks).astype(np.int32).reshape(sequences, count)
        self.table[:, : shared // layout.block_size] = self.table[0, : shared // layout.block_size]
        width = (heads + 2 * layout.kv_heads) * layout.head_dim
        self.qkv: F32 = rng.standard_normal((sequences * rows, width), np.float32)
        self.out = np.empty((sequences * rows, heads * layout.head_dim), np.float32)
        self.layout = layout
        self.batch = Batch(
            tokens=np.zeros(sequences * rows, np.int32),
            positions=np.tile(np.arange(context - rows, context, dtype=np.int32), sequences),
            query_start=np.arange(0, sequences * rows + 1, rows, dtype=np.int32),
            context=np.full(sequences, context, np.int32),
            tables=(self.table,),
            logit_rows=np.zeros(0, np.int32),
        )

    @property
    def cost(self) -> Cost:
        """Of one layer."""
        return costs.paged_attention(self.batch, self._pages(0), self.out)

    def step(self, ops: NativeOps) -> None:
        """One call for each layer."""
        for layer in range(self.layout.layers):
            scale = self.layout.head_dim**-0.5
            ops.paged_attention(self.qkv, self.batch, self._pages(layer), self.out, scale=scale)

    def _pages(self, layer: int) -> KVPages:
        return KVPages(pool=self.pool, layout=self.layout, layer=layer, table=self.table)


def _filled(rng: np.random.Generator, layout: KVLayout, blocks: int) -> KVPool:
    if layout.dtype == "bfloat16":
        filling = rng.standard_normal(2**16, np.float32).astype(bfloat16)
        return np.resize(filling, (blocks, *layout.shape))
    pool: KVPool = np.resize(rng.integers(0, 256, 2**16, np.uint8), (blocks, *layout.shape))
    pool[..., : TILE_TOKENS * SCALE_BYTES].view(np.float32)[...] = 2.0**-6
    return pool


def measure_linear(
    ops: NativeOps,
    shapes: Sequence[Shape],
    forms: Sequence[Products],
    rows: Sequence[int],
    ceilings: Ceilings,
    *,
    budget_s: float = BUDGET_S,
) -> list[LinearRow]:
    """Each matrix with each number of rows; the forms take turns, so that they meet the same
    machine."""
    rng = np.random.default_rng(7)
    found = []
    for shape in shapes:
        cases = [LinearCase(ops, shape, form, rng) for form in forms]
        found += [_linear_row(case, count, ceilings, budget_s) for count in rows for case in cases]
    return found


def measure_attention(
    ops: NativeOps,
    layout: KVLayout,
    heads: int,
    loads: Sequence[tuple[int, int]],
    ceilings: Ceilings,
    *,
    budget_s: float = BUDGET_S,
) -> list[AttentionRow]:
    """Decode of (sequences, context), in blocks of `layout` and in one block a sequence."""
    rng = np.random.default_rng(7)
    found = []
    for sequences, context in loads:
        # The slab is the same kernel on one block as long as the context.
        slab = ceil_div(context, layout.block_size) * layout.block_size
        cases = [
            AttentionCase(
                rng,
                replace(layout, layers=cold_layers(layout, sequences * slab), block_size=size),
                heads=heads,
                sequences=sequences,
                context=context,
                rows=1,
            )
            for size in (layout.block_size, slab)
        ]
        steps = [best_s(partial(case.step, ops), budget_s) for case in cases]
        seconds = [step / case.layout.layers for step, case in zip(steps, cases, strict=True)]
        found.append(_attention_row(cases[0], seconds, ceilings))
    return found


def cold_layers(layout: KVLayout, tokens: int) -> int:
    """So many layers of so many tokens are more than caches hold."""
    token_bytes = 2 * layout.kv_heads * layout.head_bytes
    return max(1, ceil_div(COLD_BYTES, tokens * token_bytes))


def _linear_row(case: LinearCase, rows: int, ceilings: Ceilings, budget_s: float) -> LinearRow:
    seconds, cost = case.time(rows, budget_s)
    return LinearRow(
        matrix=case.shape.name,
        inputs=case.shape.inputs,
        outputs=case.shape.outputs,
        form=case.form,
        rows=rows,
        us=1e6 * seconds,
        gops=cost.operations / seconds / 1e9,
        gb_s=cost.size_bytes / seconds / 1e9,
        share=ceilings.floor_s(cost, case.form) / seconds,
    )


def _attention_row(
    case: AttentionCase, seconds: Sequence[float], ceilings: Ceilings
) -> AttentionRow:
    paged, contiguous = seconds
    cost = case.cost
    return AttentionRow(
        sequences=len(case.batch.context),
        context=int(case.batch.context[0]),
        dtype=case.layout.dtype,
        us=1e6 * paged,
        gb_s=cost.size_bytes / paged / 1e9,
        share=ceilings.floor_s(cost) / paged,
        over_contiguous=paged / contiguous,
    )


def _weight_of(form: Products, rng: np.random.Generator, shape: Shape) -> Weight:
    if form == "bf16":
        return rng.standard_normal((shape.outputs, shape.inputs), np.float32).astype(bfloat16)
    bits = BITS[form]
    groups = ceil_div(shape.inputs, GROUP)
    values = rng.integers(0, 256, (shape.outputs, groups * GROUP * bits // 8), np.uint8)
    scales = np.ones((shape.outputs, groups), np.float16)
    multiples = np.ones((shape.outputs, 2 * groups), np.int8) if bits == 6 else None
    return Quantised(bits, shape.inputs, values, scales, multiples=multiples)
