"""KVStorage: the memory of the block pool, and of the host arena."""

import mmap
from typing import Any

import ml_dtypes
import numpy as np

from octavo.ops.api import BF16, KVLayout


class KVStorage:
    """One array `[blocks, *layout.shape]` of bfloat16. A block is contiguous: one copy moves it.

    Pages of memory are taken from the machine when they are first written to. The mapping is
    private: shared ones get small pages, and a table walk for every block read.
    """

    def __init__(self, layout: KVLayout, blocks: int) -> None:
        self.layout = layout
        size_bytes = max(blocks * layout.block_bytes, mmap.PAGESIZE)
        self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        flat: np.ndarray[Any, Any] = np.frombuffer(
            self._memory, dtype=ml_dtypes.bfloat16, count=blocks * layout.block_bytes // 2
        )
        self.pool: BF16 = flat.reshape(blocks, *layout.shape)

    @property
    def nbytes(self) -> int:
        return int(self.pool.nbytes)

    def poison(self) -> None:
        """Fill every block with NaN: whatever is read before it is written shows."""
        self.pool.fill(np.nan)
