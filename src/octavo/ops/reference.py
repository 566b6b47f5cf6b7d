"""The meaning of every op, in plain numpy.

Slow and without cleverness: each op is its formula, computed in float64 (the truth for tests of
the other backends) or in float32. Rows go one by one wherever a sum is taken, so the rule of the
same bits holds here too. The first part reads and writes single tokens in the tile layout of
`KVLayout`; tests and movers use it to look into a page.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo.ops.api import (
    BF16,
    BF16_FORM,
    F32,
    GROUP,
    I32,
    SCALE_BYTES,
    TILE_TOKENS,
    WORD,
    Activation,
    Batch,
    Draws,
    Encoded,
    Entries,
    KVLayout,
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
from octavo.ops.encodings import rounded
from octavo.ops.integers import integers_of

Floats = npt.NDArray[Any]
"""float32 or float64, as the backend was asked to compute."""
I8 = npt.NDArray[np.int8]


def key_page(pool: KVPool, layout: KVLayout, block: int, layer: int) -> BF16:
    """The bfloat16 keys of one page as a view `[Hk, B / 16, E / 2, 16, 2]`."""
    shape = (layout.kv_heads, layout.tiles, layout.head_dim // 2, TILE_TOKENS, 2)
    page: BF16 = pool[block, layer, 0].reshape(shape)
    return page


def value_page(pool: KVPool, layout: KVLayout, block: int, layer: int) -> BF16:
    """The bfloat16 values of one page as a view `[Hk, B / 16, 8, E, 2]`."""
    shape = (layout.kv_heads, layout.tiles, TILE_TOKENS // 2, layout.head_dim, 2)
    page: BF16 = pool[block, layer, 1].reshape(shape)
    return page


def scaled_page(
    pool: KVPool, layout: KVLayout, block: int, layer: int, part: int
) -> tuple[F32, I8]:
    """The int8 keys (part 0) or values (1) of one page as views: scales `[Hk, B / 16, 16]`, and
    integers `[Hk, B / 16, 16, E]`."""
    tiles = pool[block, layer, part]
    start, heads = TILE_TOKENS * SCALE_BYTES, tiles.shape[:2]
    integers = tiles[..., start:].view(np.int8)
    if part == 0:
        return tiles[..., :start].view(np.float32), integers.reshape(
            *heads, layout.head_dim, TILE_TOKENS
        ).swapaxes(2, 3)
    return tiles[..., :start].view(np.float32), integers.reshape(
        *heads, TILE_TOKENS, layout.head_dim
    )


def write_token(
    pool: KVPool, layout: KVLayout, block: int, layer: int, offset: int, key: Floats, value: Floats
) -> None:
    """Put the key and value of the token at `offset` in `block`, rounded as the layout says.

    Shapes   key, value [Hk, E]; 0 <= offset < B.
    """
    tile, slot = divmod(offset, TILE_TOKENS)
    if layout.dtype == "int8":
        for part, heads in ((0, key), (1, value)):
            scales, integers = scaled_page(pool, layout, block, layer, part)
            for head, row in enumerate(heads):
                scales[head, tile, slot], integers[head, tile, slot] = scaled_row(row)
        return
    pairs = key.reshape(layout.kv_heads, layout.head_dim // 2, 2)
    key_page(pool, layout, block, layer)[:, tile, :, slot, :] = pairs.astype(pool.dtype)
    values = value_page(pool, layout, block, layer)
    values[:, tile, slot // 2, :, slot % 2] = value.astype(pool.dtype)


def read_token(
    pool: KVPool, layout: KVLayout, block: int, layer: int, offset: int
) -> tuple[Floats, Floats]:
    """Copies of the key and the value [Hk, E] of the token at `offset` in `block`; of int8 as
    float64, exact."""
    tile, slot = divmod(offset, TILE_TOKENS)
    if layout.dtype == "int8":
        pages = (scaled_page(pool, layout, block, layer, part) for part in (0, 1))
        key, value = (
            scales[:, tile, slot, None].astype(np.float64) * integers[:, tile, slot]
            for scales, integers in pages
        )
        return key, value
    key = key_page(pool, layout, block, layer)[:, tile, :, slot, :]
    value = value_page(pool, layout, block, layer)[:, tile, slot // 2, :, slot % 2]
    return key.reshape(layout.kv_heads, layout.head_dim), value.copy()


def read_sequence(kv: KVPages, sequence: int, length: int, first: int = 0) -> tuple[Floats, Floats]:
    """The keys and values [length - first, Hk, E] of positions first … length - 1 of a sequence."""
    shape = (length - first, kv.layout.kv_heads, kv.layout.head_dim)
    dtype = np.float64 if kv.layout.dtype == "int8" else kv.pool.dtype
    keys, values = np.empty(shape, dtype), np.empty(shape, dtype)
    for row, position in enumerate(range(first, length)):
        block, offset = place(kv, sequence, position)
        keys[row], values[row] = read_token(kv.pool, kv.layout, block, kv.layer, offset)
    return keys, values


def place(kv: KVPages, sequence: int, position: int) -> tuple[int, int]:
    """The block that holds a position, and the position's offset in it."""
    index, offset = divmod(position, kv.layout.block_size)
    return int(kv.table[sequence, index]), offset


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed weight of the reference: the matrix itself, widened to the computing dtype.

    `quantised`: it was stored as integers, and so are the activations that it is multiplied by.
    """

    values: Floats
    quantised: bool = False

    @property
    def rows(self) -> int:
        return int(self.values.shape[0])

    @property
    def columns(self) -> int:
        return int(self.values.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)


def _is_quantised(weight: Weight) -> bool:
    if isinstance(weight, Encoded):
        return weight.form != BF16_FORM
    return isinstance(weight, Quantised)


class ReferenceOps:
    """`Ops` in numpy. Pools may hold bfloat16 or any other float dtype: writes round to it."""

    def __init__(self, dtype: npt.DTypeLike = np.float64) -> None:
        self._dtype = np.dtype(dtype)

    @property
    def name(self) -> str:
        return "reference"

    def pack(
        self, weight: Weight | Sequence[Weight], *, done: Callable[[int], None] | None = None
    ) -> Matrix:
        parts = [weight] if isinstance(weight, np.ndarray | Encoded | Quantised) else list(weight)
        (quantised,) = {_is_quantised(part) for part in parts}
        with np.errstate(invalid="ignore"):
            widened = [self._widened(part) for part in parts]
        if done is not None:
            for number in range(len(parts)):
                done(number)
        faulty = (n for n, part in enumerate(widened) if not np.isfinite(part).all())
        if (first := next(faulty, None)) is not None:
            raise NotFinite(first)
        return Matrix(np.concatenate(widened), quantised)

    def _widened(self, weight: Weight) -> Floats:
        if isinstance(weight, Encoded):
            weight = rounded(weight) if weight.form == BF16_FORM else integers_of(weight)
        if isinstance(weight, Quantised):
            return weight.dequantised(self._dtype)
        widened: Floats = weight.astype(self._dtype)
        return widened

    def pack_gated(self, gate: Weight, up: Weight) -> Matrix:
        return self.pack([gate, up])

    def unpack(self, weight: Packed) -> BF16:
        return _values(weight).astype(ml_dtypes.bfloat16)

    def embed(self, table: Packed, tokens: I32, out: F32) -> None:
        out[...] = _values(table)[tokens]

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
        matrix = _values(weight)
        for row, target in zip(x.astype(self._dtype), out, strict=True):
            inputs = row if norm is None else _normed(row, norm)
            if isinstance(weight, Matrix) and weight.quantised:
                inputs = quantised_row(inputs)
            y = matrix @ inputs
            if bias is not None:
                y = y + bias
            if gated is not None:
                gate, up = np.split(y, 2)
                y = _activated(gate, gated) * up
            target[...] = target + y if add else y

    def rms_norm(self, x: F32, norm: Norm, out: F32) -> None:
        for row, target in zip(x.astype(self._dtype), out, strict=True):
            target[...] = _normed(row, norm)

    def rope_write_kv(self, qkv: F32, batch: Batch, rope: Rope | None, kv: KVPages) -> None:
        heads = qkv.reshape(len(qkv), -1, kv.layout.head_dim)
        kv_heads = kv.layout.kv_heads
        for sequence, row, position in _rows(batch):
            if rope is not None:
                rotated = heads[row, :-kv_heads]
                rotated[...] = _rotated(rotated.astype(self._dtype), rope, position)
            block, offset = place(kv, sequence, position)
            key, value = heads[row, -2 * kv_heads : -kv_heads], heads[row, -kv_heads:]
            write_token(kv.pool, kv.layout, block, kv.layer, offset, key, value)

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
        kv_heads, head_dim = kv.layout.kv_heads, kv.layout.head_dim
        queries = qkv.reshape(len(qkv), -1, head_dim)[:, : -2 * kv_heads]
        group = queries.shape[1] // kv_heads
        targets = out.reshape(queries.shape)
        counts = np.diff(batch.query_start)
        firsts = [
            0 if window is None else max(0, int(oldest) + 1 - window)
            for oldest in batch.context - counts
        ]
        gathered = [
            tuple(part.astype(self._dtype) for part in read_sequence(kv, sequence, length, first))
            for sequence, (length, first) in enumerate(zip(batch.context, firsts, strict=True))
        ]
        for sequence, row, position in _rows(batch):
            keys, values = gathered[sequence]
            first, last = firsts[sequence], position + 1
            start = first if window is None else max(first, last - window)
            for head, query in enumerate(queries[row].astype(self._dtype)):
                seen = np.s_[start - first : last - first, head // group]
                weights = _softmax(keys[seen] @ query * scale)
                targets[row, head] = weights @ values[seen]

    def copy_blocks(self, pool: KVPool, sources: I32, targets: I32) -> None:
        for source, target in zip(sources, targets, strict=True):
            pool[target] = pool[source]

    def take_rows(self, x: F32, rows: I32, out: F32) -> None:
        out[...] = x[rows]

    def argmax(self, logits: F32, out: I32, logprob: F32) -> None:
        for index, row in enumerate(logits.astype(self._dtype)):
            if np.isnan(row).any() or not np.isfinite(row.max()):
                out[index], logprob[index] = -1, np.nan
                continue
            best = int(row.argmax())
            out[index] = best
            logprob[index] = -np.log(np.exp(row - row[best]).sum())

    def likeliest(self, logits: F32, rows: I32, ids: I32, values: F32) -> None:
        for index, row in enumerate(logits[rows]):
            ids[index] = np.argsort(-row, kind="stable")[: ids.shape[1]]
            values[index] = row[ids[index]]

    def add_bias(self, logits: F32, entries: Entries, bias: F32, before: F32) -> None:
        for row, part in _each_row(entries):
            ids = entries.ids[part]
            before[part] = logits[row, ids]
            logits[row, ids] += bias[part]

    def penalise(self, logits: F32, entries: Entries, penalties: Penalties, before: F32) -> None:
        for index, (row, part) in enumerate(_each_row(entries)):
            ids, counts = entries.ids[part], penalties.counts[part]
            logit = before[part] = logits[row, ids]
            repetition = penalties.repetition[index]
            scaled = np.where(logit > 0, logit / repetition, logit * repetition)
            often = penalties.frequency[index] * counts.astype(np.float32)
            there = np.where(counts > 0, penalties.presence[index], np.float32(0))
            logits[row, ids] = scaled - often - there

    def mask(self, logits: F32, rows: I32, allowed: I32) -> None:
        tokens = np.arange(logits.shape[1])
        for row, words in zip(rows, allowed.view(np.uint32), strict=True):
            bits = words[tokens // WORD] >> (tokens % WORD).astype(np.uint32) & 1
            logits[row, bits == 0] = -np.inf

    def draw(self, logits: F32, rows: I32, draws: Draws, out: I32) -> None:
        for index, row in enumerate(logits[rows].astype(self._dtype)):
            out[index] = _drawn(row, Draws(*(values[index] for values in draws)))


def _each_row(entries: Entries) -> Iterator[tuple[int, slice]]:
    """Each row, and where its ids stand."""
    for index, row in enumerate(entries.rows.tolist()):
        yield row, slice(int(entries.start[index]), int(entries.start[index + 1]))


def _drawn(logits: Floats, how: Draws) -> int:
    """The token drawn from one row; -1 if it has no finite value. `how` has one of each."""
    if not np.isfinite(logits.max()):
        return -1
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / how.temperature)
    if how.top_n_sigma > 0:
        spread = logits[np.isfinite(logits)].astype(np.float64).std()
        weights[logits < logits.max() - float(how.top_n_sigma) * spread] = 0
    ids = np.argsort(-weights, kind="stable")
    ids = ids[weights[ids] > 0]
    if how.top_k:
        ids = ids[: how.top_k]
    if how.typical_p < 1:
        ids = ids[_typical(weights[ids], how.typical_p)]
    if how.top_p < 1:
        before = np.cumsum(weights[ids]) - weights[ids]
        ids = ids[: max(1, int((before < how.top_p * weights[ids].sum()).sum()))]
    ids = ids[weights[ids] >= how.min_p * weights[ids[0]]]
    if how.xtc_threshold <= 0.5:
        above = int((weights[ids] >= how.xtc_threshold * weights[ids].sum()).sum())
        ids = ids[max(0, above - 1) :]
    ids.sort()
    cumulative = np.cumsum(weights[ids])
    place = int(np.searchsorted(cumulative, how.point * cumulative[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])


def _typical(weights: Floats, share: Any) -> npt.NDArray[np.intp]:
    """Which of these, in their order, are nearest to the mean surprise, up to such a share."""
    shares = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    surprise = -np.log(shares)
    nearest = np.argsort(np.abs(surprise - (shares * surprise).sum()), kind="stable")
    reached = np.cumsum(shares[nearest])
    kept: npt.NDArray[np.intp] = np.sort(nearest[: int((reached <= share).sum()) + 1])
    return kept


def quantised_row(row: Floats) -> Floats:
    """The row as quantised weights see it: each group of 32 as scale · q, by the rule of `linear`.

    Computed in float32, where rounding decides, and given in the row's own dtype. A group that is
    not finite comes back as NaN, one below 2^-100 as zeros.
    """
    padded = np.zeros(-(-row.size // GROUP) * GROUP, np.float32)
    padded[: row.size] = row
    scales, integers = _scaled(padded.reshape(-1, GROUP))
    result: Floats = (integers * scales.astype(row.dtype)).reshape(-1)[: row.size]
    return result


def scaled_row(row: Floats) -> tuple[np.float32, I8]:
    """The scale and the integers of a key or value in int8; the scale of one that is not finite is
    NaN."""
    scales, integers = _scaled(row.astype(np.float32).reshape(1, -1))
    return scales[0, 0], integers[0].astype(np.int8)


def _scaled(groups: F32) -> tuple[F32, F32]:
    """Of each row its scale [.., 1], max |x| / 127, and its integers; 0 below 2^-100."""
    most = np.abs(groups).max(axis=1, keepdims=True)
    usual = np.isfinite(most) & (most >= 2.0**-100)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=usual)
    with np.errstate(invalid="ignore"):
        integers = np.where(usual, np.rint(groups * inverse), 0)
        scales = np.where(usual, most / np.float32(127), most * 0)
    return scales, integers


def _values(weight: Packed) -> Floats:
    assert isinstance(weight, Matrix), "a weight packed by another backend"
    return weight.values


def _rows(batch: Batch) -> list[tuple[int, int, int]]:
    """(sequence, row, position) of every token of the batch."""
    starts = batch.query_start
    return [
        (sequence, row, int(batch.positions[row]))
        for sequence in range(len(starts) - 1)
        for row in range(int(starts[sequence]), int(starts[sequence + 1]))
    ]


def _normed(row: Floats, norm: Norm) -> Floats:
    result: Floats = row / np.sqrt(np.mean(row * row) + row.dtype.type(norm.eps)) * norm.weight
    return result


def _activated(gate: Floats, activation: Activation) -> Floats:
    if activation == "silu":
        with np.errstate(over="ignore"):  # exp(-gate) = inf is right: the result is -0
            silu: Floats = gate / (1 + np.exp(-gate))
        return silu
    inner = np.sqrt(2 / np.pi).astype(gate.dtype) * (gate + 0.044715 * gate**3)
    gelu: Floats = 0.5 * gate * (1 + np.tanh(inner))
    return gelu


def _rotated(heads: Floats, rope: Rope, position: int) -> Floats:
    """Each head [.., E] with its pairs (i, i + E_rot / 2) turned by the angle of `position`."""
    cos, sin = rope.cos[position], rope.sin[position]
    half = len(cos)
    first, second, rest = np.split(heads, [half, 2 * half], axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return np.concatenate(turned, axis=-1)


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max())
    result: Floats = weights / weights.sum()
    return result
