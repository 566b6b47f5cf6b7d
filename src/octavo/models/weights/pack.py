"""Takes each tensor of a checkpoint once, checks it, and packs it for a backend.

Nothing is left over and nothing is taken twice: a checkpoint with one tensor more than the model
has is another model, and is refused by that tensor's name.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np

from octavo.config import Quantization
from octavo.errors import ModelFileError
from octavo.models.families.names import LayerNames, WeightNames
from octavo.models.spec import ModelSpec
from octavo.models.weights.files import Checkpoint
from octavo.models.weights.quantise import form_of
from octavo.ops.api import F32, PANEL, Encoded, Form, Norm, NotFinite, Ops, Packed, Weight
from octavo.ops.encodings import rounded
from octavo.units import MIB, ceil_div

SLAB_BYTES = 16 * MIB
"""Of a table that are read before they are given up. It may be larger than all the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer as the decoder uses it.

    Queries, keys and values are stacked: one matrix, or several if their forms differ.
    """

    attention_norm: Norm
    qkv: tuple[Packed, ...]
    qkv_bias: F32 | None
    output: Packed
    output_bias: F32 | None
    ffn_norm: Norm
    gate_up: Packed
    gate_up_bias: F32 | None
    down: Packed
    down_bias: F32 | None

    @property
    def nbytes(self) -> int:
        vectors = (self.qkv_bias, self.output_bias, self.gate_up_bias, self.down_bias)
        norms = self.attention_norm.weight.nbytes + self.ffn_norm.weight.nbytes
        biases = sum(vector.nbytes for vector in vectors if vector is not None)
        return norms + biases + sum(matrix.nbytes for matrix in self.matrices)

    @property
    def matrices(self) -> tuple[Packed, ...]:
        """In the order in which they are used."""
        return (*self.qkv, self.output, self.gate_up, self.down)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All weights of a model. With tied embeddings `head` and `embedding` are one object."""

    embedding: Packed
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Packed

    @property
    def nbytes(self) -> int:
        head = 0 if self.head is self.embedding else self.head.nbytes
        layers = sum(layer.nbytes for layer in self.layers)
        return self.embedding.nbytes + layers + self.final_norm.weight.nbytes + head


def pack_weights(
    spec: ModelSpec,
    names: WeightNames,
    checkpoint: Checkpoint,
    ops: Ops,
    quantization: Quantization,
) -> Weights:
    """Read, check and pack every tensor of `checkpoint`, in the forms of `quantization`.

    Cost     matrices go from the mapped files into their panels, and what has been packed is given
             up: those of one `Packed` at most lie in memory twice, of a table `SLAB_BYTES`.
    Raises   ModelFileError: a tensor is missing, left over, of another shape, or not finite.
    """
    reader = TensorReader(checkpoint, quantization)
    vocabulary = (spec.vocab_size, spec.hidden_size)
    reader.expect(names)
    table = _pack_table(reader, ops, names.embedding, vocabulary)
    layers = tuple(
        _pack_layer(spec, reader, ops, names.interleaved_rotary, layer) for layer in names.layers
    )
    final_norm = Norm(reader.vector(names.final_norm, spec.hidden_size), spec.norm_eps)
    head = table if names.head is None else _pack_table(reader, ops, names.head, vocabulary)
    return Weights(embedding=table, layers=layers, final_norm=final_norm, head=head)


def weights_bytes(
    spec: ModelSpec, names: WeightNames, checkpoint: Checkpoint, quantization: Quantization
) -> int:
    """What matrices and norms take once packed. Nothing is read but how they are stored."""
    hidden, ffn = spec.hidden_size, spec.ffn_size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes = checkpoint.shapes

    def matrix(rows: int, columns: int, *names: str, table: bool = False) -> int:
        # A name that is not there is told when the weights are read.
        kinds = [checkpoint.kind(name) for name in names if name in shapes]
        return form_of(kinds, quantization, table=table).nbytes(rows, columns) if kinds else 0

    total = 4 * hidden * (2 * spec.layers + 1)
    for name in {names.embedding, names.head or names.embedding}:
        total += matrix(spec.vocab_size, hidden, name, table=True)
    for layer in names.layers:
        total += matrix(queries, hidden, layer.query)
        total += matrix(keys, hidden, layer.key) + matrix(keys, hidden, layer.value)
        total += matrix(hidden, queries, layer.output)
        total += 2 * matrix(ffn, hidden, layer.gate, layer.up)
        total += matrix(hidden, ffn, layer.down)
    return total


