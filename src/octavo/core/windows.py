"""Windows: what of a sequence each layer group still needs, and how many blocks that takes.

A position sees all before it (None), or the last `window`, itself among them. A group with a
window holds what the newest computed position sees: a branch may still compute that one again. The
blocks before are given back.

    block size 4, window 8, positions 0–20 computed

    positions    0–3   4–7   8–11  12–15  16–19  20–23
    table         -1    -1    -1     7      2      9
                  given back          └ 20 sees 13–20 ┘    and room for the next three

While a chunk is computed the group holds the window and the chunk.
"""

from octavo.units import ceil_div

Windows = tuple[int | None, ...]
"""One window, or None, a layer group."""


def first_needed(window: int | None, start: int, block_size: int) -> int:
    """The first table entry that is needed by whoever computes positions from `start` on."""
    return 0 if window is None else max(0, start + 1 - window) // block_size


def first_held(window: int | None, computed: int, block_size: int) -> int:
    """The first table entry that is held when `computed` positions are there.

    >>> first_held(8, 21, 4)
    3
    """
    return first_needed(window, computed - 1, block_size)


def next_returned(window: int, computed: int, block_size: int) -> int:
    """How many positions are computed when a block is given back next.

    >>> next_returned(8, 21, 4)
    24
    """
    return window + (first_held(window, computed, block_size) + 1) * block_size


def most_held(window: int | None, positions: int, chunk: int, block_size: int) -> int:
    """The most blocks a layer group holds at once, when `positions` are computed in chunks."""
    whole = ceil_div(positions, block_size)
    if window is None:
        return whole
    return min(whole, ceil_div(window + chunk - 1, block_size) + 1)


def blocks_for(windows: Windows, positions: int, block_size: int) -> int:
    """With how many blocks a sequence of `positions` positions can be computed, one by one."""
    return sum(most_held(window, positions, 1, block_size) for window in windows)


def longest_chunk(windows: Windows, positions: int, block_size: int, blocks: int) -> int:
    """The longest chunk with which a sequence of `positions` positions fits in `blocks`, alone.

    Keeps    if `blocks_for` fits, one position at least; all of them if no window is shorter.
    """
    slack = blocks - blocks_for(windows, positions, block_size)
    whole = ceil_div(positions, block_size)
    shorter = sum(most_held(window, positions, 1, block_size) < whole for window in windows)
    return 1 + slack // shorter * block_size if shorter else positions


def longest_sequence(windows: Windows, block_size: int, blocks: int, most: int) -> int:
    """How many positions, up to `most`, one sequence can have that fits in `blocks`; 0 if none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(windows, middle, block_size) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low
