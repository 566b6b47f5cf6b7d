"""Runs a decoder on token sequences through block tables drawn at random, in a pool of NaN.

A pool of uint8 holds int8 with scales, of which those are NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo.models.decoder import Decoder
from octavo.ops.api import F32, TILE_TOKENS, Batch
from octavo.units import ceil_div


@dataclass(frozen=True, slots=True)
class Part:
    """`tokens` of sequence number `sequence`, from position `start`."""

    sequence: int
    start: int
    tokens: Sequence[int]


class PagedSequences:
    """Room for sequences of up to the given lengths; no two runs place their blocks alike."""

    def __init__(
        self,
        decoder: Decoder,
        rng: np.random.Generator,
        lengths: Sequence[int],
        *,
        block_size: int = 16,
        dtype: npt.DTypeLike = ml_dtypes.bfloat16,
    ) -> None:
        self._decoder = decoder
        counts = [ceil_div(length, block_size) for length in lengths]
        is_int8 = np.dtype(dtype) == np.uint8
        layout = decoder.spec.kv_layout(block_size, "int8" if is_int8 else "bfloat16")
        self._poison = 0xFF if is_int8 else np.nan
        groups = decoder.spec.groups
        blocks = len(groups) * sum(counts) + 2
        self._pool = np.full((blocks, *layout.shape), self._poison, dtype)
        self._tables = np.zeros((len(groups), len(lengths), max(counts)), np.int32)
        ids = rng.permutation(blocks).astype(np.int32)
        for tables in self._tables:
            for table, count in zip(tables, counts, strict=True):
                table[:count], ids = ids[:count], ids[count:]

    def give_back(self, sequence: int, start: int) -> None:
        """What no position from `start` on sees is lost: blocks hold NaN, their entries say -1."""
        block_size = self._pool.shape[-2] * TILE_TOKENS
        for group, tables in zip(self._decoder.spec.groups, self._tables, strict=True):
            first = 0 if group.window is None else max(0, start + 1 - group.window)
            gone = tables[sequence, : first // block_size]
            self._pool[gone[gone >= 0]] = self._poison
            gone[:] = -1

    def step(self, parts: Sequence[Part]) -> list[F32]:
        """One forward pass; the logits of every position of each part."""
        lengths = [len(part.tokens) for part in parts]
        starts = np.array([part.start for part in parts])
        positions = [np.arange(part.start, part.start + len(part.tokens)) for part in parts]
        batch = Batch(
            tokens=np.concatenate([part.tokens for part in parts]).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_start=np.cumsum([0, *lengths]).astype(np.int32),
            context=(starts + lengths).astype(np.int32),
            tables=tuple(
                np.ascontiguousarray(tables[[part.sequence for part in parts]])
                for tables in self._tables
            ),
            logit_rows=np.arange(sum(lengths), dtype=np.int32),
        )
        logits = self._decoder.forward(batch, self._pool).copy()
        return np.split(logits, batch.query_start[1:-1])

    def feed(self, sequence: int, tokens: Sequence[int], *, chunk: int, start: int = 0) -> F32:
        """One sequence alone, `chunk` tokens a step; the logits of every position."""
        cuts = range(0, len(tokens), chunk)
        parts = [Part(sequence, start + cut, tokens[cut : cut + chunk]) for cut in cuts]
        return np.concatenate([self.step([part])[0] for part in parts])
