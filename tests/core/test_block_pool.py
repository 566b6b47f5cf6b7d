"""The pool hands out each block once, evicts the longest unused, and never loses one."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.soak import CASES

from octavo.core.block_pool import BlockPool, Shortage, Taken


def taken(pool: BlockPool, count: int) -> Taken:
    result = pool.take(count)
    assert isinstance(result, Taken)
    return result


def test_all_or_nothing() -> None:
    pool = BlockPool(5)
    taken(pool, 3)
    assert pool.take(4) == Shortage(2)
    assert (pool.available, pool.owned) == (2, 3)
    taken(pool, 2)
    assert pool.take(1) == Shortage(1)


def test_free_blocks_go_before_cached_ones_and_the_longest_unused_goes_first() -> None:
    pool = BlockPool(4)
    first, second, third, fourth = taken(pool, 4).blocks
    for block in (third, first, second):
        pool.release(block, keep=True)
    pool.release(fourth, keep=False)
    assert taken(pool, 1) == Taken((fourth,), ())
    assert taken(pool, 2) == Taken((third, first), (third, first))
    assert pool.cached == 1


def test_a_cached_block_that_is_shared_again_leaves_the_eviction_order() -> None:
    pool = BlockPool(2)
    old, new = taken(pool, 2).blocks
    pool.release(old, keep=True)
    pool.release(new, keep=True)
    pool.share(old)
    assert taken(pool, 1).evicted == (new,)
    pool.release(old, keep=True)
    assert pool.is_cached(old)


def test_the_epoch_rises_with_each_reuse_and_only_then() -> None:
    pool = BlockPool(1)
    assert taken(pool, 1).blocks == (0,)
    epoch = pool.epoch(0)
    pool.share(0)
    pool.release(0, keep=True)
    pool.release(0, keep=True)
    assert pool.epoch(0) == epoch
    taken(pool, 1)
    assert pool.epoch(0) == epoch + 1


@pytest.mark.parametrize("keep", [False, True])
def test_a_fenced_block_is_not_handed_out_until_the_fence_is_lifted(keep: bool) -> None:
    pool = BlockPool(1)
    taken(pool, 1)
    pool.fence(0)
    pool.release(0, keep=True)
    assert (pool.available, pool.fenced, pool.owned) == (0, 1, 0)
    assert pool.take(1) == Shortage(1)
    pool.lift(0, keep=keep)
    assert pool.is_cached(0) == keep
    assert taken(pool, 1).blocks == (0,)


def test_a_fenced_block_can_be_shared_and_stays_with_its_new_owner() -> None:
    pool = BlockPool(1)
    taken(pool, 1)
    pool.fence(0)
    pool.release(0, keep=True)
    pool.share(0)
    assert (pool.fenced, pool.owned, pool.references(0)) == (0, 1, 2)
    pool.lift(0, keep=True)
    assert (pool.fenced, pool.owned, pool.references(0)) == (0, 1, 1)


def test_a_fence_is_no_owner_that_can_release() -> None:
    pool = BlockPool(1)
    taken(pool, 1)
    pool.fence(0)
    pool.release(0, keep=False)
    with pytest.raises(AssertionError, match="no owner"):
        pool.release(0, keep=False)
    pool.lift(0, keep=False)
    with pytest.raises(AssertionError, match="no transfer"):
        pool.lift(0, keep=False)


def test_dropped_blocks_are_free() -> None:
    pool = BlockPool(2)
    for block in taken(pool, 2).blocks:
        pool.release(block, keep=True)
    pool.drop((1,))
    assert taken(pool, 1) == Taken((1,), ())


def test_a_block_without_an_owner_cannot_be_released() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="no owner"):
        pool.release(0, keep=False)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain model: owners counted in a dict, cached blocks in a list."""

    @initialize(blocks=st.integers(0, 12))
    def open(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.owners: dict[int, int] = {}
        self.cached: list[int] = []
        self.transfers: dict[int, int] = {}
        self.free = set(range(blocks))

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        result = self.pool.take(count)
        missing = count - len(self.free) - len(self.cached)
        if missing > 0:
            assert result == Shortage(missing)
            return
        assert isinstance(result, Taken)
        evicting = max(0, count - len(self.free))
        assert result.evicted == tuple(self.cached[:evicting])
        assert len(set(result.blocks)) == count
        assert set(result.blocks) <= self.free | set(result.evicted)
        self.cached = self.cached[evicting:]
        self.free -= set(result.blocks)
        self.owners |= dict.fromkeys(result.blocks, 1)

    @property
    def fenced(self) -> set[int]:
        return self.transfers.keys() - self.owners.keys()

    @precondition(lambda self: self.owners or self.cached or self.transfers)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([*self.owners, *self.cached, *self.transfers]))
        self.pool.share(block)
        if block in self.cached:
            self.cached.remove(block)
        self.owners[block] = self.owners.get(block, 0) + 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        block = data.draw(st.sampled_from([*self.owners]))
        self.pool.release(block, keep=keep)
        self.owners[block] -= 1
        if not self.owners[block]:
            del self.owners[block]
            self._rest(block, keep)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([*self.owners]))
        self.pool.fence(block)
        self.transfers[block] = self.transfers.get(block, 0) + 1

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), keep=st.booleans())
    def lift(self, data: st.DataObject, keep: bool) -> None:
        block = data.draw(st.sampled_from([*self.transfers]))
        self.pool.lift(block, keep=keep)
        self.transfers[block] -= 1
        if not self.transfers[block]:
            del self.transfers[block]
            self._rest(block, keep)

    def _rest(self, block: int, keep: bool) -> None:
        if block in self.owners or block in self.transfers:
            return
        if keep:
            self.cached.append(block)
        else:
            self.free.add(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.cached), unique=True))
        self.pool.drop(blocks)
        self.cached = [block for block in self.cached if block not in blocks]
        self.free |= set(blocks)

    @invariant()
    def the_sums_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.states() == (self.free, set(self.cached), self.fenced)
        for block in range(self.pool.total):
            owners = self.owners.get(block, 0) + self.transfers.get(block, 0)
            assert self.pool.references(block) == owners
        assert self.pool.available == len(self.free) + len(self.cached)
        assert self.pool.owned == len(self.owners)
        assert self.pool.cached == len(self.cached)
        assert self.pool.fenced == len(self.fenced)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=CASES, stateful_step_count=30)
