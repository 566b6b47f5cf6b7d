"""A profile as a picture: one SVG without scripts, fonts or links, or an HTML page around it.

┌ a bar of all the time, by part
├ a bar for each part, its share of the limit inside
└ a column for each layer, by part
"""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from octavo.bench.profile import PYTHON, Profile, ProfileRow
from octavo.errors import ConfigError

WIDTH, MARGIN, LINE = 960, 16, 22
NAMES, FIGURES = 130, 370
"""Pixels for the names beside bars, and for the figures behind them."""
LAYERS_HEIGHT = 160
COLOURS = (
    "#4269d0",
    "#efb118",
    "#ff725c",
    "#6cc5b0",
    "#3ca951",
    "#ff8ab7",
    "#a463f2",
    "#97bbf5",
    "#9c6b4e",
    "#5b8c5a",
)
GREY = "#9498a0"
"""Python is grey."""
SUFFIXES = (".svg", ".html")


def check_suffix(path: Path) -> None:
    """Raises   ConfigError: nothing is known that such a file could hold."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"cannot draw {path}: its name must end in {' or '.join(SUFFIXES)}")


def drawn(profile: Profile, title: str, table: str, suffix: str) -> str:
    """The whole file; of HTML with the table below the picture."""
    picture = svg(profile, title)
    if suffix == ".svg":
        return picture
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title></head>\n<body>\n{picture}"
        f"<pre>{escape(table)}</pre>\n</body></html>\n"
    )


def svg(profile: Profile, title: str) -> str:
    colours = _colours(profile.rows)
    shown = [row for row in profile.rows if row.share >= 0.0005]
    top = 4 * LINE
    bottom = top + LINE * len(shown)
    height = bottom + (LAYERS_HEIGHT + 3 * LINE if profile.layers else LINE)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        f' width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(MARGIN, LINE, title, size=15),
        *_whole(profile.rows, colours),
        *_bars(shown, colours, top),
        *_columns(profile.layers, colours, bottom + 2 * LINE),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _colours(rows: Sequence[ProfileRow]) -> dict[str, str]:
    ops = [row.part for row in rows if row.part not in PYTHON]
    return {part: COLOURS[index % len(COLOURS)] for index, part in enumerate(ops)}


def _whole(rows: Sequence[ProfileRow], colours: dict[str, str]) -> Iterator[str]:
    left = float(MARGIN)
    for row in rows:
        width = row.share * (WIDTH - 2 * MARGIN)
        yield _box(left, 1.6 * LINE, width, 1.4 * LINE, colours, row)
        left += width


def _bars(rows: Sequence[ProfileRow], colours: dict[str, str], top: float) -> Iterator[str]:
    room = WIDTH - 2 * MARGIN - NAMES - FIGURES
    most = max((row.share for row in rows), default=1.0)
    for index, row in enumerate(rows):
        y = top + index * LINE
        width = row.share / most * room
        yield _text(MARGIN, y + 0.7 * LINE, row.part)
        yield _box(MARGIN + NAMES, y, width, 0.85 * LINE, colours, row)
        if row.limit_share is not None:
            reached = min(row.limit_share, 1.0) * width
            yield (
                f'<rect x="{MARGIN + NAMES:.1f}" y="{y + 0.55 * LINE:.1f}" width="{reached:.1f}"'
                f' height="{0.3 * LINE:.1f}" fill="black" fill-opacity="0.35"/>'
            )
        yield _text(MARGIN + NAMES + width + 6, y + 0.7 * LINE, _figures(row))


def _columns(rows: Sequence[ProfileRow], colours: dict[str, str], top: float) -> Iterator[str]:
    layers = sorted({row.layer for row in rows if row.layer is not None})
    if not layers:
        return
    most = max(sum(row.seconds for row in rows if row.layer == layer) for layer in layers)
    step = min(60.0, (WIDTH - 2 * MARGIN) / len(layers))
    yield _text(MARGIN, top - 6, "layer by layer")
    for index, layer in enumerate(layers):
        base = top + LAYERS_HEIGHT
        for row in (row for row in rows if row.layer == layer):
            height = row.seconds / max(most, 1e-9) * LAYERS_HEIGHT
            base -= height
            yield _box(MARGIN + index * step, base, 0.85 * step, height, colours, row)
        if layer % max(1, len(layers) // 16) == 0:
            yield _text(MARGIN + index * step, top + LAYERS_HEIGHT + 14, str(layer), size=10)


def _box(
    x: float, y: float, width: float, height: float, colours: dict[str, str], row: ProfileRow
) -> str:
    name = row.part if row.layer is None else f"{row.part}, layer {row.layer}"
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        f' fill="{colours.get(row.part, GREY)}" stroke="white" stroke-width="0.5">'
        f"<title>{escape(f'{name}: {_figures(row)}')}</title></rect>"
    )


def _figures(row: ProfileRow) -> str:
    text = f"{row.seconds * 1e3:.1f} ms, {row.share:.1%}"
    if row.limit_share is None:
        return text
    return f"{text}; {row.gb_s:.1f} GB/s, {row.gops:.1f} G/s, {row.limit_share:.0%} of the limit"


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(text)}</text>'