def _pack_table(reader: "TensorReader", ops: Ops, name: str, shape: tuple[int, int]) -> Packed:
    matrix = reader.matrix(name, *shape, reader.form(name, table=True))
    slab = PANEL * ceil_div(SLAB_BYTES, PANEL * matrix.stored.shape[1])
    slabs = [
        replace(matrix, stored=matrix.stored[start : start + slab])
        for start in range(0, matrix.rows, slab)
    ]
    pack = partial(ops.pack, done=lambda _: reader.forget([name]))
    return reader.packed(pack, [name] * len(slabs), slabs)


def _pack_layer(
    spec: ModelSpec, reader: "TensorReader", ops: Ops, interleaved: bool, names: LayerNames
) -> LayerWeights:
    hidden, ffn = spec.hidden_size, spec.ffn_size
    q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    query = reader.matrix(names.query, q_size, hidden, reader.form(names.query))
    key = reader.matrix(names.key, kv_size, hidden, reader.form(names.key))
    value = reader.matrix(names.value, kv_size, hidden, reader.form(names.value))
    query_bias, key_bias = (
        reader.bias(names.query_bias, q_size),
        reader.bias(names.key_bias, kv_size),
    )
    if interleaved:
        query, query_bias = halve_pairs(query, spec.heads), _halve_bias(query_bias, spec.heads)
        key, key_bias = halve_pairs(key, spec.kv_heads), _halve_bias(key_bias, spec.kv_heads)
    value_bias = reader.bias(names.value_bias, kv_size)
    gates = reader.form(names.gate, names.up)
    gate, up = (reader.matrix(name, ffn, hidden, gates) for name in (names.gate, names.up))
    output = reader.matrix(names.output, hidden, q_size, reader.form(names.output))
    down = reader.matrix(names.down, hidden, ffn, reader.form(names.down))
    return LayerWeights(
        attention_norm=Norm(reader.vector(names.attention_norm, hidden), spec.norm_eps),
        qkv=reader.stacked(ops, [names.query, names.key, names.value], [query, key, value]),
        qkv_bias=_stack(query_bias, key_bias, value_bias),
        output=reader.packed(ops.pack, [names.output], [output]),
        output_bias=reader.bias(names.output_bias, hidden),
        ffn_norm=Norm(reader.vector(names.ffn_norm, hidden), spec.norm_eps),
        gate_up=reader.packed(
            lambda pair: ops.pack_gated(*pair), [names.gate, names.up], [gate, up]
        ),
        gate_up_bias=_stack(reader.bias(names.gate_bias, ffn), reader.bias(names.up_bias, ffn)),
        down=reader.packed(ops.pack, [names.down], [down]),
        down_bias=reader.bias(names.down_bias, hidden),
    )


