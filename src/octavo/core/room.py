"""Room: how many blocks an admission or a step takes, and how many of them are missing.

    needed    blocks to fill  +  found ones that are cached now  +  a copy of one begun
    room      free  +  cached  +  what those who would leave give  −  headroom

It counts and changes nothing. What would be available if some left, if all transfers were over, or
if all holds went, is asked in the same way.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain

from octavo.core.block_pool import BlockPool
from octavo.core.block_table import ABSENT, BlockTable
from octavo.core.hits import Found, Hits, Parent
from octavo.core.sequence import Sequence
from octavo.core.transfers import Transfers
from octavo.core.windows import Windows
from octavo.units import ceil_div


@dataclass(frozen=True, slots=True)
class Fit:
    """How a sequence would be admitted: it shares what was `found`, computes from position `start`
    on, and covers all below `reaches` in each layer group. `short` of so many blocks, 0 if none."""

    found: Found
    start: int
    reaches: list[int]
    short: int


class Room:
    """With `slab_tokens` an admission takes that many positions, however short a sequence is."""

    def __init__(
        self,
        pool: BlockPool,
        hits: Hits,
        transfers: Transfers,
        windows: Windows,
        block_size: int,
        slab_tokens: int,
    ) -> None:
        self._pool = pool
        self._hits = hits
        self._transfers = transfers
        self._windows = windows
        self._block_size = block_size
        self._slab_tokens = slab_tokens

    def fit(
        self,
        sequence: Sequence,
        parent: Parent | None,
        *,
        chunk: int,
        upto: int,
        headroom: int,
        freed: Collection[int] = (),
        holds: bool = False,
    ) -> Fit:
        """How `sequence` would be admitted, were the `freed` blocks available too, and with `holds`
        all those that only holds own.

        Found tokens that end in the middle of a block are left there if its copy may be one block
        too many, or if the rest is swapped and comes back block by block.
        """
        swapped = self._transfers.swapped_tokens(sequence)
        for step in (1, self._block_size):
            found = self._hits.most(sequence, parent, step)
            start = max(found.tokens, swapped)
            reaches = self._reaches(sequence, start, chunk, upto)
            short = self._shortage(found, start, reaches, headroom, freed, holds)
            if found.tokens % self._block_size == 0 or (not short and start == found.tokens):
                break
        return Fit(found, start, reaches, short)

    def lacking(
        self,
        sequence: Sequence,
        upto: int,
        leaving: Collection[Sequence],
        headroom: int,
        holds: bool,
    ) -> int:
        """How many blocks are missing to write up to position `upto`, had the `leaving` released
        theirs and were all transfers over; with `holds` had all holds gone too."""
        going = _owners(leaving)
        index = sequence.scheduled // self._block_size
        copied = sum(
            self._pool.references(table[index])
            - self._pool.transfers(table[index])
            - going[table[index]]
            - holds * self._pool.holds(table[index])
            > 1
            for table in sequence.tables
            if self.protects(table, sequence.scheduled)
        )
        missing = sum(table.missing(upto) for table in sequence.tables)
        available = self._pool.available + self._pool.fenced + len(self.freed(leaving, holds))
        return max(0, missing + copied + headroom - available - holds * self._pool.yielding)

    def freed(self, leaving: Iterable[Sequence], holds: bool = False) -> frozenset[int]:
        """The blocks that nobody but the `leaving` owns, or nobody but they and `holds`."""
        return frozenset(
            block
            for block, owners in _owners(leaving).items()
            if owners + holds * self._pool.holds(block)
            == self._pool.references(block) - self._pool.transfers(block)
        )

    def protects(self, table: BlockTable, position: int) -> bool:
        """Whether `position` lies in the middle of a block that others own or may find."""
        if not position % self._block_size or not table.covers(position):
            return False
        block = table[position // self._block_size]
        return self._pool.references(block) > 1 or self._hits.publishes(block)

    def _reaches(self, sequence: Sequence, start: int, chunk: int, upto: int) -> list[int]:
        """Below which position an admission that computes from `start` on covers all."""
        whole = max(min(start + chunk, len(sequence.tokens)), upto, self._slab_tokens)
        return [
            whole if window is None else min(whole, max(start, window) + chunk)
            for window in self._windows
        ]

    def _shortage(
        self,
        found: Found,
        start: int,
        reaches: Items[int],
        headroom: int,
        freed: Collection[int],
        holds: bool,
    ) -> int:
        """How many blocks are missing to cover `reaches` with these hits; 0 if none."""
        columns = self._hits.columns(found.entries, start)
        partial = found.tokens % self._block_size > 0  # that entry is copied
        needed = sum(
            ceil_div(reach, self._block_size) - len(column) + partial
            for reach, column in zip(reaches, columns, strict=True)
        )
        revived = sum(
            self._pool.is_cached(block) or block in freed or (holds and self._pool.yields(block))
            for block in chain.from_iterable(columns)
            if block != ABSENT
        )
        available = self._pool.available + len(freed) + holds * self._pool.yielding
        return max(0, headroom + needed + revived - available)


def _owners(sequences: Iterable[Sequence]) -> Counter[int]:
    """How many of these own each block."""
    return Counter(
        block for sequence in sequences for table in sequence.tables for _, block in table.live()
    )
