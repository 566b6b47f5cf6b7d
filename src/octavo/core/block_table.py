"""BlockTable: which physical block holds each run of `block_size` positions of one sequence."""

from collections.abc import Iterator

from octavo.units import ceil_div

ABSENT = -1


class BlockTable:
    """Entry i is the block of positions [i · block_size, (i + 1) · block_size), or ABSENT when
    no position still to compute can see those.

    Keeps  it is as long as the positions it has been asked to cover need, and no longer.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: list[int] = []
        self.peak = 0
        """The most entries it ever had."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> int:
        return self._blocks[index]

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(self._blocks)

    def live(self) -> Iterator[tuple[int, int]]:
        """(index, block) of each entry that holds a block."""
        return ((index, block) for index, block in enumerate(self._blocks) if block != ABSENT)

    def covers(self, upto: int) -> bool:
        return upto <= len(self._blocks) * self._block_size

    def missing(self, upto: int) -> int:
        """How many blocks must be added to cover every position below `upto`.

        >>> BlockTable(16).missing(300)
        19
        """
        return max(0, ceil_div(upto, self._block_size) - len(self._blocks))

    def grow(self, blocks: tuple[int, ...]) -> int:
        """Append blocks; returns the index of the first."""
        index = len(self._blocks)
        self._blocks.extend(blocks)
        self.peak = max(self.peak, len(self._blocks))
        return index

    def replace(self, index: int, block: int) -> int:
        """Put `block` at one entry; returns the block that stood there."""
        before, self._blocks[index] = self._blocks[index], block
        return before

    def truncate(self, count: int) -> tuple[int, ...]:
        """Forget all entries but the first `count`, and return the blocks that stood there."""
        rest, self._blocks = self._blocks[count:], self._blocks[:count]
        return tuple(block for block in rest if block != ABSENT)

    def clear(self) -> tuple[int, ...]:
        """Forget all entries and return them."""
        blocks, self._blocks = tuple(self._blocks), []
        return blocks
