"""A table is as long as the positions it covers need, and no longer."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.core.block_table import ABSENT, BlockTable


def test_a_prompt_of_300_tokens_takes_19_blocks_of_16() -> None:
    table = BlockTable(16)
    assert table.missing(300) == 19


@given(block_size=st.integers(1, 64), lengths=st.lists(st.integers(0, 2000), max_size=8))
def test_its_length_is_the_largest_position_over_the_block_size(
    block_size: int, lengths: list[int]
) -> None:
    table, blocks = BlockTable(block_size), iter(range(10**6))
    for count, length in enumerate(lengths, 1):
        start = table.grow(tuple(next(blocks) for _ in range(table.missing(length))))
        assert start <= len(table)
        longest = max(lengths[:count])
        assert (len(table) - 1) * block_size < longest <= len(table) * block_size or longest == 0
    assert table.blocks == tuple(range(len(table)))


def test_grow_says_where_the_new_blocks_stand() -> None:
    table = BlockTable(4)
    assert table.grow((7, 9)) == 0
    assert table.grow((3,)) == 2
    assert (table[0], table[1], table[2]) == table.blocks == (7, 9, 3)


def test_clear_returns_every_block_once() -> None:
    table = BlockTable(4)
    table.grow((7, 9))
    assert table.clear() == (7, 9)
    assert table.clear() == ()
    assert len(table) == 0


def test_only_entries_that_hold_a_block_are_live() -> None:
    table = BlockTable(4)
    table.skip(1)
    table.grow((7, 9, 3))
    assert list(table.live()) == [(1, 7), (2, 9), (3, 3)]
    assert table.give_back(3) == ((1, 7), (2, 9))
    assert table.give_back(2) == ()
    assert list(table.live()) == [(3, 3)]
    assert table.blocks == (ABSENT, ABSENT, ABSENT, 3)
    assert table.covers(16)
    assert table.missing(17) == 1


def test_the_peak_counts_live_entries() -> None:
    table = BlockTable(4)
    table.skip(2)
    for block in range(5):
        table.grow((block,))
        table.give_back(len(table) - 2)
    assert (table.peak, len(table)) == (3, 7)
    table.clear()
    assert table.first == 0
