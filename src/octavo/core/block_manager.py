"""BlockManager: the one place that changes who owns which block.

It stands over the pool (who is free), the tables (which block holds which positions) and the prefix
cache (which content can be shared). Every call covers what is asked or changes nothing.

    hits        what KV is there already                     reads
    room        how many blocks are missing                  reads
    transfers   what a preemption moves to the host arena    fences blocks in transfer
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from itertools import chain, zip_longest

from octavo.core.block_pool import BlockPool, Shortage
from octavo.core.block_table import ABSENT, BlockTable
from octavo.core.budget import Preemption
from octavo.core.grants import Admission, Reservation, Yielded
from octavo.core.hits import Found, Hits, Lead, Parent
from octavo.core.plan import BlockCopy, Move, Returned, TableWrite
from octavo.core.prediction import AnswerLengths, foreseen
from octavo.core.prefix_cache import Fate, Prefix, PrefixCache
from octavo.core.room import Room
from octavo.core.sequence import Sequence
from octavo.core.swap import HostArena
from octavo.core.transfers import Transfers
from octavo.core.windows import Windows, blocks_for, first_held, longest_chunk, next_returned
from octavo.units import ceil_div


class BlockManager:
    """Each position of a sequence needs one slot in one block of every layer group; the groups
    with a window give back the blocks that have left it.

    With `slab_tokens` an admission reserves that many positions, however short the sequence is:
    what an allocator of contiguous slabs would do, for comparison. Preempted sequences can be
    swapped to the `arena`.
    """

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        windows: Windows = (None,),
        cache: PrefixCache | None = None,
        slab_tokens: int = 0,
        arena: HostArena | None = None,
    ) -> None:
        self.pool = BlockPool(blocks)
        self.arena = arena
        self.block_size = block_size
        self.windows = windows
        self.groups = len(windows)
        self._sliding = [(g, window) for g, window in enumerate(windows) if window is not None]
        self.cache = cache
        self._slab_tokens = slab_tokens
        self._returned: list[Returned] = []
        self._now = 0.0
        self._plan_id = 0
        self._hits = Hits(cache, windows, block_size)
        self._transfers = Transfers(self.pool, arena, self._hits, block_size)
        self._room = Room(self.pool, self._hits, self._transfers, windows, block_size, slab_tokens)

    def begin(self, now: float, plan_id: int) -> None:
        """What changes from here on does so at this time, for this plan: the cache remembers it."""
        self._now, self._plan_id = now, plan_id

    def blocks_for(self, positions: int) -> int:
        """How many blocks a sequence of `positions` positions takes, over all layer groups."""
        return blocks_for(self.windows, max(positions, self._slab_tokens), self.block_size)

    def longest_chunk(self, positions: int) -> int:
        """In what chunks a sequence of `positions` positions, which fits, can be computed alone."""
        reserved = max(positions, self._slab_tokens)
        return longest_chunk(self.windows, reserved, self.block_size, self.pool.total)

    def admit(
        self,
        sequence: Sequence,
        row: int,
        *,
        chunk: int,
        upto: int,
        headroom: int,
        parent: Parent | None = None,
    ) -> Admission | Shortage:
        """Cover what the sequence needs to start, sharing what the prefix cache or `parent` has.

        That is the `chunk` positions after those found, as far as the sequence goes, and all
        positions below `upto`, of which a group with a window needs no more at once than that and
        a chunk.
        Returns  Shortage if fewer than `headroom` blocks would stay available. Nothing has changed.
        Keeps    at least one position is left to compute; a shared block is never written to.
        """
        fit = self._room.fit(sequence, parent, chunk=chunk, upto=upto, headroom=headroom)
        if fit.short:
            return Shortage(fit.short)
        found = fit.found
        restored = fit.start if fit.start > found.tokens else 0
        private = sequence.private and restored > 0
        self._share(sequence, found, fit.start)
        sequence.private |= private
        reservation = self._cover(sequence, row, found.tokens, fit.reaches)
        assert isinstance(reservation, Reservation), "counted before"
        whole = found.tokens // self.block_size
        return Admission(
            writes=self._tables_of(sequence, row),
            copies=reservation.copies,
            cached_tokens=found.tokens,
            blocks_found=sum(max(0, whole - table.first) for table in sequence.tables),
            blocks_allocated=sum(len(table) - max(whole, table.first) for table in sequence.tables),
            evicted=reservation.evicted,
            parent=found.parent,
            restored_tokens=restored,
            moves=self._transfers.bring_back(sequence, found.tokens),
        )

    def missing(
        self,
        sequence: Sequence,
        *,
        chunk: int,
        upto: int,
        headroom: int,
        leaving: Collection[Sequence] = (),
        parent: Parent | None = None,
        holds: bool = False,
    ) -> int:
        """How many blocks `admit` would be short of, had the `leaving` released theirs and were all
        transfers over; with `holds` had all holds gone too."""
        freed = self._room.freed(leaving, holds) | self.pool.fences()
        fit = self._room.fit(
            sequence, parent, chunk=chunk, upto=upto, headroom=headroom, freed=freed, holds=holds
        )
        return fit.short

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many leading tokens of `sequence` the prefix cache has, for those who ask."""
        return self._hits.cached(sequence).tokens

    def fills_prompt(self, sequence: Sequence) -> bool:
        """Whether a running sequence has blocks to compute of which others may know the content."""
        whole = sequence.computed // self.block_size
        return whole < len(sequence.prefixes) and not sequence.private

    def lead(
        self, sequence: Sequence, leaders: Iterable[Sequence], parent: Parent | None = None
    ) -> Lead | None:
        """Who of the `leaders` is computing what `sequence` could wait for; None if nobody is, or
        if its own KV is swapped."""
        if self._transfers.swapped_tokens(sequence):
            return None
        return self._hits.lead(sequence, leaders, parent)

    def fork(
        self, parent: Sequence, child: Sequence, row: int, upto: int
    ) -> tuple[TableWrite, ...]:
        """Let `child`, which owns nothing, go on from the first `upto` positions of `parent`.

        Every block is shared, a partly filled last one too, and none is taken: who of the two
        writes to that one first gets a copy of it in `reserve`. With windows the parent must still
        hold what the child needs: it does for the newest position it computed, and the one after.
        Returns  the writes that a runner applies for the child's `row`.
        """
        assert upto <= parent.computed, f"{parent.id} has computed {parent.computed}, not {upto}"
        found = self._hits.held(parent, upto)
        assert found.tokens == upto, f"{parent.id} has given back what {child.id} needs"
        self._share(child, found, upto)
        return self._tables_of(child, row)

    def tables_of(self, sequence: Sequence) -> tuple[TableWrite, ...]:
        """The writes after which the row of a running sequence has all its blocks."""
        return self._tables_of(sequence, sequence.row)

    def _share(self, sequence: Sequence, found: Found, start: int) -> None:
        """Let `sequence` own what it needs of what was found to compute from `start` on, beside
        whoever does already."""
        self._adopt(sequence.tables, self._hits.columns(found.entries, start))
        sequence.sealed = found.tokens // self.block_size
        sequence.private = False
        if found.parent is not None:
            if isinstance(found.parent, Sequence):
                found.parent.writable = 0  # one of its blocks may be shared now
            sequence.prefixes = found.parent.prefixes[: sequence.sealed]
            sequence.sealed = len(sequence.prefixes)  # fewer if the parent published nothing
            sequence.private = found.parent.private

    def _adopt(self, tables: Items[BlockTable], columns: Items[tuple[int, ...]]) -> None:
        """Let empty tables begin with these entries, and own their blocks."""
        for table, column in zip(tables, columns, strict=True):
            blocks = tuple(block for block in column if block != ABSENT)
            table.skip(len(column) - len(blocks))
            table.grow(blocks)
            for block in blocks:
                self.pool.share(block)

    @staticmethod
    def _tables_of(sequence: Sequence, row: int) -> tuple[TableWrite, ...]:
        return tuple(
            TableWrite(row, group, table.first, tuple(block for _, block in table.live()))
            for group, table in enumerate(sequence.tables)
        )

    def reserve(self, sequence: Sequence, upto: int, headroom: int = 0) -> Reservation | Shortage:
        """Make the tables of `sequence` cover every position below `upto`, ready to be written to.

        `headroom` blocks, which others wait for, stay available.
        Returns  the writes and copies a runner applies before computing; usually none, a block
                 lasts long. Shortage(blocks): how many are missing. Nothing has changed.
        Keeps    free + cached + owned + fenced = all, each block in exactly one; the blocks from
                 the next position on have one owner and are not published.
        Cost     O(blocks added); no hashing.
        """
        reaches = [upto] * self.groups
        return self._cover(sequence, sequence.row, sequence.scheduled, reaches, headroom)

    def foreseen(
        self,
        sequence: Sequence,
        staying: Iterable[Sequence],
        leaving: Iterable[Sequence],
        lengths: AnswerLengths,
    ) -> int:
        """How many blocks `sequence`, admitted when the `leaving` have gone, and those `staying`
        will need at once beyond what they hold then."""
        owned = self.pool.owned - len(self._room.freed(leaving))
        return foreseen(sequence, staying, lengths, owned=owned, block_size=self.block_size)

    def lacking(
        self,
        sequence: Sequence,
        upto: int,
        leaving: Collection[Sequence],
        headroom: int = 0,
        holds: bool = False,
    ) -> int:
        """How many blocks `reserve` would be short of, had the `leaving` released theirs and were
        all transfers over; with `holds` had all holds gone too."""
        return self._room.lacking(sequence, upto, leaving, headroom, holds)

    def _cover(
        self,
        sequence: Sequence,
        row: int,
        start: int,
        reaches: Items[int],
        headroom: int = 0,
    ) -> Reservation | Shortage:
        """`reserve` for a sequence that writes from position `start` on, up to one in each group.

        Only the block that holds `start` in its middle can be shared: whoever forks shares what
        has been computed. It is copied. When blocks are short and nobody else owns it, it is
        written again in place, and no longer found in the prefix cache until it is full again.
        """
        tables, index, rewritten = sequence.tables, start // self.block_size, []
        copied = []
        if start % self.block_size:
            copied = [table for table in tables if self._room.protects(table, start)]
        missing = [table.missing(upto) for table, upto in zip(tables, reaches, strict=True)]
        if copied and sum(missing) + len(copied) + headroom > self.pool.available:
            rewritten = [table for table in copied if self.pool.references(table[index]) == 1]
            copied = [table for table in copied if table not in rewritten]
        count = sum(missing) + len(copied)
        if headroom and count and count + headroom > self.pool.available:
            return Shortage(count + headroom - self.pool.available)
        taken = self.pool.take(count)
        if isinstance(taken, Shortage):
            return taken
        if taken.evicted or rewritten:
            lost = (*taken.evicted, *(table[index] for table in rewritten))
            self._forget(lost, Fate("evicted", sequence.id, self._now, self._plan_id))
        writes, copies, rest = [], [], taken.blocks
        for group, table in enumerate(tables):
            count = missing[group]
            if table in copied:
                target, rest = rest[0], rest[1:]
                source = table.replace(index, target)
                self.pool.release(source, keep=self._hits.publishes(source))
                copies.append(BlockCopy(source, target))
                writes.append(TableWrite(row, group, index, (target,)))
            if count:
                blocks, rest = rest[:count], rest[count:]
                writes.append(TableWrite(row, group, table.grow(blocks), blocks))
        sequence.writable = self.block_size * min(map(len, tables))
        return Reservation(tuple(writes), tuple(copies), taken.evicted)

    def seal(self, sequence: Sequence) -> None:
        """Offer the blocks that `sequence` has filled to the prefix cache, and give back those that
        have left the window of their group.

        Cost     one hash a filled block; nothing between.
        """
        full = sequence.computed // self.block_size
        if full > sequence.sealed and self.cache is not None:
            self._publish(sequence, self.cache, full)
        for group, window in self._sliding:
            self._give_back(sequence, group, window)

    def next_event(self, sequence: Sequence) -> int:
        """How many positions are computed when `seal` has something to do again, at the least."""
        computed, size = sequence.computed, self.block_size
        full = (computed // size + 1) * size
        return min([full, *(next_returned(window, computed, size) for _, window in self._sliding)])

    def _give_back(self, sequence: Sequence, group: int, window: int) -> None:
        """What holds answer tokens is of use to hardly anyone else, and is evicted first: or a long
        answer would drive all others out of the cache. Prompts may begin alike."""
        first = first_held(window, sequence.computed, self.block_size)
        gone = sequence.tables[group].give_back(first)
        if gone:
            self._returned.append(Returned(sequence.row, group, first))
        for index, block in reversed(gone):
            is_prompt = (index + 1) * self.block_size <= len(sequence.request.prompt)
            self.pool.release(block, keep=self._hits.publishes(block), soon=not is_prompt)

    def returned(self) -> tuple[Returned, ...]:
        """What was given back since this was last asked, for the runner to know."""
        returned, self._returned = tuple(self._returned), []
        return returned

    def _publish(self, sequence: Sequence, cache: PrefixCache, full: int) -> None:
        """The first `full` blocks, those before that were not offered yet."""
        if sequence.private or not sequence.request.use_cache:
            return
        cache.extend(sequence.prefixes, sequence.context, sequence.tokens, full * self.block_size)
        for group, table in enumerate(sequence.tables):
            for index in range(max(sequence.sealed, table.first), full):
                cache.publish(sequence.prefixes[index], group, table[index])
        sequence.sealed = full

    def distrust(self, sequence: Sequence) -> None:
        """Let no later request find the prefix of `sequence`: its KV may be damaged.

        Its blocks, and those it had before a preemption, leave the cache; who shares one keeps it.
        """
        blocks = [b for node in sequence.prefixes for b in node.blocks if b != ABSENT]
        self._forget(blocks, Fate("distrusted", sequence.id, self._now, self._plan_id))
        self.pool.drop([block for block in blocks if self.pool.is_cached(block)])

    def shrink(self, sequence: Sequence) -> None:
        """Give back the blocks beyond the next position: drafts stood there that were wrong."""
        positions = max(sequence.computed + 1, self._slab_tokens)
        count = ceil_div(positions, self.block_size)
        for table in sequence.tables:
            for block in reversed(table.truncate(count)):
                self.pool.release(block, keep=False)
        sequence.writable = min(sequence.writable, count * self.block_size)

    def release(self, sequence: Sequence) -> int:
        """Give back all that is held for the sequence, in the host arena too; returns how many
        blocks are available again, or will be when their transfers are over.

        The tail goes first, in every group: it is evicted before the head that more prompts share.
        """
        self._transfers.drop(sequence)
        sequence.writable = 0
        return self._release(sequence.tables)

    def _release(self, tables: Items[BlockTable]) -> int:
        before = self.pool.available + self.pool.fenced
        entries = zip_longest(*(table.clear() for table in tables), fillvalue=ABSENT)
        for block in chain.from_iterable(reversed(list(entries))):
            if block != ABSENT:
                self.pool.release(block, keep=self._hits.publishes(block))
        return self.pool.available + self.pool.fenced - before

    # --- swap

    def preempt(
        self, sequence: Sequence, preemption: Preemption, *, recompute_s: float | None, intact: bool
    ) -> Yielded:
        """Take every block of a running sequence, and keep its KV in the host arena if that pays.

        A step of its own that computes it again would take `recompute_s`, if that is known. If not
        `intact`, some block does not hold what it should, and nothing is kept.
        Keeps    the blocks that are moved, and their slots, are in transfer until `settle`.
        """
        how, moves = self._transfers.keep(
            sequence, preemption, recompute_s=recompute_s, intact=intact
        )
        return Yielded(how, self._release(sequence.tables), moves)

    def in_transfer(self, sequence: Sequence) -> int:
        """How many blocks of a swapped sequence are still on their way to the arena."""
        return self._transfers.in_transfer(sequence)

    def settle(self, moves: tuple[Move, ...], done: int) -> None:
        """The transfers of a plan are over; the first `done` were carried out.

        Whoever's KV did not get to the arena is computed again.
        """
        self._transfers.settle(moves, done)

    # --- holds

    def keep(self, sequence: Sequence) -> tuple[BlockTable, ...]:
        """Tables for a hold, with all blocks whose content `sequence` has computed; it loses them,
        and what it has beyond is given back."""
        kept = []
        for table in sequence.tables:
            for block in reversed(table.truncate(ceil_div(sequence.computed, self.block_size))):
                self.pool.release(block, keep=False)
            kept.append(table.move())
            for _, block in kept[-1].live():
                self.pool.hold(block)
        return tuple(kept)

    def published(self, nodes: Items[Prefix]) -> set[int] | None:
        """The blocks in which a sequence that begins with `nodes` would find them; None if it would
        not find all."""
        columns = self._hits.published(nodes)
        if columns is None:
            return None
        return {block for block in chain.from_iterable(columns) if block != ABSENT}

    def pin(self, nodes: Items[Prefix]) -> tuple[BlockTable, ...]:
        """Tables for a hold, of the published blocks of `nodes`."""
        tables = tuple(BlockTable(self.block_size) for _ in range(self.groups))
        columns = self._hits.published(nodes)
        assert columns is not None, "a hold is made of what is published"
        self._adopt(tables, columns)
        for table in tables:
            for _, block in table.live():
                self.pool.hold(block)
        return tables

    def let_go(self, tables: Items[BlockTable]) -> int:
        """Give back what a hold has; returns how many blocks are available again."""
        for table in tables:
            for _, block in table.live():
                self.pool.unhold(block)
        return self._release(tables)

    def flush(self) -> None:
        """Empty the prefix cache: unowned blocks become free, the others are found no more."""
        if self.cache is not None:
            published = list(self.cache.published())
            self._forget(published, Fate("flushed", "", self._now, self._plan_id))
            self.pool.drop([block for block in published if self.pool.is_cached(block)])

    def _forget(self, blocks: Iterable[int], fate: Fate) -> None:
        if self.cache is not None:
            for block in blocks:
                self.cache.forget(block, fate)
