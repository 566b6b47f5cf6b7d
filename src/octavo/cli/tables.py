"""Figures as text: the first column to the left, all others to the right."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], heading: Sequence[str] = ()) -> str:
    """Lines of equal columns; rows may be shorter than others."""
    lines = [heading, *rows] if heading else rows
    columns = max(map(len, lines))
    widths = [max(len(line[at]) for line in lines if at < len(line)) for at in range(columns)]
    return "".join(f"{_line(line, widths)}\n" for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = cells
    parts = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=False)]
    return "  ".join([f"{first:<{widths[0]}}", *parts]).rstrip()


def side_by_side(lines: Sequence[tuple[str, Sequence[str]]]) -> str:
    """One column a run, so that runs can be compared."""
    width = max(len(cell) for _, cells in lines for cell in cells)
    return table([[name, *(f"{cell:>{width}}" for cell in cells)] for name, cells in lines])
