"""The manager covers a sequence or changes nothing, and shares only what it may."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.serving import WINDOWS, constant_hash
from tests.core.soak import CASES, one_of

from octavo.core.block_manager import BlockManager
from octavo.core.block_pool import Shortage
from octavo.core.budget import Ceilings, Limits
from octavo.core.events import Pinned
from octavo.core.grants import Admission, Reservation
from octavo.core.holds import Holds
from octavo.core.invariants import check
from octavo.core.plan import TableWrite
from octavo.core.prefix_cache import Context, PrefixCache, sha256
from octavo.core.request import Pin, Request
from octavo.core.sequence import Sequence
from octavo.core.swap import HostArena, SwapSetup
from octavo.core.windows import Windows
from octavo.units import ceil_div


def manager_of(
    blocks: int, size: int = 4, windows: Windows = (None,), arena: HostArena | None = None
) -> BlockManager:
    cache = PrefixCache(block_size=size, windows=windows)
    return BlockManager(blocks=blocks, block_size=size, windows=windows, cache=cache, arena=arena)


ALL = {"chunk": 999, "upto": 0}
"""Room for every position a sequence has."""


def sequence_of(
    manager: BlockManager, *tokens: int, salt: str = "", use_cache: bool = True
) -> Sequence:
    return Sequence(
        Request(id="s", prompt=tokens, max_tokens=99, use_cache=use_cache),
        order=0,
        context=Context(salt=salt),
        block_size=manager.block_size,
        groups=manager.groups,
        now=0.0,
    )


def admitted(manager: BlockManager, sequence: Sequence, headroom: int = 0) -> Admission:
    admission = manager.admit(sequence, 0, **ALL, headroom=headroom)
    assert isinstance(admission, Admission)
    sequence.admit(row=0, cached=admission.cached_tokens, now=0.0)
    return admission


def computed(manager: BlockManager, sequence: Sequence) -> None:
    sequence.computed = sequence.scheduled = len(sequence.tokens)
    manager.seal(sequence)


def warm(manager: BlockManager, *tokens: int, salt: str = "") -> None:
    """Leave `tokens` in the prefix cache, unowned."""
    sequence = sequence_of(manager, *tokens, salt=salt)
    admitted(manager, sequence)
    computed(manager, sequence)
    manager.release(sequence)


def test_nothing_changes_when_blocks_are_short() -> None:
    manager = manager_of(4)
    warm(manager, *range(8))
    before = (manager.pool.states(), manager.pool.available)
    sequence = sequence_of(manager, *range(8), 20, 21, 22, 23, 24, 25, 26, 27, 28)
    assert manager.admit(sequence, 0, **ALL, headroom=0) == Shortage(1)
    assert manager.missing(sequence, **ALL, headroom=2) == 3
    assert (manager.pool.states(), manager.pool.available) == before
    assert not sequence.tables[0].blocks


def test_headroom_counts_what_stays_available() -> None:
    manager = manager_of(4)
    sequence = sequence_of(manager, *range(8))
    assert manager.admit(sequence, 0, **ALL, headroom=3) == Shortage(1)
    assert admitted(manager, sequence, headroom=2).blocks_allocated == 2


def test_a_hit_on_a_cached_block_takes_it_from_what_is_available() -> None:
    manager = manager_of(3)
    warm(manager, *range(8))
    sequence = sequence_of(manager, *range(8), 9)
    assert manager.admit(sequence, 0, **ALL, headroom=1) == Shortage(1)
    admission = admitted(manager, sequence)
    assert (admission.cached_tokens, admission.blocks_found) == (8, 2)
    assert admission.evicted == ()


def test_a_full_hit_copies_the_block_of_its_last_position() -> None:
    manager = manager_of(6)
    warm(manager, *range(8))
    sequence = sequence_of(manager, *range(8))
    admission = admitted(manager, sequence)
    (copy,) = admission.copies
    assert admission.cached_tokens == 7
    assert copy.target == sequence.tables[0][1] != copy.source
    assert manager.cache is not None
    assert manager.cache.publishes(copy.source)
    assert not manager.cache.publishes(copy.target)


def test_a_full_hit_without_room_for_a_copy_computes_the_last_block_again() -> None:
    manager = manager_of(2)
    warm(manager, *range(8))
    admission = admitted(manager, sequence_of(manager, *range(8)))
    assert (admission.cached_tokens, admission.copies) == (4, ())


def test_a_prompt_of_300_tokens_copies_the_12_that_begin_its_19th_block() -> None:
    manager = BlockManager(blocks=60, block_size=16, cache=PrefixCache(block_size=16))
    warm(manager, *range(400))
    admission = admitted(manager, sequence_of(manager, *range(300), 1000))
    assert (admission.cached_tokens, admission.blocks_found) == (300, 18)
    (copy,) = admission.copies
    assert manager.cache is not None
    node, _ = manager.cache.published()[copy.source]
    assert node.tokens == (*range(288, 304),)
    assert (len(admission.writes[0].blocks), admission.blocks_allocated) == (19, 1)


def test_the_tokens_of_a_block_that_begin_alike_are_found_without_a_whole_hit() -> None:
    manager = manager_of(8)
    warm(manager, *range(8))
    admission = admitted(manager, sequence_of(manager, 0, 1, 2, 60, 61))
    assert (admission.cached_tokens, admission.blocks_found) == (3, 0)
    assert admitted(manager, sequence_of(manager, 1, 2, 3, 60)).cached_tokens == 0
    assert admitted(manager, sequence_of(manager, *range(5), 60, salt="x")).cached_tokens == 0
    assert admitted(manager, sequence_of(manager, *range(6))).cached_tokens == 5


def test_another_salt_hits_nothing() -> None:
    manager = manager_of(8)
    warm(manager, *range(9), salt="one")
    assert admitted(manager, sequence_of(manager, *range(9), salt="two")).cached_tokens == 0
    assert admitted(manager, sequence_of(manager, *range(9), salt="one")).cached_tokens == 8


def test_the_tail_of_a_prefix_is_evicted_before_its_head_in_every_group() -> None:
    manager = manager_of(8, windows=(None, None))
    warm(manager, *range(16))
    other = sequence_of(manager, *range(100, 104))
    admitted(manager, other)
    assert manager.missing(sequence_of(manager, *range(13)), **ALL, headroom=0) == 2
    manager.release(other)
    assert admitted(manager, sequence_of(manager, *range(13))).cached_tokens == 12


def test_missing_knows_what_leaving_sequences_would_give_back() -> None:
    """Blocks that two of them share, and blocks that the newcomer would share, count right."""
    manager = manager_of(6)
    warm(manager, *range(8))
    first = sequence_of(manager, *range(8), 20, 21)
    second = sequence_of(manager, *range(8), 30, 31)
    for sequence in (first, second):
        admitted(manager, sequence)
    stranger = sequence_of(manager, *range(50, 74))
    assert manager.missing(stranger, **ALL, headroom=0) == 4
    assert manager.missing(stranger, **ALL, headroom=0, leaving=[first]) == 3
    assert manager.missing(stranger, **ALL, headroom=0, leaving=[first, second]) == 0
    heir = sequence_of(manager, *range(8), *range(50, 66))
    assert manager.missing(heir, **ALL, headroom=0, leaving=[first, second]) == 0
    assert manager.missing(heir, **ALL, headroom=1, leaving=[first, second]) == 1


def test_reserve_says_only_what_changed() -> None:
    manager = manager_of(3)
    sequence = sequence_of(manager, *range(4))
    admitted(manager, sequence)
    assert manager.reserve(sequence, 4) == Reservation((), (), ())
    (first,) = sequence.tables[0].blocks
    reservation = manager.reserve(sequence, 9)
    assert isinstance(reservation, Reservation)
    blocks = sequence.tables[0].blocks
    assert reservation.writes == (TableWrite(0, 0, 1, blocks[1:]),)
    assert blocks[0] == first
    assert manager.reserve(sequence, 13) == Shortage(1)
    assert sequence.tables[0].blocks == blocks


def test_a_request_that_opts_out_neither_finds_nor_leaves_anything() -> None:
    manager = manager_of(8)
    warm(manager, *range(8))
    private = sequence_of(manager, *range(8), 60, 61, 62, 63, use_cache=False)
    assert admitted(manager, private).cached_tokens == 0
    computed(manager, private)
    manager.release(private)
    assert manager.pool.cached == 2


def forked(manager: BlockManager, parent: Sequence, *tokens: int, upto: int) -> Sequence:
    child = sequence_of(manager, *tokens)
    manager.fork(parent, child, 1, upto)
    child.admit(row=1, cached=upto, now=0.0)
    return child


def test_a_fork_takes_no_block_and_the_first_writer_copies_one() -> None:
    manager = manager_of(8, windows=(None, None))
    parent = sequence_of(manager, *range(6))
    admitted(manager, parent)
    computed(manager, parent)
    child = forked(manager, parent, *range(6), 7, upto=6)
    assert manager.pool.owned == 4
    assert [table.blocks for table in child.tables] == [table.blocks for table in parent.tables]
    before = [table.blocks for table in child.tables]
    reservation = manager.reserve(child, 7)
    assert isinstance(reservation, Reservation)
    assert [copy.source for copy in reservation.copies] == [blocks[1] for blocks in before]
    assert [(w.row, w.group, w.index, len(w.blocks)) for w in reservation.writes] == [
        (1, 0, 1, 1),
        (1, 1, 1, 1),
    ]
    assert [table.blocks for table in parent.tables] == before
    assert [table[0] for table in child.tables] == [blocks[0] for blocks in before]
    assert manager.pool.owned == 6
    assert manager.reserve(parent, 7) == manager.reserve(child, 7) == Reservation((), (), ())


def test_the_last_owner_writes_without_a_copy() -> None:
    manager = manager_of(2)
    parent = sequence_of(manager, *range(6))
    admitted(manager, parent)
    computed(manager, parent)
    child = forked(manager, parent, *range(6), 7, upto=6)
    assert manager.reserve(child, 7) == Shortage(1)
    assert child.writable < 7
    manager.release(parent)
    assert manager.reserve(child, 7) == Reservation((), (), ())
    assert child.writable >= 7


def test_a_published_block_is_copied_or_when_blocks_are_short_rewritten_and_not_found() -> None:
    for blocks in (3, 2):
        manager = manager_of(blocks)
        parent = sequence_of(manager, *range(8))
        admitted(manager, parent)
        computed(manager, parent)
        child = forked(manager, parent, *range(8), upto=7)
        manager.release(parent)
        last = child.tables[0][1]
        reservation = manager.reserve(child, 8)
        assert isinstance(reservation, Reservation)
        assert len(reservation.copies) == blocks - 2
        assert manager.cache is not None
        assert manager.cache.publishes(last) == (blocks == 3)
        assert not manager.cache.publishes(child.tables[0][1])
        computed(manager, child)
        assert manager.cache.publishes(last)


def test_releasing_a_branch_gives_back_only_what_it_alone_owns() -> None:
    """B029: logical blocks were counted as if each gave back a physical one."""
    manager = manager_of(9)
    trunk = sequence_of(manager, *range(16))
    admitted(manager, trunk)
    computed(manager, trunk)
    beams = [trunk, *(forked(manager, trunk, *range(16), 60 + n, upto=16) for n in range(2))]
    trunk.tokens.append(50)
    for beam in beams:
        assert isinstance(manager.reserve(beam, 17), Reservation)
    assert manager.pool.owned == 4 + 3
    stranger = sequence_of(manager, *range(80, 96))
    assert manager.missing(stranger, **ALL, headroom=0, leaving=beams[1:]) == 0
    assert manager.missing(stranger, **ALL, headroom=1, leaving=beams[1:]) == 1
    assert [manager.release(beam) for beam in (trunk, *beams[1:])] == [1, 1, 5]


def test_branches_that_are_swapped_give_back_each_block_once() -> None:
    """B029: every branch moves all it has; a block is back when the last of its moves is done."""
    setup = SwapSetup(host_blocks=15, block_bytes=1, bytes_per_s=1.0, tokens_per_s=1.0)
    arena = HostArena(setup)
    manager = manager_of(9, arena=arena)
    trunk = sequence_of(manager, *range(16))
    admitted(manager, trunk)
    computed(manager, trunk)
    beams = [trunk, *(forked(manager, trunk, *range(16), 60 + n, upto=16) for n in range(2))]
    trunk.tokens.append(50)
    for number, beam in enumerate(beams):
        beam.id = f"beam {number}"
        assert isinstance(manager.reserve(beam, 17), Reservation)
        beam.scheduled = 17
    pool, yielded = manager.pool, []
    for beam in (trunk, *beams[1:]):
        before = pool.available + pool.fenced
        yielded.append(manager.preempt(beam, "swap", recompute_s=None, intact=True))
        assert pool.available + pool.fenced - before == yielded[-1].blocks
    assert [one.blocks for one in yielded] == [1, 1, 5]
    assert [len(one.moves) for one in yielded] == [5, 5, 5]
    assert (pool.available, pool.fenced, pool.owned) == (2, 7, 0)
    for one, available in zip(yielded, (3, 4, 9), strict=True):
        manager.settle(one.moves, len(one.moves))
        assert pool.available == available
    assert arena.used == 15


class ManagerMachine(RuleBasedStateMachine):
    """Sequences come, grow and go; cells know which tokens they were computed from."""

    @initialize(
        blocks=st.integers(1, 16),
        size=st.sampled_from([1, 2, 3]),
        windows=st.sampled_from(WINDOWS),
        hash_function=st.sampled_from([sha256, constant_hash]),
    )
    def open(self, blocks: int, size: int, windows: Windows, hash_function: object) -> None:
        cache = PrefixCache(block_size=size, windows=windows, hash_function=hash_function)
        self.manager = BlockManager(blocks=blocks, block_size=size, windows=windows, cache=cache)
        self.cells: dict[tuple[int, int], tuple] = {}
        self.running: list[Sequence] = []
        self.holds = Holds(self.manager)
        self.rows = count()

    @rule(
        head=st.integers(0, 6),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        salt=st.sampled_from(["", "other"]),
        use_cache=st.booleans(),
        headroom=st.integers(0, 3),
        chunk=st.integers(1, 12),
        whole=st.booleans(),
    )
    def admit(
        self,
        head: int,
        tail: list[int],
        salt: str,
        use_cache: bool,
        headroom: int,
        chunk: int,
        whole: bool,
    ) -> None:
        tokens = (*range(1, head + 1), *tail)
        room = {"chunk": chunk, "upto": len(tokens) if whole else 0}
        sequence = sequence_of(self.manager, *tokens, salt=salt, use_cache=use_cache)
        missing = self.manager.missing(sequence, **room, headroom=headroom)
        row = next(self.rows)
        admission = self.manager.admit(sequence, row, **room, headroom=headroom)
        if isinstance(admission, Shortage):
            assert admission.blocks == missing > 0
            return
        assert missing == 0
        assert self.manager.pool.available >= headroom
        assert admission.cached_tokens < len(tokens)
        sequence.admit(row=row, cached=admission.cached_tokens, now=0.0)
        self.running.append(sequence)
        self.copy(admission)
        first = min(len(tokens), admission.cached_tokens + room["chunk"])
        self.covers(sequence, first, max(first, room["upto"]))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), share=st.floats(0.1, 1))
    def compute(self, data: st.DataObject, share: float) -> None:
        sequence = one_of(data, self.running)
        start, length = sequence.computed, len(sequence.tokens)
        stop = start + max(1, int((length - start) * share))
        if not self.reserve(sequence, stop):
            return
        for group, table in enumerate(sequence.tables):
            window = self.manager.windows[group] or length
            for position in range(max(0, start + 1 - window), start):
                assert self.cell(table, position) == self.content(sequence, group, position)
            for position in range(start, stop):
                place = (table[position // self.manager.block_size], self.offset(position))
                self.cells[place] = self.content(sequence, group, position)
        sequence.computed = sequence.scheduled = stop
        sequence.demand = min(length, sequence.last_position) - stop
        self.manager.seal(sequence)
        if stop == length:
            self.grow(sequence, data.draw(st.integers(0, 2)))

    def grow(self, sequence: Sequence, token: int) -> None:
        upto = len(sequence.tokens) + 1
        if self.reserve(sequence, upto):
            sequence.tokens.append(token)
            sequence.length = upto
            sequence.demand = min(upto, sequence.last_position) - sequence.scheduled
            self.covers(sequence, upto, upto)

    def reserve(self, sequence: Sequence, upto: int) -> bool:
        """Whether the sequence may write on; if not it is gone."""
        growth = sum(table.missing(upto) for table in sequence.tables)
        written = self.written(sequence)
        shared = [block for block in written if self.owners(block) > 1]
        lone = [
            block
            for block in written
            if self.owners(block) == 1 and self.manager.cache.publishes(block)
        ]
        covers = upto <= sequence.writable
        available = self.manager.pool.available
        reservation = self.manager.reserve(sequence, upto)
        assert not covers or not (growth or shared or lone)  # False says only that it is not known
        if isinstance(reservation, Shortage):
            assert reservation.blocks == growth + len(shared) - available > 0
            self.release(sequence)
            return False
        fits = growth + len(shared) + len(lone) <= available
        assert {copy.source for copy in reservation.copies} == {*shared, *(lone if fits else ())}
        self.copy(reservation)
        for block in self.written(sequence):
            assert self.owners(block) == 1
            assert not self.manager.cache.publishes(block)
        return True

    def written(self, sequence: Sequence) -> list[int]:
        """The blocks that hold the next position and positions before it."""
        index, offset = divmod(sequence.scheduled, self.manager.block_size)
        return [table[index] for table in sequence.tables if offset and index < len(table)]

    def owners(self, block: int) -> int:
        owners = (*self.running, *self.holds)
        return sum(block in table.blocks for one in owners for table in one.tables)

    def copy(self, taken: Admission | Reservation) -> None:
        for copy in taken.copies:
            for offset in range(self.manager.block_size):
                self.cells[copy.target, offset] = self.cells.get((copy.source, offset))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), share=st.floats(0, 1), tail=st.lists(st.integers(0, 2), max_size=3))
    def fork(self, data: st.DataObject, share: float, tail: list[int]) -> None:
        """A child of a part, or of all, of what a sequence has computed; it takes no block. What a
        window has left behind cannot be forked any more."""
        parent = one_of(data, self.running)
        upto = int(parent.computed * share)
        while self.manager._hits.held(parent, upto).tokens < upto:
            upto += 1
        tokens = (*parent.tokens[:upto], *(tail or [0]))
        salt, use_cache = parent.context.salt, parent.request.use_cache
        child = sequence_of(self.manager, *tokens, salt=salt, use_cache=use_cache)
        available, row = self.manager.pool.available, next(self.rows)
        self.manager.fork(parent, child, row, upto)
        assert self.manager.pool.available == available
        child.admit(row=row, cached=upto, now=0.0)
        self.running.append(child)
        self.covers(child, upto, upto)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.release(one_of(data, self.running))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """A sequence ends, and what it has computed stays; a few stay at most."""
        sequence = one_of(data, self.running)
        sequence.id = f"s{len(self.holds) % 3}"
        sequence.request = replace(sequence.request, keep=True)
        self.holds.keep(sequence)
        self.manager.release(sequence)
        self.running.remove(sequence)

    @precondition(lambda self: self.holds.sessions)
    @rule(data=st.data(), share=st.floats(0, 1), tail=st.lists(st.integers(0, 2), max_size=3))
    def go_on(self, data: st.DataObject, share: float, tail: list[int]) -> None:
        """From a part, or from all, of what is held."""
        hold = one_of(data, self.holds.sessions)
        tokens = (*hold.tokens[: int(len(hold.tokens) * share)], *(tail or [0]))
        sequence = sequence_of(self.manager, *tokens, salt=hold.context.salt)
        row = next(self.rows)
        room = {"chunk": 99, "upto": 0, "headroom": 0, "parent": hold}
        missing = self.manager.missing(sequence, **room)
        gained = self.manager.missing(sequence, **room, holds=True)
        assert gained <= missing
        admission = self.manager.admit(sequence, row, **room)
        if isinstance(admission, Shortage):
            assert admission.blocks == missing
            return
        if not any(self.manager.windows):
            least = hold.common_with(sequence) - self.manager.block_size
            assert admission.cached_tokens >= least
        sequence.admit(row=row, cached=admission.cached_tokens, now=0.0)
        self.running.append(sequence)
        self.copy(admission)
        self.covers(sequence, len(tokens), len(tokens))

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(), tokens=st.integers(1, 9), quota=st.integers(0, 6), ttl_s=st.integers(0, 9)
    )
    def pin(self, data: st.DataObject, tokens: int, quota: int, ttl_s: int) -> None:
        sequence = one_of(data, self.running)
        sequence.request = replace(sequence.request, pins=(Pin(tokens, ttl_s),))
        sequence.pinned = 0
        before = self.holds.pinned_blocks
        told = list(self.holds.pin(sequence, quota, now=0.0))
        assert self.holds.pinned_blocks <= max(before, quota)
        assert self.holds.pinned_blocks or not any(isinstance(each, Pinned) for each in told)

    @rule(now=st.integers(0, 9))
    def expire(self, now: int) -> None:
        self.holds.expire(now)
        assert all(hold.until_s > now for hold in self.holds)

    @rule()
    def flush(self) -> None:
        self.holds.flush()
        self.manager.flush()
        for sequence in self.running:
            sequence.private = True
        assert len(self.manager.cache) == self.manager.pool.cached == self.holds.pinned_blocks == 0

    @precondition(lambda self: len(self.holds))
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        """What yields is worth it; with nothing left to yield nobody does."""
        pool = self.manager.pool
        sequence = sequence_of(self.manager, 1)
        available, yielding = pool.available, pool.yielding
        dropped = self.holds.yield_to(sequence)
        assert (dropped is None) == (yielding == 0)
        if dropped is not None:
            assert pool.available - available == dropped.blocks <= yielding

    def release(self, sequence: Sequence) -> None:
        freed = self.manager._room.freed([sequence])
        assert self.manager.release(sequence) == len(freed)
        self.running.remove(sequence)

    def covers(self, sequence: Sequence, least: int, most: int) -> None:
        """Groups that see all cover `most` positions, those with a window the `least` or more."""
        size = self.manager.block_size
        for table, window in zip(sequence.tables, self.manager.windows, strict=True):
            lowest = ceil_div(least if window else most, size)
            assert lowest <= len(table) <= ceil_div(most, size)

    def content(self, sequence: Sequence, group: int, position: int) -> tuple:
        return (sequence.context.salt, group, tuple(sequence.tokens[: position + 1]))

    def cell(self, table: object, position: int) -> tuple:
        return self.cells[table[position // self.manager.block_size], self.offset(position)]

    def offset(self, position: int) -> int:
        return position % self.manager.block_size

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "manager"):
            check(
                SimpleNamespace(
                    manager=self.manager,
                    running=self.running,
                    holds=self.holds,
                    waiting=(),
                    followers=(),
                    held=(),
                    moving=(),
                    limits=Limits(sequences=1, tokens=1),
                    ceilings=Ceilings(sequences=10**6, tokens=1, watermark_blocks=1),
                )
            )

    @invariant()
    def what_is_published_is_what_its_prefix_says(self) -> None:
        if not hasattr(self, "manager"):
            return
        for block, (node, group) in self.manager.cache.published().items():
            held = [self.cells[block, offset] for offset in range(self.manager.block_size)]
            assert tuple(cell[2][-1] for cell in held) == node.tokens
            assert {cell[1] for cell in held} == {group}


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=CASES)
