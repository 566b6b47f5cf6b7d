"""BlockManager: the one place that changes who owns which block.

It stands over the pool (who is free), the tables (which block holds which positions) and the prefix
cache (which content can be shared). Every call covers what is asked or changes nothing.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain

from octavo.core.block_pool import BlockPool, Shortage
from octavo.core.plan import BlockCopy, TableWrite
from octavo.core.prefix_cache import ABSENT, PrefixCache
from octavo.core.sequence import Sequence
from octavo.units import ceil_div


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a runner must apply before it computes, and which cached blocks were reused for it."""

    writes: tuple[TableWrite, ...]
    evicted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admission:
    """Blocks for a whole sequence: the first `cached_tokens` positions hold their KV already."""

    writes: tuple[TableWrite, ...]
    copies: tuple[BlockCopy, ...]
    cached_tokens: int
    blocks_found: int
    blocks_allocated: int
    evicted: tuple[int, ...]


class BlockManager:
    """Each position of a sequence needs one slot in one block of every layer group.

    With `slab_tokens` an admission reserves that many positions, however short the sequence is:
    what an allocator of contiguous slabs would do, for comparison.
    """

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        groups: int = 1,
        cache: PrefixCache | None = None,
        slab_tokens: int = 0,
    ) -> None:
        self.pool = BlockPool(blocks)
        self.block_size = block_size
        self.groups = groups
        self._cache = cache
        self._slab_tokens = slab_tokens

    @property
    def cache(self) -> PrefixCache | None:
        return self._cache

    def blocks_for(self, positions: int) -> int:
        """How many blocks a sequence of `positions` positions takes, over all layer groups."""
        return self.groups * ceil_div(max(positions, self._slab_tokens), self.block_size)

    def admit(self, sequence: Sequence, row: int, *, headroom: int) -> Admission | Shortage:
        """Cover every position the sequence has now, sharing what the prefix cache holds.

        Returns  Shortage if fewer than `headroom` blocks would stay available. Nothing has changed.
        Keeps    at least one position is left to compute; a shared block is never written to.
        """
        found, copied, short = self._fit(sequence, headroom, frozenset())
        return Shortage(short) if short else self._adopt(sequence, row, found, copied)

    def missing(
        self, sequence: Sequence, *, headroom: int, leaving: Collection[Sequence] = ()
    ) -> int:
        """How many blocks `admit` would be short of, had the `leaving` released theirs."""
        _, _, short = self._fit(sequence, headroom, self._freed(leaving))
        return short

    def _fit(
        self, sequence: Sequence, headroom: int, freed: Collection[int]
    ) -> tuple[int, int, int]:
        """(blocks found, of those to copy, blocks missing), were the `freed` available too."""
        found, copied = self._find(sequence)
        short = self._shortage(sequence, found, copied, headroom, freed)
        if short and copied:  # the copy needs one block more than computing that block again
            found, copied = found - 1, 0
            short = self._shortage(sequence, found, copied, headroom, freed)
        return found, copied, short

    def _find(self, sequence: Sequence) -> tuple[int, int]:
        """How many leading blocks the cache holds, and how many of those must be copied.

        A full hit leaves the last position to compute: its block is written to, so it is copied.
        """
        if self._cache is None or not sequence.request.use_cache:
            return 0, 0
        length = len(sequence.tokens)
        self._cache.extend(sequence.prefixes, sequence.context, sequence.tokens, length)
        found = self._cache.match(sequence.prefixes, length // self.block_size)
        return found, int(found > 0 and found * self.block_size == length)

    def _shortage(
        self, sequence: Sequence, found: int, copied: int, headroom: int, freed: Collection[int]
    ) -> int:
        """How many blocks are missing to admit with these hits; 0 if none."""
        needed = self.blocks_for(len(sequence.tokens)) - self.groups * (found - copied)
        revived = sum(
            self.pool.is_cached(block) or block in freed
            for node in sequence.prefixes[:found]
            for block in node.blocks
        )
        return max(0, headroom + needed + revived - self.pool.available - len(freed))

    def _freed(self, leaving: Iterable[Sequence]) -> frozenset[int]:
        """The blocks that nobody but the `leaving` owns."""
        held = Counter(
            block for sequence in leaving for table in sequence.tables for block in table.blocks
        )
        return frozenset(
            block for block, owners in held.items() if owners == self.pool.references(block)
        )

    def _adopt(self, sequence: Sequence, row: int, found: int, copied: int) -> Admission:
        shared = found - copied
        hits = [tuple(node.blocks) for node in sequence.prefixes[:found]]
        for block in chain.from_iterable(hits):
            self.pool.share(block)
        writes: list[TableWrite] = []
        copies: list[BlockCopy] = []
        evicted: list[int] = []
        reserved = max(len(sequence.tokens), self._slab_tokens)
        for group, table in enumerate(sequence.tables):
            table.grow(tuple(blocks[group] for blocks in hits[:shared]))
            taken = self.pool.take(table.missing(reserved))
            assert not isinstance(taken, Shortage), "counted before"
            evicted += taken.evicted
            copies += [
                BlockCopy(hit[group], new)
                for hit, new in zip(hits[shared:], taken.blocks, strict=False)
            ]
            table.grow(taken.blocks)
            writes.append(TableWrite(row, group, 0, table.blocks))
        for block in chain.from_iterable(hits[shared:]):  # held only so that no target reuses it
            self.pool.release(block, keep=True)
        self._forget(evicted)
        sequence.sealed = shared
        return Admission(
            writes=tuple(writes),
            copies=tuple(copies),
            cached_tokens=found * self.block_size - copied,
            blocks_found=found * self.groups,
            blocks_allocated=sum(len(table) - shared for table in sequence.tables),
            evicted=tuple(evicted),
        )

    def covers(self, sequence: Sequence, upto: int) -> bool:
        """Whether there is nothing to reserve: the tables reach every position below `upto`."""
        return all(table.covers(upto) for table in sequence.tables)

    def reserve(self, sequence: Sequence, upto: int) -> Reservation | Shortage:
        """Make the tables of `sequence` cover every position below `upto`.

        Returns  the writes a runner applies before computing; usually none, a block lasts long.
                 Shortage(blocks): how many are missing. Nothing has changed.
        Keeps    free + cached + owned + fenced = all, each block in exactly one.
        Cost     O(blocks added); no hashing.
        """
        missing = [table.missing(upto) for table in sequence.tables]
        taken = self.pool.take(sum(missing))
        if isinstance(taken, Shortage):
            return taken
        self._forget(taken.evicted)
        writes, rest = [], taken.blocks
        for group, (table, count) in enumerate(zip(sequence.tables, missing, strict=True)):
            if count:
                blocks, rest = rest[:count], rest[count:]
                writes.append(TableWrite(sequence.row, group, table.grow(blocks), blocks))
        return Reservation(tuple(writes), taken.evicted)

    def seal(self, sequence: Sequence) -> None:
        """Offer the blocks that `sequence` has filled to the prefix cache.

        Cost     one hash a filled block; nothing between.
        """
        if self._cache is None or not sequence.request.use_cache:
            return
        full = sequence.computed // self.block_size
        if full <= sequence.sealed:
            return
        self._cache.extend(
            sequence.prefixes, sequence.context, sequence.tokens, full * self.block_size
        )
        for index in range(sequence.sealed, full):
            for group, table in enumerate(sequence.tables):
                self._cache.publish(sequence.prefixes[index], group, table[index])
        sequence.sealed = full

    def distrust(self, sequence: Sequence) -> None:
        """Let no later request find the prefix of `sequence`: its KV may be damaged.

        Its blocks, and those it had before a preemption, leave the cache; who shares one keeps it.
        """
        blocks = [b for node in sequence.prefixes for b in node.blocks if b != ABSENT]
        self._forget(blocks)
        self.pool.drop([block for block in blocks if self.pool.is_cached(block)])

    def release(self, sequence: Sequence) -> int:
        """Give back every block of the sequence; returns how many are available again.

        The tail goes first, in every group: it is evicted before the head that more prompts share.
        """
        before = self.pool.available
        entries = zip(*(table.clear() for table in sequence.tables), strict=True)
        for block in chain.from_iterable(reversed(list(entries))):
            self.pool.release(block, keep=self._publishes(block))
        return self.pool.available - before

    def _publishes(self, block: int) -> bool:
        return self._cache is not None and self._cache.publishes(block)

    def _forget(self, evicted: tuple[int, ...] | list[int]) -> None:
        if self._cache is not None:
            for block in evicted:
                self._cache.forget(block)
