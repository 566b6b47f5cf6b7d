"""KVStorage: the memory of the block pool."""

import mmap
from typing import Any

import ml_dtypes
import numpy as np

from octavo.ops.api import BF16, KVLayout


class KVStorage:
    """One array `[blocks, *layout.shape]` of bfloat16. A block is contiguous: one copy moves it.

    Pages of memory are taken from the machine when they are first written to.
    """

    def __init__(self, layout: KVLayout, blocks: int) -> None:
        self.layout = layout
        self._memory = mmap.mmap(-1, max(blocks * layout.block_bytes, mmap.PAGESIZE))
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
