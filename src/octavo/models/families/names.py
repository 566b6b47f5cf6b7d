"""Which tensor of a checkpoint is which weight of the decoder."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """The tensors of one layer. A bias that the model does not have is None."""

    attention_norm: str
    query: str
    key: str
    value: str
    output: str
    ffn_norm: str
    gate: str
    up: str
    down: str
    query_bias: str | None = None
    key_bias: str | None = None
    value_bias: str | None = None
    output_bias: str | None = None
    gate_bias: str | None = None
    up_bias: str | None = None
    down_bias: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """All tensors of a model.

    `head` is None when the embedding is also the output matrix. `interleaved_rotary` says that the
    rows of queries and keys are stored as pairs (2i, 2i + 1), where `ops` want (i, i + E / 2).
    `derived` are tensors that repeat what the configuration says; they are not read. `copies` are
    pairs (tensor, original) that a checkpoint may hold twice; they must be equal.
    """

    embedding: str
    layers: tuple[LayerNames, ...]
    final_norm: str
    head: str | None
    interleaved_rotary: bool = False
    derived: frozenset[str] = frozenset()
    copies: tuple[tuple[str, str], ...] = ()