def halve_pairs(weight: Encoded, heads: int) -> Encoded:
    """Rows stored as rotary pairs (2i, 2i + 1) put back as halves (i, i + E / 2), head by head."""
    order = np.arange(weight.rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return replace(weight, stored=weight.stored[order])


def _halve_bias(bias: F32 | None, heads: int) -> F32 | None:
    if bias is None:
        return None
    halves: F32 = bias.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return halves


def _stack(*biases: F32 | None) -> F32 | None:
    there = [bias for bias in biases if bias is not None]
    return np.concatenate(there) if there else None


class TensorReader:
    """Reads tensors by name, with the shape and in the form they must have."""

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization) -> None:
        self._checkpoint = checkpoint
        self._quantization = quantization
        self._shapes = checkpoint.shapes

    def form(self, *stack: str, table: bool = False) -> Form:
        """The form of matrices that are packed together."""
        kinds = [self._checkpoint.kind(name) for name in stack]
        return form_of(kinds, self._quantization, table=table)

    def expect(self, names: WeightNames) -> None:
        """Refuse a checkpoint that lacks a tensor of the model, or holds one that it has not."""
        wanted = list(_all_names(names))
        assert len(wanted) == len(set(wanted)), "a tensor is named twice"
        missing = next((name for name in wanted if name not in self._shapes), None)
        if missing is not None:
            raise ModelFileError(f"{self._checkpoint.path}: tensor {missing!r} is missing")
        copies = {copy for copy, original in names.copies if self._same(copy, original)}
        known = {*wanted, *names.derived, *copies}
        surplus = next((name for name in self._shapes if name not in known), None)
        if surplus is not None:
            raise ModelFileError(
                f"{self._checkpoint.path}: tensor {surplus!r} {list(self._shapes[surplus])} has no "
                "place in the model that the configuration describes"
            )

    def matrix(self, name: str, rows: int, columns: int, form: Form) -> Encoded:
        """The matrix, to be packed in that form. Raises ModelFileError: it has another shape."""
        self._check_shape(name, (rows, columns))
        return replace(self._checkpoint.encoded(name), form=form)

    def packed(
        self,
        pack: Callable[[Sequence[Weight]], Packed],
        names: Sequence[str],
        matrices: Sequence[Weight],
    ) -> Packed:
        """What `pack` makes of these; their bytes are given up.

        Raises   ModelFileError: one of them is not finite.
        """
        try:
            packed = pack(matrices)
        except NotFinite as error:
            raise self._not_finite(names[error.part]) from None
        self.forget(names)
        return packed

    def stacked(
        self, ops: Ops, names: Sequence[str], matrices: Sequence[Encoded]
    ) -> tuple[Packed, ...]:
        """These, in order, as one `Packed` for each run of one form. Raises as `packed`."""
        named = zip(names, matrices, strict=True)
        runs = [list(run) for _, run in groupby(named, lambda pair: pair[1].form)]
        return tuple(
            self.packed(ops.pack, [name for name, _ in run], [matrix for _, matrix in run])
            for run in runs
        )

    def forget(self, names: Iterable[str]) -> None:
        """These tensors are not needed any more."""
        for name in names:
            self._checkpoint.forget(name)

    def bias(self, name: str | None, size: int) -> F32 | None:
        return None if name is None else self.vector(name, size)

    def vector(self, name: str, size: int) -> F32:
        """The vector in float32. Raises ModelFileError: another shape, NaN or infinity."""
        self._check_shape(name, (size,))
        vector = self._checkpoint.f32(name).copy()  # a view would keep the file mapped
        if not np.isfinite(vector).all():
            raise self._not_finite(name)
        return vector

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        found = self._shapes[name]
        if found != expected:
            raise ModelFileError(
                f"{self._checkpoint.path}: tensor {name!r}: expected shape {list(expected)}, found "
                f"{list(found)}"
            )

    def _not_finite(self, name: str) -> ModelFileError:
        return ModelFileError(
            f"{self._checkpoint.path}: tensor {name!r} holds NaN or infinite values in bfloat16; "
            "the checkpoint is damaged"
        )

    def _same(self, copy: str, original: str) -> bool:
        if copy not in self._shapes or self._shapes[copy] != self._shapes[original]:
            return False
        first, second = (rounded(self._checkpoint.encoded(name)) for name in (copy, original))
        return np.array_equal(first.view(np.uint16), second.view(np.uint16))


def _all_names(names: WeightNames) -> Iterable[str]:
    yield names.embedding
    for layer in names.layers:
        fields = (getattr(layer, field) for field in LayerNames.__dataclass_fields__)
        yield from (name for name in fields if name is not None)
    yield names.final_norm
    if names.head is not None:
        yield names.head
