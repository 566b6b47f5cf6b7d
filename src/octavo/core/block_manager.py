"""BlockManager: the one place that changes who owns which block.

It stands over the pool (who is free), the tables (which block holds which positions) and the prefix
cache (which content can be shared). Every call covers what is asked or changes nothing.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Protocol

from octavo.core.block_pool import BlockPool, Shortage
from octavo.core.block_table import ABSENT, BlockTable
from octavo.core.budget import Preemption
from octavo.core.plan import BlockCopy, Move, Returned, TableWrite
from octavo.core.policy import Yielding, swap_or_recompute
from octavo.core.prediction import AnswerLengths, foreseen
from octavo.core.prefix_cache import Fate, Prefix, PrefixCache
from octavo.core.sequence import Sequence
from octavo.core.swap import HostArena
from octavo.core.windows import Windows, blocks_for, first_held, first_needed, longest_chunk
from octavo.units import ceil_div


class Parent(Protocol):
    """Who owns blocks that another can go on from: a running sequence, or a hold."""

    id: str
    tables: tuple[BlockTable, ...]
    prefixes: list[Prefix]
    private: bool

    def common_with(self, sequence: Sequence) -> int: ...


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a runner must apply before it computes, and which cached blocks were reused for it."""

    writes: tuple[TableWrite, ...]
    copies: tuple[BlockCopy, ...]
    evicted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admission:
    """Blocks for a sequence to start: the first `cached_tokens` positions hold their KV already.

    `blocks_found` are shared whole, those allocated are new, a copy among them. `parent` is whose
    blocks were found, None for those of the prefix cache. If `restored_tokens` are more, the
    `moves` bring the KV of the first so many positions back from the host arena.
    """

    writes: tuple[TableWrite, ...]
    copies: tuple[BlockCopy, ...]
    cached_tokens: int
    blocks_found: int
    blocks_allocated: int
    evicted: tuple[int, ...]
    parent: Parent | None = None
    restored_tokens: int = 0
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True)
class Yielded:
    """What a victim gave: so many `blocks` are available again, or will be when their transfers
    are over. The `moves` keep its KV; without any it is computed again."""

    how: Yielding
    blocks: int
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Lead:
    """`leader` is computing the first block that a sequence `lacking` so many tokens would not
    find. Below position `upto`, which ends a block, their prompts are `alike`: so many tokens more
    would be found then."""

    leader: Sequence
    upto: int
    alike: int
    lacking: int


