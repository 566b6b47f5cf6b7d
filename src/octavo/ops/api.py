"""The contract of every kernel: what a model may call, and what it gets.

Symbols  T tokens in the batch, S sequences in it, D hidden size, V vocabulary, Hq query heads,
         Hk key/value heads, E head size, B block size (a multiple of 16), R rows of logits.

Activations are float32 and C-contiguous; keys and values are bfloat16, or int8 with a scale;
weights are bfloat16, or small integers with a scale. A kernel that multiplies in bfloat16 rounds
its activations on the way in.

Rule of all ops (the same bits): an output row depends on its own input row alone. The order in
which its sums are taken follows from the shapes of the weights and the row's position, never from
T, from the number of threads, or from where a block lies. Rows are not checked for being finite.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo.units import ceil_div

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
BF16 = npt.NDArray[Any]
"""ml_dtypes.bfloat16"""

F16 = npt.NDArray[np.float16]
I8 = npt.NDArray[np.int8]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

TILE_TOKENS = 16
SCALE_BYTES = 4
"""Of the scale that a head of a token has in int8: float32."""
GROUP = 32
"""Inputs that share a scale, of quantised weights and of what they are multiplied by."""
SIXES_ZERO = 32
"""The integer of six bits that means 0."""
PANEL = 16
WORD = 32
"""Bits of an element of a mask."""
"""Rows to whose multiple packed matrices are padded; their columns are padded to whole groups."""

Activation = Literal["silu", "gelu_tanh"]
KVType = Literal["bfloat16", "int8"]
KVPool = npt.NDArray[Any]
"""`KVLayout.element`: ml_dtypes.bfloat16, or uint8."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How the KV of one block lies in memory.

    A block holds `block_size` tokens of `layers` layers. The pool is one array
    `[blocks, layers, 2, Hk, B / 16, elements of a tile]`: a page (one layer of one block) is K then
    V; each is, head by head, a run of 16-token tiles. Inside a tile of bfloat16, 16 · E elements,

        K  [E / 2][16 tokens][2]    pairs along the head dimension
        V  [8][E][2]                pairs along the tokens

    so that a tile is the right-hand operand of a bfloat16 matrix unit as it lies: K for q·Kᵀ,
    V for p·V. A tile of int8 has 16 scales, float32, before its bytes, 16 · (4 + E) in all:

        K  [16 scales][E][16 tokens]
        V  [16 scales][16 tokens][E]

    A head of a token is scale · q, with scale = max |x| / 127 and q rounded to nearest even.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int = TILE_TOKENS
    dtype: KVType = "bfloat16"

    @property
    def tiles(self) -> int:
        return self.block_size // TILE_TOKENS

    @property
    def element(self) -> np.dtype[Any]:
        return np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.uint8)

    @property
    def head_bytes(self) -> int:
        """The key, or the value, of one token and head."""
        return 2 * self.head_dim if self.dtype == "bfloat16" else SCALE_BYTES + self.head_dim

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one block's elements, without the leading block axis."""
        elements = TILE_TOKENS * self.head_bytes // self.element.itemsize
        return (self.layers, 2, self.kv_heads, self.tiles, elements)

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.block_size * self.head_bytes


