"""The least that each op has to move and to compute, from its shapes.

`size_bytes` counts everything that goes in or out once, as if caches held all that is used again:
weights as packed, activations, and keys and values of the blocks that the sequences' rows see,
a block that several of them share once. `operations` are products and sums; an exponential, a
comparison or a division is one, and what takes less than a hundredth (the norm, bias and activation
of `linear`, the softmax of attention) is left out.

Symbols as in `octavo.ops.api`.
"""

from typing import Literal, NamedTuple

import numpy as np

from octavo.ops.api import F32, I32, Batch, Entries, KVPages, KVPool, Norm, Packed, Rope

Products = Literal["bf16", "int8", "int6", "int4"]
"""Those that `linear` takes, by the form of its weights."""


class Cost(NamedTuple):
    size_bytes: int
    operations: int


def embed(table: Packed, tokens: I32, out: F32) -> Cost:
    return Cost(len(tokens) * (table.nbytes // table.rows) + out.nbytes, 0)


def linear(
    x: F32,
    weight: Packed,
    out: F32,
    *,
    norm: Norm | None = None,
    bias: F32 | None = None,
    add: bool = False,
) -> Cost:
    """2 T N K operations; of a gated pair N is 2F."""
    vectors = sum(v.nbytes for v in (bias, None if norm is None else norm.weight) if v is not None)
    activations = x.nbytes + out.nbytes * (2 if add else 1)
    return Cost(weight.nbytes + vectors + activations, 2 * len(x) * weight.rows * weight.columns)


def rms_norm(x: F32, norm: Norm, out: F32) -> Cost:
    """A square, a sum, and two products an element."""
    return Cost(x.nbytes + norm.weight.nbytes + out.nbytes, 4 * x.size)


def rope_write_kv(qkv: F32, rope: Rope | None, kv: KVPages) -> Cost:
    """Six operations turn a pair. Queries and keys are read and written, values read; keys and
    values go to the pool."""
    rows, width = qkv.shape
    layout = kv.layout
    stored = layout.kv_heads * layout.head_dim
    turned_bytes = 4 * rows * (width - stored)
    size_bytes = qkv.nbytes + rows * 2 * layout.kv_heads * layout.head_bytes
    if rope is None:
        return Cost(size_bytes, 0)
    heads = width // layout.head_dim - layout.kv_heads
    pairs = rope.cos.shape[1]
    return Cost(size_bytes + turned_bytes + 2 * 4 * rows * pairs, 6 * rows * heads * pairs)


def paged_attention(batch: Batch, kv: KVPages, out: F32, *, window: int | None = None) -> Cost:
    """A product and a sum for q·k and for p·v, of each head, row, position it sees and element."""
    layout = kv.layout
    seen = batch.positions.astype(np.int64) + 1
    if window is not None:
        seen = np.minimum(seen, window)
    slots = layout.block_size * len(_blocks_seen(batch, kv, window))
    # A block that nobody shares is counted to the last position that is seen of it.
    held = min(slots, int(_positions_seen(batch, window).sum()))
    kv_bytes = 2 * layout.kv_heads * layout.head_bytes * held
    return Cost(kv_bytes + 2 * out.nbytes, 4 * out.shape[1] * int(seen.sum()))


def copy_blocks(pool: KVPool, sources: I32) -> Cost:
    return Cost(2 * len(sources) * (pool.nbytes // len(pool)), 0)


def take_rows(out: F32) -> Cost:
    return Cost(2 * out.nbytes, 0)


def argmax(logits: F32) -> Cost:
    """A comparison, a difference, an exponential and a sum an element."""
    return Cost(logits.nbytes, 4 * logits.size)


def likeliest(logits: F32, rows: I32, ids: I32) -> Cost:
    """A comparison an element."""
    elements = len(rows) * logits.shape[1]
    return Cost(4 * elements + 8 * ids.size, elements)


def add_bias(entries: Entries) -> Cost:
    """Of each id the logit comes and goes, the bias comes, and what was before goes."""
    count = len(entries.ids)
    return Cost(5 * 4 * count, count)


def penalise(entries: Entries) -> Cost:
    """As for a bias, with a count in its place: a comparison, a quotient, a product, two
    differences."""
    count = len(entries.ids)
    return Cost(5 * 4 * count, 5 * count)


def mask(logits: F32, allowed: I32) -> Cost:
    """Mostly each logit is written, as it was or not."""
    return Cost(4 * len(allowed) * logits.shape[1] + allowed.nbytes, 0)


def draw(logits: F32, rows: I32) -> Cost:
    """A product, a difference, an exponential and a sum an element; filters take more."""
    elements = len(rows) * logits.shape[1]
    return Cost(4 * elements, 4 * elements)


def _first_seen(batch: Batch, window: int | None) -> I32:
    """The first position that any row of each sequence sees."""
    first = batch.context - np.diff(batch.query_start)
    seen: I32 = np.maximum(first + 1 - window, 0) if window is not None else np.zeros_like(first)
    return seen


def _positions_seen(batch: Batch, window: int | None) -> I32:
    """How many positions the rows of each sequence see together."""
    seen: I32 = batch.context - _first_seen(batch, window)
    return seen


def _blocks_seen(batch: Batch, kv: KVPages, window: int | None) -> I32:
    """The blocks that hold them, each once."""
    size = kv.layout.block_size
    index = np.arange(kv.table.shape[1])
    last = (batch.context - 1) // size
    used = (index >= (_first_seen(batch, window) // size)[:, None]) & (index <= last[:, None])
    blocks: I32 = np.unique(kv.table[used])
    return blocks