@dataclass(frozen=True, slots=True)
class _Found:
    """Blocks that hold the first `tokens` positions, an entry each, of one block a layer group; of
    a group with a window perhaps only the last ones, ABSENT before. `parent` owns them; without
    one they are in the prefix cache.
    """

    entries: tuple[tuple[int, ...], ...]
    tokens: int
    parent: Parent | None = None


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
        self._sliding = [(g, window) for g, window in enumerate(windows) if window is not None]
        self._cache = cache
        self._slab_tokens = slab_tokens
        self._returned: list[Returned] = []
        self._now = 0.0
        self._plan_id = 0

    def begin(self, now: float, plan_id: int) -> None:
        """What changes from here on does so at this time, for this plan: the cache remembers it."""
        self._now, self._plan_id = now, plan_id

    @property
    def cache(self) -> PrefixCache | None:
        return self._cache

    @property
    def groups(self) -> int:
        return len(self.windows)

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
        found, short = self._fit(sequence, chunk, upto, headroom, frozenset(), parent)
        if short:
            return Shortage(short)
        private = sequence.private and self._swapped_tokens(sequence) > found.tokens
        self._share(sequence, found)
        sequence.private |= private
        reaches = self._reaches(sequence, found, chunk, upto)
        reservation = self._cover(sequence, row, found.tokens, reaches)
        assert isinstance(reservation, Reservation), "counted before"
        whole = found.tokens // self.block_size
        swapped = self._swapped_tokens(sequence)
        return Admission(
            writes=self._tables_of(sequence, row),
            copies=reservation.copies,
            cached_tokens=found.tokens,
            blocks_found=sum(max(0, whole - table.first) for table in sequence.tables),
            blocks_allocated=sum(len(table) - max(whole, table.first) for table in sequence.tables),
            evicted=reservation.evicted,
            parent=found.parent,
            restored_tokens=swapped if swapped > found.tokens else 0,
            moves=self._move_in(sequence, found.tokens),
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
        freed = self._freed(leaving, holds) | self.pool.fences()
        _, short = self._fit(sequence, chunk, upto, headroom, freed, parent, holds)
        return short

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many leading tokens of `sequence` the prefix cache has, for those who ask."""
        return self._find(sequence, 1).tokens

    def fills_prompt(self, sequence: Sequence) -> bool:
        """Whether a running sequence has blocks to compute of which others may know the content."""
        whole = sequence.computed // self.block_size
        return whole < len(sequence.prefixes) and not sequence.private

    def lead(
        self, sequence: Sequence, leaders: Iterable[Sequence], parent: Parent | None = None
    ) -> Lead | None:
        """Who of the `leaders` is computing what `sequence` could wait for; None if nobody is.

        Cost     a look-up of the prompt; O(leaders + blocks alike).
        """
        if self._cache is None or not sequence.request.use_cache or self._swapped_tokens(sequence):
            return None
        found, size = self._find(sequence, 1), self.block_size
        nodes, tokens = sequence.prefixes, found.tokens
        if parent is not None:
            tokens = max(tokens, parent.common_with(sequence))
        first = max(self._cache.match(nodes, len(nodes)), tokens // size)
        if first >= len(nodes):
            return None
        alike = [
            (_alike(leader.prefixes, nodes, first), leader)
            for leader in leaders
            if leader.computed // size <= first < len(leader.prefixes)
        ]
        count, leader = max(alike, key=lambda one: one[0], default=(0, sequence))
        if count <= first:
            return None
        length = len(sequence.tokens)
        upto = min(count * size, length - 1)
        return Lead(leader, count * size, upto - tokens, length - tokens)

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
        found = self._held(parent, upto)
        assert found.tokens == upto, f"{parent.id} has given back what {child.id} needs"
        self._share(child, found)
        return self._tables_of(child, row)

    def _fit(
        self,
        sequence: Sequence,
        chunk: int,
        upto: int,
        headroom: int,
        freed: Collection[int],
        parent: Parent | None,
        holds: bool = False,
    ) -> tuple[_Found, int]:
        """(what to share, blocks missing), were the `freed` available too."""
        found = self._most(sequence, parent, 1)
        if self._swapped_tokens(sequence) > found.tokens:  # the rest comes back by moves
            found = self._most(sequence, parent, self.block_size)
        reaches = self._reaches(sequence, found, chunk, upto)
        short = self._shortage(sequence, found, reaches, headroom, freed, holds)
        if short and found.tokens % self.block_size:
            # the copy may need one block more than computing that block again
            found = self._most(sequence, parent, self.block_size)
            reaches = self._reaches(sequence, found, chunk, upto)
            short = self._shortage(sequence, found, reaches, headroom, freed, holds)
        return found, short

    def _most(self, sequence: Sequence, parent: Parent | None, step: int) -> _Found:
        """What the prefix cache or `parent` has, a multiple of `step` tokens: one, or a block."""
        found = self._find(sequence, step)
        if parent is None:
            return found
        shared = parent.common_with(sequence) // step * step
        return max(found, self._held(parent, shared), key=lambda one: one.tokens)

    def _reaches(self, sequence: Sequence, found: _Found, chunk: int, upto: int) -> list[int]:
        """Below which position an admission with these hits covers all, in each layer group."""
        start = self._start(sequence, found)
        whole = max(min(start + chunk, len(sequence.tokens)), upto, self._slab_tokens)
        return [
            whole if window is None else min(whole, max(start, window) + chunk)
            for window in self.windows
        ]

    def _start(self, sequence: Sequence, found: _Found) -> int:
        """From which position a sequence with these hits computes."""
        return max(found.tokens, self._swapped_tokens(sequence))

    def _find(self, sequence: Sequence, step: int) -> _Found:
        """What the prefix cache holds, a multiple of `step` tokens. The last position is left to
        compute."""
        if self._cache is None or not sequence.request.use_cache:
            return _Found((), 0)
        length = len(sequence.tokens)
        self._cache.extend(sequence.prefixes, sequence.context, sequence.tokens, length)
        most = (length - 1) // step * step
        count = self._cache.match(sequence.prefixes, ceil_div(most, self.block_size), most)
        tokens = min(count * self.block_size, most)
        nodes = sequence.prefixes[:count]
        if tokens < most and step == 1:
            end = min(tokens + self.block_size, length - 1)
            parent = nodes[-1] if nodes else sequence.context
            begun = self._cache.begins_like(parent, tuple(sequence.tokens[tokens:end]))
            if begun is not None:
                nodes, tokens = [*nodes, begun[0]], tokens + begun[1]
        return _Found(tuple(tuple(node.blocks) for node in nodes), tokens)

    def _held(self, parent: Parent, upto: int) -> _Found:
        """What `parent` holds of the first `upto` positions; nothing if it gave back some that
        whoever goes on from there needs."""
        firsts = [first_needed(window, upto, self.block_size) for window in self.windows]
        if any(table.first > first for table, first in zip(parent.tables, firsts, strict=True)):
            return _Found((), 0)
        count = ceil_div(upto, self.block_size)
        entries = zip(*(table.blocks[:count] for table in parent.tables), strict=True)
        return _Found(tuple(entries), upto, parent)

    def _columns(self, entries: Items[Items[int]], start: int) -> list[tuple[int, ...]]:
        """The head of a table for each layer group: of the blocks that were found those that
        whoever computes from `start` on needs."""
        firsts = [first_needed(window, start, self.block_size) for window in self.windows]
        return [
            (*[ABSENT] * first, *(entry[group] for entry in entries[first:]))
            for group, first in enumerate(firsts)
        ]

    def _shortage(
        self,
        sequence: Sequence,
        found: _Found,
        reaches: Items[int],
        headroom: int,
        freed: Collection[int],
        holds: bool,
    ) -> int:
        """How many blocks are missing to cover `reaches` with these hits; 0 if none."""
        columns = self._columns(found.entries, self._start(sequence, found))
        partial = found.tokens % self.block_size > 0  # that entry is copied
        needed = sum(
            ceil_div(reach, self.block_size) - len(column) + partial
            for reach, column in zip(reaches, columns, strict=True)
        )
        revived = sum(
            self.pool.is_cached(block) or block in freed or (holds and self.pool.yields(block))
            for block in chain.from_iterable(columns)
            if block != ABSENT
        )
        available = self.pool.available + len(freed) + holds * self.pool.yielding
        return max(0, headroom + needed + revived - available)

    def _freed(self, leaving: Iterable[Sequence], holds: bool = False) -> frozenset[int]:
        """The blocks that nobody but the `leaving` owns, or nobody but they and `holds`."""
        return frozenset(
            block
            for block, owners in _owners(leaving).items()
            if owners + holds * self.pool.holds(block)
            == self.pool.references(block) - self.pool.transfers(block)
        )

    def _share(self, sequence: Sequence, found: _Found) -> None:
        """Let `sequence` own what was found beside whoever does already."""
        columns = self._columns(found.entries, self._start(sequence, found))
        self._adopt(sequence.tables, columns)
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

    def covers(self, sequence: Sequence, upto: int) -> bool:
        """Whether there is nothing to reserve: the tables reach every position below `upto`, and
        the block that the next position is written to has one owner. False if that is not known."""
        return upto <= sequence.writable

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
        owned = self.pool.owned - len(self._freed(leaving))
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
        going = _owners(leaving)
        index = sequence.scheduled // self.block_size
        copied = sum(
            self.pool.references(table[index])
            - self.pool.transfers(table[index])
            - going[table[index]]
            - holds * self.pool.holds(table[index])
            > 1
            for table in sequence.tables
            if self._protects(table, sequence.scheduled)
        )
        missing = sum(table.missing(upto) for table in sequence.tables)
        available = self.pool.available + self.pool.fenced + len(self._freed(leaving, holds))
        return max(0, missing + copied + headroom - available - holds * self.pool.yielding)

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
        index = start // self.block_size
        copied = [table for table in sequence.tables if self._protects(table, start)]
        rewritten: list[BlockTable] = []
        missing = [
            table.missing(upto) for table, upto in zip(sequence.tables, reaches, strict=True)
        ]
        if sum(missing) + len(copied) + headroom > self.pool.available:
            rewritten = [table for table in copied if self.pool.references(table[index]) == 1]
            copied = [table for table in copied if table not in rewritten]
        count = sum(missing) + len(copied)
        if headroom and count and count + headroom > self.pool.available:
            return Shortage(count + headroom - self.pool.available)
        taken = self.pool.take(count)
        if isinstance(taken, Shortage):
            return taken
        lost = (*taken.evicted, *(table[index] for table in rewritten))
        self._forget(lost, Fate("evicted", sequence.id, self._now, self._plan_id))
        writes, copies, rest = [], [], taken.blocks
        for group, (table, count) in enumerate(zip(sequence.tables, missing, strict=True)):
            if table in copied:
                target, rest = rest[0], rest[1:]
                source = table.replace(index, target)
                self.pool.release(source, keep=self._publishes(source))
                copies.append(BlockCopy(source, target))
                writes.append(TableWrite(row, group, index, (target,)))
            if count:
                blocks, rest = rest[:count], rest[count:]
                writes.append(TableWrite(row, group, table.grow(blocks), blocks))
        sequence.writable = self.block_size * min(map(len, sequence.tables))
        return Reservation(tuple(writes), tuple(copies), taken.evicted)

    def _protects(self, table: BlockTable, position: int) -> bool:
        """Whether `position` lies in the middle of a block that others own or may find."""
        if not position % self.block_size or not table.covers(position):
            return False
        block = table[position // self.block_size]
        return self.pool.references(block) > 1 or self._publishes(block)

    def seal(self, sequence: Sequence) -> None:
        """Offer the blocks that `sequence` has filled to the prefix cache, and give back those that
        have left the window of their group.

        Cost     one hash a filled block; nothing between.
        """
        full = sequence.computed // self.block_size
        if full > sequence.sealed and self._cache is not None:
            self._publish(sequence, self._cache, full)
        for group, window in self._sliding:
            self._give_back(sequence, group, window)

    def _give_back(self, sequence: Sequence, group: int, window: int) -> None:
        """What holds answer tokens is of use to hardly anyone else, and is evicted first: or a long
        answer would drive all others out of the cache. Prompts may begin alike."""
        first = first_held(window, sequence.computed, self.block_size)
        gone = sequence.tables[group].give_back(first)
        if gone:
            self._returned.append(Returned(sequence.row, group, first))
        for index, block in reversed(gone):
            is_prompt = (index + 1) * self.block_size <= len(sequence.request.prompt)
            self.pool.release(block, keep=self._publishes(block), soon=not is_prompt)

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

    def release(self, sequence: Sequence) -> int:
        """Give back all that is held for the sequence, in the host arena too; returns how many
        blocks are available again, or will be when their transfers are over.

        The tail goes first, in every group: it is evicted before the head that more prompts share.
        """
        if self.arena is not None:
            self.arena.drop(sequence.id)
        sequence.writable = 0
        return self._release(sequence.tables)

    def _release(self, tables: Items[BlockTable]) -> int:
        before = self.pool.available + self.pool.fenced
        entries = zip_longest(*(table.clear() for table in tables), fillvalue=ABSENT)
        for block in chain.from_iterable(reversed(list(entries))):
            if block != ABSENT:
                self.pool.release(block, keep=self._publishes(block))
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
        held = self._holding(sequence)
        count = sum(block != ABSENT for row in held for block in row)
        swap_s = None
        if self.arena is not None:
            if recompute_s is None:
                recompute_s = sequence.scheduled / self.arena.setup.tokens_per_s
            if intact and 0 < count <= self.arena.room:
                swap_s = self.arena.setup.seconds(count)
        how = swap_or_recompute(preemption, swap_s=swap_s, recompute_s=recompute_s)
        moves = self._move_out(sequence, held) if how.mode == "swap" else ()
        return Yielded(how, self._release(sequence.tables), moves)

    def _move_out(self, sequence: Sequence, held: Items[Items[int]]) -> tuple[Move, ...]:
        assert self.arena is not None
        swapped = self.arena.put(sequence.id, sequence.scheduled, held)
        moves = tuple(
            Move("out", row[index], slots[index])
            for index in range(len(held[0]))
            for row, slots in zip(held, swapped.slots, strict=True)
            if row[index] != ABSENT
        )
        for move in moves:
            self.pool.fence(move.block)
        return moves

    def _holding(self, sequence: Sequence) -> tuple[tuple[int, ...], ...]:
        """The blocks that hold the scheduled positions, a group each, ABSENT where none is needed
        by whoever goes on from there."""
        count = ceil_div(sequence.scheduled, self.block_size)
        entries = zip(*(table.blocks[:count] for table in sequence.tables), strict=True)
        return tuple(self._columns(tuple(entries), sequence.scheduled))

    def _move_in(self, sequence: Sequence, found: int) -> tuple[Move, ...]:
        """Bring back what the arena holds beyond the positions `found`; give all its slots back."""
        swapped = None if self.arena is None else self.arena.swapped(sequence.id)
        if self.arena is None or swapped is None:
            return ()
        moves = []
        if swapped.tokens > found:
            for table, slots in zip(sequence.tables, swapped.slots, strict=True):
                for index in range(max(found // self.block_size, table.first), len(slots)):
                    if slots[index] != ABSENT:
                        moves.append(Move("in", table[index], slots[index]))
        self.arena.take(sequence.id, [move.slot for move in moves])
        return tuple(moves)

    def _swapped_tokens(self, sequence: Sequence) -> int:
        swapped = None if self.arena is None else self.arena.swapped(sequence.id)
        return 0 if swapped is None else swapped.tokens

    def in_transfer(self, sequence: Sequence) -> int:
        """How many blocks of a swapped sequence are still on their way to the arena."""
        return 0 if self.arena is None else self.arena.in_transfer(sequence.id)

    def settle(self, moves: tuple[Move, ...], done: int) -> None:
        """The transfers of a plan are over; the first `done` were carried out.

        Whoever's KV did not get to the arena is computed again.
        """
        if self.arena is None:
            return
        self.arena.lose(move.slot for move in moves[done:] if move.kind == "out")
        for move in reversed(moves):  # the tail of a prefix is evicted before its head
            self.arena.lift(move.slot)
            if move.kind == "out":
                self.pool.lift(move.block, keep=self._publishes(move.block))

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
        newest = len(nodes) * self.block_size - 1
        if self._cache is None or self._cache.match(nodes, len(nodes), newest) < len(nodes):
            return None
        return {block for block in chain.from_iterable(self._needed(nodes)) if block != ABSENT}

    def pin(self, nodes: Items[Prefix]) -> tuple[BlockTable, ...]:
        """Tables for a hold, of the published blocks of `nodes`."""
        tables = tuple(BlockTable(self.block_size) for _ in range(self.groups))
        self._adopt(tables, self._needed(nodes))
        for table in tables:
            for _, block in table.live():
                self.pool.hold(block)
        return tables

    def _needed(self, nodes: Items[Prefix]) -> list[tuple[int, ...]]:
        """What whoever computes the last position of `nodes` needs of their blocks, a layer group
        each."""
        newest = len(nodes) * self.block_size - 1
        return self._columns([node.blocks for node in nodes], newest)

    def let_go(self, tables: Items[BlockTable]) -> int:
        """Give back what a hold has; returns how many blocks are available again."""
        for table in tables:
            for _, block in table.live():
                self.pool.unhold(block)
        return self._release(tables)

    def flush(self) -> None:
        """Empty the prefix cache: unowned blocks become free, the others are found no more."""
        if self._cache is not None:
            published = list(self._cache.published())
            self._forget(published, Fate("flushed", "", self._now, self._plan_id))
            self.pool.drop([block for block in published if self.pool.is_cached(block)])

    def _publishes(self, block: int) -> bool:
        return self._cache is not None and self._cache.publishes(block)

    def _forget(self, blocks: Iterable[int], fate: Fate) -> None:
        if self._cache is not None:
            for block in blocks:
                self._cache.forget(block, fate)


def _owners(sequences: Iterable[Sequence]) -> Counter[int]:
    """How many of these own each block."""
    return Counter(
        block for sequence in sequences for table in sequence.tables for _, block in table.live()
    )


def _alike(one: Items[Prefix], other: Items[Prefix], first: int) -> int:
    """Up to which index two chains are the same nodes from `first` on."""
    pairs = zip(one[first:], other[first:], strict=False)
    return first + next(
        (index for index, (a, b) in enumerate(pairs) if a is not b),
        min(len(one), len(other)) - first,
    )
