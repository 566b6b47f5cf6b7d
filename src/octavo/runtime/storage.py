"""KVStorage: the memory of the block pool, and of the host arena."""

import mmap

import numpy as np

from octavo.ops.api import U8, KVLayout, KVPool


class KVStorage:
    """One array `[blocks, *layout.shape]`. A block is contiguous: one copy moves it.

    Pages of memory are taken from the machine when they are first written to. The mapping is
    private: shared ones get small pages, and a table walk for every block read.
    """

    def __init__(self, layout: KVLayout, blocks: int) -> None:
        self.layout = layout
        size_bytes = max(blocks * layout.block_bytes, mmap.PAGESIZE)
        self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: U8 = np.frombuffer(
            self._memory, dtype=np.uint8, count=blocks * layout.block_bytes
        )
        self.pool: KVPool = self._bytes.view(layout.element).reshape(blocks, *layout.shape)

    @property
    def nbytes(self) -> int:
        return int(self.pool.nbytes)

    def poison(self) -> None:
        """Fill every block with NaN, of int8 the scales: whatever is read before it is written
        shows."""
        self._bytes.fill(0xFF)
