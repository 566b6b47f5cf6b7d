"""Masks: which tokens grammars allow next, computed beside the forward pass.

of(edits) ─▶ a thread: one bit a token, for each row        neither holds the interpreter
             the forward pass                                for long
end       ─▶ `mask` of each edits
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from octavo.ops.api import I32, WORD
from octavo.runtime.edits import Edits

if TYPE_CHECKING:
    from llguidance import LLExecutor


class Masks:
    """Of up to so many rows a step. Steps without a grammar cost nothing."""

    def __init__(self, *, rows: int, vocab_size: int) -> None:
        self._bits: I32 = np.empty((rows, -(-vocab_size // WORD)), np.int32)
        self._threads: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    @contextmanager
    def of(self, edits: Sequence[Edits]) -> Iterator[None]:
        """While this is open the masks of those with a grammar are computed; then they have them.

        They hold until the next step.
        """
        asked = [one for one in edits if one.matcher is not None and one.matcher.raw is not None]
        if not asked:
            yield
            return
        done = self._pool().submit(self._compute, asked)
        try:
            yield
        finally:
            done.result()
        for row, one in enumerate(asked):
            _give(one, self._bits[row])

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            from llguidance import LLExecutor

            self._threads = ThreadPoolExecutor(1, thread_name_prefix="octavo-masks")
            self._executor = LLExecutor(num_threads=1)
        return self._threads

    def _compute(self, asked: Sequence[Edits]) -> None:
        assert self._executor is not None
        raw = [
            (one.matcher.raw, row)
            for row, one in enumerate(asked)
            if one.matcher is not None and one.matcher.raw is not None
        ]
        bits = self._bits
        self._executor.unsafe_compute_mask_ptr(raw, bits.ctypes.data, bits.strides[0], len(bits))


def _give(edits: Edits, bits: I32) -> None:
    """The mask of one row, without the end tokens that end nothing, unless nothing else is left."""
    matcher = edits.matcher
    assert matcher is not None
    if matcher.mend() and matcher.raw is not None:
        matcher.raw.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        matcher.mend()
    edits.mask, edits.ends = bits, False
    if matcher.accepts:  # only there end tokens are in a mask
        words = bits.view(np.uint32)
        for token in matcher.ends:
            words[token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)
        edits.ends = not words.any()
        for token in matcher.ends if edits.ends else matcher.ends - matcher.barred:
            words[token // WORD] |= np.uint32(1 << token % WORD)
