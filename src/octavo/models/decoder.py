"""The network: one pass over a batch, written once against `ops` for every family.

tokens ─ embed ─► x                                      the residual, float32
  each layer      x += output · attention(rotary(qkv · norm(x)))    KV written on the way
                  x += down · (act(gate · norm(x)) * (up · norm(x)))
rows of x ──────► head · norm(x) ─► logits
"""

import numpy as np

from octavo.models.spec import ModelSpec
from octavo.models.weights.pack import LayerWeights, Weights
from octavo.ops.api import F32, I32, TILE_TOKENS, Batch, KVPages, KVPool, KVType, Ops


class Decoder:
    """A model ready to run on one backend, with buffers for the largest step it will see.

    Keeps    the residual stream is float32 throughout. A row of logits depends on the tokens at
             and before its position alone, never on the rest of the batch.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        ops: Ops,
        *,
        max_tokens: int,
        max_rows: int,
        max_context: int,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.ops = ops
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.max_context = max_context
        self._rope = spec.rope.tables(max_context)
        self._residual = np.empty((max_tokens, spec.hidden_size), np.float32)
        self._qkv = np.empty((max_tokens, spec.qkv_size), np.float32)
        self._attended = np.empty((max_tokens, spec.heads * spec.head_dim), np.float32)
        self._ffn = np.empty((max_tokens, spec.ffn_size), np.float32)
        self._rows = np.empty((max_rows, spec.hidden_size), np.float32)
        self._logits = np.empty((max_rows, spec.vocab_size), np.float32)
        self._places = _places(spec)
        self._computed = 0
        """Tokens of the last batch."""

    @property
    def scratch_bytes(self) -> int:
        """What the buffers of a step and the rotary tables take."""
        buffers = (self._residual, self._qkv, self._attended, self._ffn, self._rows, self._logits)
        tables = self._rope.cos.nbytes + self._rope.sin.nbytes
        return tables + sum(buffer.nbytes for buffer in buffers)

    def forward(self, batch: Batch, pool: KVPool) -> F32:
        """Compute the batch's positions, write their KV, and give the logits of its `logit_rows`.

        Shapes   pool [blocks, *spec.kv_layout(B).shape], which serves all layer groups; batch at
                 most `max_tokens` tokens and `max_rows` logit rows.
        Returns  logits float32 [R, V], a view that the next call overwrites.
        """
        tokens, rows = len(batch.tokens), len(batch.logit_rows)
        assert tokens <= self.max_tokens, f"{tokens} tokens in a step of {self.max_tokens}"
        assert rows <= self.max_rows, f"{rows} rows of logits in a step of {self.max_rows}"
        ops, weights = self.ops, self.weights
        x = self._residual[:tokens]
        ops.embed(weights.embedding, batch.tokens, x)
        dtype: KVType = "int8" if pool.dtype == np.uint8 else "bfloat16"
        layout = self.spec.kv_layout(pool.shape[-2] * TILE_TOKENS, dtype)
        for layer, (group, index, window) in zip(weights.layers, self._places, strict=True):
            pages = KVPages(pool, layout, index, batch.tables[group])
            self._layer(layer, x, batch, pages, window)
        self._computed = tokens
        return self.logits(batch.logit_rows)

    def logits(self, rows: I32) -> F32:
        """The logits of these rows of the batch that was computed last, at most `max_rows`.

        Returns  logits float32 [R, V], a view that the next call overwrites.
        """
        x, count = self._residual[: self._computed], len(rows)
        last, logits = self._rows[:count], self._logits[:count]
        self.ops.take_rows(x, rows, last)
        self.ops.linear(last, self.weights.head, logits, norm=self.weights.final_norm)
        return logits

    def _layer(
        self, layer: LayerWeights, x: F32, batch: Batch, kv: KVPages, window: int | None
    ) -> None:
        """Attention, then the feed-forward network, each added into `x`."""
        ops, spec, tokens = self.ops, self.spec, len(x)
        qkv, attended, ffn = self._qkv[:tokens], self._attended[:tokens], self._ffn[:tokens]
        self._project(layer, x, qkv)
        ops.rope_write_kv(qkv, batch, self._rope, kv)
        ops.paged_attention(qkv, batch, kv, attended, scale=spec.attention_scale, window=window)
        ops.linear(attended, layer.output, x, bias=layer.output_bias, add=True)
        ops.linear(
            x,
            layer.gate_up,
            ffn,
            norm=layer.ffn_norm,
            bias=layer.gate_up_bias,
            gated=spec.activation,
        )
        ops.linear(ffn, layer.down, x, bias=layer.down_bias, add=True)

    def _project(self, layer: LayerWeights, x: F32, qkv: F32) -> None:
        """Queries, keys and values, side by side."""
        start = 0
        for matrix in layer.qkv:
            part = slice(start, start + matrix.rows)
            bias = None if layer.qkv_bias is None else layer.qkv_bias[part]
            self.ops.linear(x, matrix, qkv[:, part], norm=layer.attention_norm, bias=bias)
            start += matrix.rows


def _places(spec: ModelSpec) -> tuple[tuple[int, int, int | None], ...]:
    """For each layer its group, its place among the layers of that group, and its window."""
    places = {
        layer: (group, index, members.window)
        for group, members in enumerate(spec.groups)
        for index, layer in enumerate(members.layers)
    }
    return tuple(places[layer] for layer in range(spec.layers))
