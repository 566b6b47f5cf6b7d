"""Small arithmetic that every part shares: integers, sizes, what two sequences have in common."""

from collections.abc import Sequence

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def ceil_div(numerator: int, denominator: int) -> int:
    """The smallest integer at least `numerator / denominator`.

    >>> ceil_div(300, 16)
    19
    """
    return -(-numerator // denominator)


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How many leading items are equal.

    >>> common_length([5, 6, 7], [5, 6, 8, 9])
    2
    """
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), shorter)


def human_bytes(size_bytes: int) -> str:
    """A size for people, in binary units.

    >>> human_bytes(3 * 1024 * 1024 // 2)
    '1.5 MiB'
    """
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def human_count(count: int) -> str:
    """A large count for people.

    >>> human_count(134_515_008)
    '134.5M'
    """
    size = float(count)
    for unit in ("", "K", "M"):
        if abs(size) < 1000:
            return f"{size:.1f}{unit}" if unit else f"{count}"
        size /= 1000
    return f"{size:.1f}B"
