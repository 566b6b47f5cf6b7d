"""What a network is, as data: everything the decoder switches on, and nothing about weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelFileError
from octavo.ops.api import Activation, KVLayout, KVType, Rope
from octavo.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share a kind of attention, and so one block table a sequence.

    `window` is the number of positions a query sees, its own among them; None for all. Blocks of
    all groups have the same bytes: room for the layers of the largest group.
    """

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Slower rotation of the long wavelengths, as in Llama 3.1 and later.

    Wavelengths longer than original_context / low_frequency are stretched by `factor`, those
    shorter than original_context / high_frequency are left alone, the ones between are blended.

    Source   "The Llama 3 Herd of Models" (arXiv:2407.21783) and its reference code.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All positions divided by `factor`. Source: Chen et al. 2023 (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorScaling:
    """Each frequency divided by its own number, [dims / 2], given by the checkpoint."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding of the first `dims` elements of each head.

    Source   Su et al. 2021 (arXiv:2104.09864).
    """

    theta: float
    dims: int
    scaling: Llama3Scaling | LinearScaling | FactorScaling | None = None

    def frequencies(self) -> npt.NDArray[np.float64]:
        """Radians a position, [dims / 2]."""
        plain: npt.NDArray[np.float64] = self.theta ** -(np.arange(0, self.dims, 2) / self.dims)
        match self.scaling:
            case None:
                return plain
            case LinearScaling(factor=factor):
                return plain / factor
            case FactorScaling(factors=factors):
                divided: npt.NDArray[np.float64] = plain / np.array(factors)
                return divided
            case Llama3Scaling() as scaling:
                return _llama3(plain, scaling)

    def tables(self, positions: int) -> Rope:
        """Cosines and sines of positions 0 … positions - 1.

        Keeps    angles are taken in float64: at position 8,000 a float32 product is off by 5e-4.
        Raises   ModelFileError: the settings lead to angles that are not finite.
        """
        with np.errstate(all="ignore"):
            angles = np.arange(positions, dtype=np.float64)[:, None] * self.frequencies()
        if not np.isfinite(angles).all():
            raise ModelFileError(
                f"the rotary angles are not finite with theta {self.theta} and {self.scaling};"
                " the model's configuration is damaged"
            )
        return Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def _llama3(plain: npt.NDArray[np.float64], scaling: Llama3Scaling) -> npt.NDArray[np.float64]:
    turns = scaling.original_context * plain / (2 * np.pi)
    smooth = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    share = np.clip(smooth, 0.0, 1.0)
    blended: npt.NDArray[np.float64] = (1 - share) * plain / scaling.factor + share * plain
    return blended


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only transformer.

    `stored_as` is the encoding that most of the checkpoint is in; `fingerprint` tells the weights
    apart from any others, as block keys need it. `eos_ids` end an answer.
    """

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    activation: Activation
    rope: RopeSpec
    max_context: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    ffn_bias: bool
    groups: tuple[LayerGroup, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    stored_as: str
    fingerprint: str

    @property
    def qkv_size(self) -> int:
        """The width of a row of queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def parameters(self) -> int:
        """How many numbers the weights are."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        attended = self.heads * self.head_dim
        layer = self.hidden_size * (self.qkv_size + attended + 3 * self.ffn_size + 2)
        layer += self.qkv_bias * self.qkv_size + self.output_bias * self.hidden_size
        layer += self.ffn_bias * (2 * self.ffn_size + self.hidden_size)
        return embeddings + self.layers * layer + self.hidden_size

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    def kv_layout(self, block_size: int, dtype: KVType = "bfloat16") -> KVLayout:
        """How one block lies in memory; the same for every layer group."""
        return KVLayout(
            layers=max(len(group.layers) for group in self.groups),
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
        )


def full_attention(layers: int) -> tuple[LayerGroup, ...]:
    """The groups of a uniform model: one, all of whose layers see every position."""
    return layer_groups([None] * layers)


def layer_groups(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """The groups of a model whose layers see so many positions each, None for all.

    Layers of one kind are cut into groups of equal size, in order. The kind that sees furthest
    fills its groups, since their blocks stay for as long as a sequence runs; of the sizes that
    allow this the largest is taken with which at most an eighth of all places stay empty.

    >>> [len(group.layers) for group in layer_groups([512] * 29 + [None] * 5)]
    [5, 5, 5, 5, 5, 5, 4]
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    order = sorted(kinds, key=lambda window: (window is not None, -(window or 0)))
    furthest = len(kinds[order[0]])
    sizes = [size for size in range(furthest, 0, -1) if furthest % size == 0]
    size = next(size for size in sizes if _is_roomy(list(kinds.values()), size))
    return tuple(
        LayerGroup(window=window, layers=tuple(kinds[window][start : start + size]))
        for window in order
        for start in range(0, len(kinds[window]), size)
    )


def _is_roomy(kinds: Sequence[Sequence[int]], size: int) -> bool:
    """Whether few enough places are empty in groups of this size."""
    layers = sum(map(len, kinds))
    places = sum(size * ceil_div(len(of_kind), size) for of_kind in kinds)
    return 8 * (places - layers) <= places
