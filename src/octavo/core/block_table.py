"""BlockTable: which physical block holds each run of `block_size` positions of one sequence."""

from collections.abc import Iterator

from octavo.units import ceil_div

ABSENT = -1


class BlockTable:
    """Entry i is the block of positions [i · block_size, (i + 1) · block_size), or ABSENT: no
    position still to compute sees those.

    Keeps  it is as long as the positions it has been asked to cover need, and no longer; entries
           are ABSENT up to `first` and live from there on.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: list[int] = []
        self.first = 0
        """The index of the first live entry."""
        self.peak = 0
        """The most live entries it ever had."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> int:
        return self._blocks[index]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Every entry, ABSENT ones too."""
        return tuple(self._blocks)

    def live(self) -> Iterator[tuple[int, int]]:
        """(index, block) of each entry that holds a block."""
        return enumerate(self._blocks[self.first :], self.first)

    def covers(self, upto: int) -> bool:
        return upto <= len(self._blocks) * self._block_size

    def missing(self, upto: int) -> int:
        """How many blocks must be added to cover every position below `upto`.

        >>> BlockTable(16).missing(300)
        19
        """
        missing = ceil_div(upto, self._block_size) - len(self._blocks)
        return missing if missing > 0 else 0

    def skip(self, count: int) -> None:
        """Begin a table with `count` ABSENT entries."""
        assert not self._blocks, "only the head of a table can be absent"
        self._blocks = [ABSENT] * count
        self.first = count

    def grow(self, blocks: tuple[int, ...]) -> int:
        """Append blocks; returns the index of the first."""
        index = len(self._blocks)
        self._blocks += blocks
        live = index + len(blocks) - self.first
        if live > self.peak:
            self.peak = live
        return index

    def replace(self, index: int, block: int) -> int:
        """Put `block` at one entry; returns the block that stood there."""
        before, self._blocks[index] = self._blocks[index], block
        return before

    def truncate(self, count: int) -> tuple[int, ...]:
        """Forget all entries but the first `count`, and return the blocks that stood there."""
        rest, self._blocks = self._blocks[count:], self._blocks[:count]
        self.first = min(self.first, count)
        return tuple(block for block in rest if block != ABSENT)

    def give_back(self, first: int) -> tuple[tuple[int, int], ...]:
        """Make the entries before `first` ABSENT; returns (index, block) of those that were live.

        Cost     O(blocks given back).
        """
        gone = tuple(enumerate(self._blocks[self.first : first], self.first))
        for index, _ in gone:
            self._blocks[index] = ABSENT
        self.first = max(self.first, first)
        return gone

    def move(self) -> "BlockTable":
        """A table with all entries of this one, which is empty then."""
        moved = BlockTable(self._block_size)
        moved._blocks, moved.first = self._blocks, self.first
        moved.peak = len(moved._blocks) - moved.first
        self._blocks, self.first = [], 0
        return moved

    def clear(self) -> tuple[int, ...]:
        """Forget all entries and return them, ABSENT ones too."""
        blocks, self._blocks = tuple(self._blocks), []
        self.first = 0
        return blocks