@dataclass(frozen=True, slots=True)
class KVPages:
    """The pages of one layer, as an op sees them.

    `pool` is the whole pool `[blocks, *layout.shape]`; `layer` counts within the layer group;
    `table` is the block table of each sequence in the batch, int32 `[S, W]`. Entries that nobody
    needs any more may say anything.
    """

    pool: KVPool
    layout: KVLayout
    layer: int
    table: I32


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as arrays: the tokens of S sequences back to back.

    Shapes   tokens, positions int32 [T]; query_start int32 [S + 1], the rows of sequence s are
             query_start[s] : query_start[s + 1]; context int32 [S], the number of positions of s
             that have KV once this step has written its own; tables one int32 [S, W] a layer group;
             logit_rows int32 [R], the rows whose logits are wanted.
    Keeps    positions of a sequence are consecutive and end at context[s] - 1.
    """

    tokens: I32
    positions: I32
    query_start: I32
    context: I32
    tables: tuple[I32, ...]
    logit_rows: I32


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS normalisation: x / sqrt(mean(x²) + eps) · weight. `weight` float32 [D]."""

    weight: F32
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary tables, float32 [positions, E_rot / 2]. Pairs are (i, i + E_rot / 2), as in the
    checkpoints of transformers; loaders of other layouts reorder the weights instead."""

    cos: F32
    sin: F32


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix [N, K] of integers of a few bits, with a scale for each row and group of 32 inputs.

        8 bits   scale · q                           q from -128 to 127
        6 bits   scale · s · (q - 32)                q from 0 to 63, s of either half of the group
                 scale · s · (q - 32) + offset · t   where there are offsets: s and t of the group
        4 bits   scale · (q - 8)                     q from 0 to 15
                 scale · q + offset                  where there are offsets

    Shapes   G = ceil(K / 32) groups. `values` uint8: of 8 bits [N, 32 G], the bytes of int8; of
             6 bits [N, 24 G], twelve bytes for each half of a group: byte j holds input j in its
             lower bits, and above them bits 2 (j / 4) and the next of input 12 + j % 4; of 4 bits
             [N, 16 G], byte j of a group holds input j in its lower half and input 16 + j in its
             upper one. `scales`, `offsets` float16 [N, G], finite. `multiples` int8 [N, 2 G] of 6
             bits alone: the two of a group are s of its halves, or s and t. What lies beyond K is
             not used.
    """

    bits: Literal[8, 6, 4]
    columns: int
    values: U8
    scales: F16
    offsets: F16 | None = None
    multiples: I8 | None = None

    @property
    def rows(self) -> int:
        return len(self.values)

    def integers(self) -> I8:
        """q as int8 [N, K], less what stands for zero."""
        if self.bits == 8:
            return self.values.view(np.int8)[:, : self.columns]
        if self.bits == 6:
            return _unpacked_sixes(self.values)[:, : self.columns]
        groups = self.values.reshape(self.rows, -1, GROUP // 2)
        both = np.concatenate([groups & 15, groups >> 4], axis=2).reshape(self.rows, -1)
        zero = np.int8(8 if self.offsets is None else 0)
        integers: I8 = both[:, : self.columns].astype(np.int8) - zero
        return integers

    def dequantised(self, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """The matrix as floats [N, K]; exact in float64."""
        scales = np.repeat(self.scales.astype(dtype), 2, axis=1)
        offsets = None if self.offsets is None else self.offsets.astype(dtype)
        if self.multiples is not None and offsets is None:
            scales *= self.multiples
        if self.multiples is not None and offsets is not None:
            scales *= np.repeat(self.multiples[:, 0::2], 2, axis=1)
            offsets *= self.multiples[:, 1::2]
        scales = np.repeat(scales, GROUP // 2, axis=1)[:, : self.columns]
        matrix: npt.NDArray[Any] = scales * self.integers()
        if offsets is not None:
            matrix += np.repeat(offsets, GROUP, axis=1)[:, : self.columns]
        return matrix


def _unpacked_sixes(values: U8) -> I8:
    """All integers [N, 32 G] of bytes [N, 24 G], less 32."""
    words = values.reshape(len(values), -1, 3, 4)
    low = words & np.uint8(63)
    shifts = np.array([0, 2, 4], np.uint8)[:, None]
    last = np.bitwise_or.reduce((words >> np.uint8(6)) << shifts, axis=2, keepdims=True)
    quads = np.concatenate([low, last], axis=2).reshape(len(values), -1)
    integers: I8 = quads.view(np.int8) - np.int8(SIXES_ZERO)
    return integers


@dataclass(frozen=True, slots=True)
class Form:
    """Bits of an element, and whether groups have offsets."""

    bits: Literal[16, 8, 6, 4]
    offsets: bool = False

    @property
    def integer_bits(self) -> Literal[8, 6, 4]:
        assert self.bits != 16, "no integers"
        return self.bits

    def nbytes(self, rows: int, columns: int) -> int:
        """What a matrix takes once packed."""
        groups = ceil_div(columns, GROUP)
        factors = 0 if self.bits == 16 else 2 + 2 * self.offsets + 2 * (self.bits == 6)
        return ceil_div(rows, PANEL) * PANEL * groups * (GROUP * self.bits // 8 + factors)


BF16_FORM, INT8, INT6, INT4 = Form(16), Form(8), Form(6), Form(4)
INT6_OFFSETS, INT4_OFFSETS = Form(6, offsets=True), Form(4, offsets=True)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A matrix [N, K] as a checkpoint stores it, in one of the kinds of `octavo.ops.encodings`.

    Packing brings it into `form`: rounds it to bfloat16, ties to even, or makes integers of it as
    `octavo.ops.integers` says. `stored` uint8 [N, bytes of a row].
    """

    kind: str
    columns: int
    stored: U8
    form: Form = BF16_FORM

    @property
    def rows(self) -> int:
        return len(self.stored)


Weight = BF16 | Encoded | Quantised


class NotFinite(ValueError):
    """A weight holds NaN, or what is infinite in its form: number `part` of those stacked."""

    def __init__(self, part: int) -> None:
        super().__init__(f"weight {part} holds NaN or infinite values")
        self.part = part


class Entries(NamedTuple):
    """Some tokens of each of E rows: of row `rows[e]` they are `ids[start[e] : start[e + 1]]`.

    Shapes   rows int32 [E], start int32 [E + 1], ids int32 [N].
    Keeps    no row stands twice in `rows`, and no token twice in a row's ids.
    """

    rows: I32
    start: I32
    ids: I32


class Penalties(NamedTuple):
    """What `penalise` takes: how often each id was answered, and how much that counts in each row.

    Shapes   counts int32 [N]; [E] each, float32: repetition above 0, presence, frequency.
    """

    counts: I32
    repetition: F32
    presence: F32
    frequency: F32


class Draws(NamedTuple):
    """How a token is drawn from each of D rows.

    Shapes   [D] each: temperature float32 above 0; top_k int32, 0 for off; top_p float64, 1 for
             off; min_p float32, 0 for off; point float64 in [0, 1); top_n_sigma float32, 0 for off;
             typical_p float64, 1 for off; xtc_threshold float64, above 0.5 for off.
    """

    temperature: F32
    top_k: I32
    top_p: F64
    min_p: F32
    point: F64
    top_n_sigma: F32
    typical_p: F64
    xtc_threshold: F64


class Packed(Protocol):
    """A weight matrix [N, K] in the order in which a backend streams it. Opaque but for shape."""

    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class Ops(Protocol):
    """One backend. Methods write into `out`, return nothing, and keep no reference to arguments."""

    @property
    def name(self) -> str:
        """`reference`, or `native` with its instruction set: `native-avx2`."""

    def pack(
        self, weight: Weight | Sequence[Weight], *, done: Callable[[int], None] | None = None
    ) -> Packed:
        """Pack [N, K] for `linear` and `embed`; several are stacked along N. Any N, K ≥ 1.

        `done` is told the number of each `Encoded` matrix when it is not read any more.

        Those that are stacked all take one form. A `Quantised` matrix goes with such alone.

        Raises   NotFinite: an element, or the scale or offset of a group, is not.
        """

    def pack_gated(self, gate: Weight, up: Weight) -> Packed:
        """Pack two [F, K] matrices so that `linear(..., gated=act)` gives act(gate·x) · (up·x).

        Raises   NotFinite, as `pack`.
        """

    def unpack(self, weight: Packed) -> BF16:
        """The bfloat16 matrix [N, K] that was packed; for a gated pair gate over up, [2F, K]."""

    def embed(self, table: Packed, tokens: I32, out: F32) -> None:
        """out[t] = table[tokens[t]]. Shapes: tokens [T], out [T, D]."""

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
        """out = act(norm(x) · weightᵀ + bias), added to what `out` holds if `add`.

        Shapes   x [T, K], out [T, N], or [T, F] for a gated pair; it may be columns of a wider
                 array. bias [N], or [2F] for a gated pair, gate then up.
        Rule     quantised weights meet quantised activations: each group of 32 of norm(x) becomes
                 scale · q, with scale = max |x| / 127 and q rounded to nearest even. The products
                 within a group, with s where there is one, are summed exactly, groups in ascending
                 order in float32. A backend whose unit multiplies bfloat16 faster may round
                 norm(x), and each weight, to that instead.
        """

    def rms_norm(self, x: F32, norm: Norm, out: F32) -> None:
        """out[t] = norm(x[t]). Shapes: x, out [T, D]; they may be the same array."""

    def rope_write_kv(self, qkv: F32, batch: Batch, rope: Rope | None, kv: KVPages) -> None:
        """Rotate queries and keys in place, and write keys and values to their pages.

        Shapes   qkv [T, (Hq + 2 Hk) · E], a row is queries, keys, values; Hq follows from it.
                 Rotation covers the first E_rot elements of each head; None rotates nothing.
        """

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
        """Causal attention of each row over positions 0 … its own, read through the table; with a
        `window`, at least 1, over the last so many of these.

        Shapes   qkv as left by `rope_write_kv`, out [T, Hq · E]. Query head h uses KV head
                 h // (Hq / Hk).
        Rule     softmax over partitions of 256 positions counted from 0, merged in order. Positions
                 after the row's own, those before its window and slots never written contribute
                 exactly zero, even if they hold NaN. Table entries before the window of a
                 sequence's first row are not followed, whatever they say.
        Source   Kwon et al. 2023 (arXiv:2309.06180) §4.3; Milakov & Gimelshein 2018
                 (arXiv:1805.02867).
        """

    def copy_blocks(self, pool: KVPool, sources: I32, targets: I32) -> None:
        """pool[targets[i]] = pool[sources[i]], one after the other."""

    def take_rows(self, x: F32, rows: I32, out: F32) -> None:
        """out[r] = x[rows[r]]."""

    def argmax(self, logits: F32, out: I32, logprob: F32) -> None:
        """The first highest logit of each row and its log-probability.

        A row that holds NaN or +inf, or no finite value, gives -1.
        Shapes   logits [R, V], out int32 [R], logprob float32 [R].
        """

    def likeliest(self, logits: F32, rows: I32, ids: I32, values: F32) -> None:
        """The K greatest logits of each of these `rows`, the greatest first, of equals the lowest
        id first.

        Shapes   logits [R, V] without NaN; rows int32 [C]; ids int32 and values float32 [C, K],
                 K from 1 to V.
        """

    def add_bias(self, logits: F32, entries: Entries, bias: F32, before: F32) -> None:
        """Add `bias` to the logits of these entries; `before` gets what they were.

        Shapes   logits [R, V]; bias, before [N].
        """

    def penalise(self, logits: F32, entries: Entries, penalties: Penalties, before: F32) -> None:
        """Make the tokens of these entries less likely; `before` gets what their logits were.

        Shapes   logits [R, V]; before [N].
        Rule     a logit above 0 is divided by `repetition`, another is multiplied by it; then
                 `frequency` times the count is taken away, and `presence` if the count is not 0.
        Source   repetition Keskar et al. 2019 (arXiv:1909.05858) §4.1; the others OpenAI's API.
        """

    def mask(self, logits: F32, rows: I32, allowed: I32) -> None:
        """Let no token be drawn from these `rows` but those `allowed`: the others get -inf.

        Shapes   logits [R, V]; rows int32 [E], none twice; allowed int32 [E, V / WORD, rounded up],
                 bit v % WORD of element v // WORD is that of token v.
        """

    def draw(self, logits: F32, rows: I32, draws: Draws, out: I32) -> None:
        """A token drawn from each of these `rows`; -1 from one that has no finite value.

        Shapes   logits [R, V] without NaN; rows, out int32 [D].
        Rule     weight = e^((logit - greatest) / temperature), but 0 for what lies more than
                 `top_n_sigma` standard deviations of the row's finite logits below the greatest.
                 Then `top_k` keeps the largest; `typical_p` of those the fewest, those first whose
                 -log of their share is nearest to the entropy, whose shares exceed it; `top_p` of
                 those the fewest, largest first, whose weights reach that share of their sum;
                 `min_p` of those all that have that share of the greatest weight; `xtc_threshold`
                 of those, if several have that share of their sum, the least of these and what
                 weighs less. Among equals the lowest id comes first, and one is always kept. Drawn
                 is the first by id at which the running sum of those kept exceeds point · their
                 sum.
        Source   typical_p Meister et al. 2022 (arXiv:2202.00666); top_n_sigma Tang et al. 2024
                 (arXiv:2411.07641); top_n_sigma, typical_p and xtc as llama.cpp has them.
        """
