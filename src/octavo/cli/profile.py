"""`octavo profile`: where a step's time goes, as a table and as a picture."""

import argparse
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.bench import check_record_flags, finish, settings_of
from octavo.cli.bench_flags import add_record_flags
from octavo.cli.figures import limits_line
from octavo.cli.flags import SERVER_ONLY, add_engine_flags, engine_config
from octavo.cli.tables import table
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.profile import Profile, ProfileRow

REQUESTS, PROMPT, ANSWER, VOCABULARY = 64, 32, 32, 1000
"""Of the workload that stands in for none: ids below what any model knows."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        type=Path,
        metavar="FILE",
        help="JSON workload (default: 64 prompts of 32 tokens at once, answers of 32)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="draw it there: one .svg, or one .html page"
    )
    add_record_flags(parser)
    add_engine_flags(parser, without=SERVER_ONLY)


def run(arguments: Namespace) -> int:
    """Profile one run.

    Raises   ConfigError: the workload cannot be read or does not fit, a file cannot be written.
    """
    config, _ = engine_config(arguments)
    from octavo.bench.picture import check_suffix, drawn
    from octavo.bench.profile import profile
    from octavo.bench.record import check_writable, limits_of
    from octavo.simulate.workload import load_workload, uniform_workload

    if arguments.out is not None:
        check_suffix(arguments.out)
        check_writable(arguments.out)
    check_record_flags(arguments)
    if arguments.workload is None:
        items = uniform_workload(REQUESTS, PROMPT, ANSWER, vocabulary=VOCABULARY)
    else:
        items = load_workload(arguments.workload)
    found = profile(items, config)
    limits = limits_of(found.ceilings)
    text = _table(found) + limits_line(limits)
    if arguments.out is not None:
        name = "64 prompts" if arguments.workload is None else arguments.workload.stem
        page = drawn(found, f"{config.model}, {name}: {_steps(found)}", text, arguments.out.suffix)
        try:
            arguments.out.write_text(page, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {arguments.out}: {error.strerror}") from error
    finish(
        arguments,
        "profile",
        text,
        [*found.rows, *found.layers],
        settings=settings_of(config),
        runs=1,
        limits=limits,
    )
    return 0


def _table(found: "Profile") -> str:
    heading = ["", "calls", "total ms", "share", "MB", "G ops", "GB/s", "G/s", "of limit"]
    layers = sorted({row.layer for row in found.layers if row.layer is not None})
    lines = [_line(row.part, row) for row in found.rows]
    per_layer = [
        [
            f"layer {layer}",
            f"{sum(row.calls for row in found.layers if row.layer == layer):,}",
            f"{1e3 * sum(row.seconds for row in found.layers if row.layer == layer):.1f}",
            f"{sum(row.share for row in found.layers if row.layer == layer):.1%}",
        ]
        for layer in layers
    ]
    return f"{_steps(found)}\n" + table([*lines, *per_layer], heading)


def _line(name: str, row: "ProfileRow") -> list[str]:
    cells = [name, f"{row.calls:,}", f"{row.seconds * 1e3:.1f}", f"{row.share:.1%}"]
    if row.limit_share is None:
        return cells
    return [
        *cells,
        f"{row.size_bytes / 1e6:,.0f}",
        f"{row.operations / 1e9:,.1f}",
        f"{row.gb_s:.1f}",
        f"{row.gops:.1f}",
        f"{row.limit_share:.0%}",
    ]


def _steps(found: "Profile") -> str:
    return f"{found.steps:,} steps, {found.tokens:,} tokens, {found.wall_s:.2f} s"
