"""BlockPool: the fixed set of physical blocks, each in exactly one of four states.

    free ── take ──▶ owned ── release(keep) ──▶ cached ── take (evicts) ──▶ owned
      ▲                │  ▲                        │
      └── release ─────┘  └───────── share ────────┘
    owned ── fence, release ──▶ fenced ── lift(keep) ──▶ free or cached
               owned ◀── share ───┘

An owner may be a hold: it gives its blocks up when others need them.

Free blocks go first; when there are none, the cached block that was released longest ago is reused,
unless one was given back as of no more use to anyone. A transfer is an owner like any other; a
block that only transfers own is fenced.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Shortage:
    """`blocks` more would be needed. Nothing has changed."""

    blocks: int


class Taken(NamedTuple):
    """New blocks, each with one owner, and which of them held cached content until now."""

    blocks: tuple[int, ...]
    evicted: tuple[int, ...]


class Books(NamedTuple):
    """What the pool writes down, to be read at once and not kept: by block the number of owners,
    of holds among them, and of transfers; and who has no owner, those cached the first to be
    evicted first."""

    references: Sequence[int]
    holds: Sequence[int]
    transfers: Mapping[int, int]
    free: Collection[int]
    cached: Collection[int]


class BlockPool:
    """Keeps  free + cached + owned + fenced = all, each block in exactly one."""

    def __init__(self, blocks: int) -> None:
        self._references = [0] * blocks
        self._holds = [0] * blocks
        """How many of the owners of a block are holds."""
        self._yielding = 0
        self._entries = 0
        self._epochs = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fenced: set[int] = set()
        self._transfers: dict[int, int] = {}

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

    @property
    def yielding(self) -> int:
        """How many owned blocks have no owners but holds: they are available once those go, and
        transfers are over."""
        return self._yielding

    @property
    def entries(self) -> int:
        """How many owners there are over all blocks, but for holds and transfers: the entries of
        all tables of sequences that run. A shared block counts once for each."""
        return self._entries

    def yields(self, block: int) -> bool:
        """Whether `block` is owned, and by holds alone but for transfers."""
        return 0 < self._references[block] - self.transfers(block) == self._holds[block]

    def holds(self, block: int) -> int:
        """How many of the owners of `block` are holds."""
        return self._holds[block]

    def references(self, block: int) -> int:
        """How many own the block, transfers among them."""
        return self._references[block]

    def transfers(self, block: int) -> int:
        return self._transfers.get(block, 0)

    def epoch(self, block: int) -> int:
        """Raised each time the block is taken: news about an older epoch is void."""
        return self._epochs[block]

    def fences(self) -> frozenset[int]:
        """The blocks that only transfers own."""
        return frozenset(self._fenced)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def take(self, count: int) -> Taken | Shortage:
        """Hand out `count` blocks, or none.

        Cost     O(count).
        """
        available = self.available
        if count > available:
            return Shortage(count - available)
        from_free = min(count, len(self._free))
        blocks = [self._free.pop() for _ in range(from_free)]
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count - from_free)]
        blocks += evicted
        for block in blocks:
            self._references[block] = 1
            self._epochs[block] += 1
        self._entries += count
        return Taken(tuple(blocks), tuple(evicted))

    def share(self, block: int) -> None:
        """Add an owner to a block that is owned, fenced or cached."""
        if self._references[block] == 0:
            del self._cached[block]
        self._yielding -= self.yields(block)
        self._fenced.discard(block)
        self._references[block] += 1
        self._entries += 1

    def release(self, block: int, *, keep: bool, soon: bool = False) -> None:
        """Remove one owner; the last one leaves the block cached (`keep`) or free, and fenced while
        transfers own it.

        A block cached `soon` is evicted before all others.
        """
        assert self._references[block] > self.transfers(block), (
            f"block {block} has no owner to release it"
        )
        self._references[block] -= 1
        self._entries -= 1
        if self._references[block] == 0:
            self._rest(block, keep, soon)
            return
        self._yielding += self.yields(block)
        if self._references[block] == self.transfers(block):
            self._fenced.add(block)

    def fence(self, block: int) -> None:
        """Let a transfer own a block beside those who do."""
        self._references[block] += 1
        self._transfers[block] = self.transfers(block) + 1

    def lift(self, block: int, *, keep: bool) -> None:
        """End one transfer; the last owner leaves the block cached (`keep`) or free."""
        assert self.transfers(block) > 0, f"block {block} is in no transfer"
        self._references[block] -= 1
        self._transfers[block] -= 1
        if not self._transfers[block]:
            del self._transfers[block]
        if self._references[block] == 0:
            self._fenced.remove(block)
            self._rest(block, keep)

    def _rest(self, block: int, keep: bool, soon: bool = False) -> None:
        if keep:
            self._cached[block] = None
            if soon:
                self._cached.move_to_end(block, last=False)
        else:
            self._free.append(block)

    def hold(self, block: int) -> None:
        """From now on one more of its owners is a hold."""
        self._holds[block] += 1
        self._entries -= 1
        self._yielding += self.yields(block)

    def unhold(self, block: int) -> None:
        """That owner is about to release the block."""
        self._yielding -= self.yields(block)
        self._holds[block] -= 1
        self._entries += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Turn cached blocks into free ones: their content is not wanted any more."""
        for block in blocks:
            del self._cached[block]
            self._free.append(block)

    def states(self) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """(free, cached, fenced), for audits."""
        return frozenset(self._free), frozenset(self._cached), frozenset(self._fenced)

    def books(self) -> Books:
        """All states at once, for those who show them."""
        return Books(
            self._references, self._holds, self._transfers, self._free, self._cached.keys()
        )
