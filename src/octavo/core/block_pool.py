"""BlockPool: the fixed set of physical blocks, each in exactly one of four states.

    free ── take ──▶ owned ── release(keep) ──▶ cached ── take (evicts) ──▶ owned
      ▲                │  ▲                        │
      └── release ─────┘  └───────── share ────────┘
    owned ── release(fenced) ──▶ fenced ── lift ──▶ free

Free blocks go first; when there are none, the cached block that was released longest ago is reused.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shortage:
    """`blocks` more would be needed. Nothing has changed."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Taken:
    """New blocks, each with one owner, and which of them held cached content until now."""

    blocks: tuple[int, ...]
    evicted: tuple[int, ...]


class BlockPool:
    """Keeps  free + cached + owned + fenced = all, each block in exactly one."""

    def __init__(self, blocks: int) -> None:
        self._references = [0] * blocks
        self._epochs = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fenced: set[int] = set()

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def available(self) -> int:
        """How many blocks `take` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def fenced(self) -> int:
        return len(self._fenced)

    @property
    def owned(self) -> int:
        return self.total - self.available - self.fenced

    def references(self, block: int) -> int:
        return self._references[block]

    def epoch(self, block: int) -> int:
        """Raised each time the block is taken: news about an older epoch is void."""
        return self._epochs[block]

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def take(self, count: int) -> Taken | Shortage:
        """Hand out `count` blocks, or none.

        Cost     O(count).
        """
        if count > self.available:
            return Shortage(count - self.available)
        from_free = min(count, len(self._free))
        blocks = [self._free.pop() for _ in range(from_free)]
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count - from_free)]
        blocks += evicted
        for block in blocks:
            self._references[block] = 1
            self._epochs[block] += 1
        return Taken(tuple(blocks), tuple(evicted))

    def share(self, block: int) -> None:
        """Add an owner to a block that is owned or cached."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, block: int, *, keep: bool, fenced: bool = False) -> None:
        """Remove one owner; the last one leaves the block cached (`keep`), fenced or free."""
        assert self._references[block] > 0, f"block {block} has no owner to release it"
        self._references[block] -= 1
        if self._references[block] > 0:
            return
        if fenced:
            self._fenced.add(block)
        elif keep:
            self._cached[block] = None
        else:
            self._free.append(block)

    def lift(self, block: int) -> None:
        """End the fence of a block: its transfer is done, it is free."""
        self._fenced.remove(block)
        self._free.append(block)

    def drop(self, blocks: Sequence[int]) -> None:
        """Turn cached blocks into free ones: their content is not wanted any more."""
        for block in blocks:
            del self._cached[block]
            self._free.append(block)

    def states(self) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """(free, cached, fenced), for audits."""
        return frozenset(self._free), frozenset(self._cached), frozenset(self._fenced)
