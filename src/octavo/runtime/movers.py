"""Mover: carries blocks between the pool and the host arena; and copies within the pool.

A block is contiguous in both, so that a move is one copy of its bytes.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from octavo.core.plan import BlockCopy, Move
from octavo.ops.api import Ops
from octavo.runtime.storage import KVStorage
from octavo.units import MIB

_PROBE_BYTES = 16 * MIB
"""More than the caches near a core hold."""


class Mover:
    """Keeps  the bits of a block, whatever they stand for."""

    def __init__(self, pool: KVStorage, arena: KVStorage) -> None:
        assert pool.layout == arena.layout, "a block must fit a slot"
        self._pool = pool.pool.view(np.uint8)
        self._arena = arena.pool.view(np.uint8)

    def move_out(self, moves: Iterable[Move]) -> int:
        """Carry out those of `moves` that go out, in order; returns how many."""
        return self._carry(moves, "out")

    def move_in(self, moves: Iterable[Move]) -> int:
        """Carry out those of `moves` that come in, in order; returns how many."""
        return self._carry(moves, "in")

    def _carry(self, moves: Iterable[Move], kind: str) -> int:
        count = 0
        for move in moves:
            if move.kind == kind:
                block, slot = self._pool[move.block], self._arena[move.slot]
                np.copyto(slot if kind == "out" else block, block if kind == "out" else slot)
                count += 1
        return count


def copy_blocks(ops: Ops, storage: KVStorage, copies: Sequence[BlockCopy]) -> None:
    """Carry out these copies, in order."""
    if copies:
        sources = np.array([copy.source for copy in copies], np.int32)
        targets = np.array([copy.target for copy in copies], np.int32)
        ops.copy_blocks(storage.pool, sources, targets)


def measured_bytes_per_s(clock: Callable[[], float] = time.perf_counter) -> float:
    """How many bytes a second this machine moves from one place in memory to another.

    The best of three copies; the first one pays for pages that were never touched.

    Cost     a few milliseconds.
    """
    source = np.zeros(_PROBE_BYTES, np.uint8)
    target = np.empty_like(source)
    taken_s = []
    for _ in range(3):
        started = clock()
        np.copyto(target, source)
        taken_s.append(clock() - started)
    return _PROBE_BYTES / max(min(taken_s), 1e-9)
