"""`octavo bench core | throughput | latency`: flags in, a table and a record out."""

import argparse
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.flags import SERVER_ONLY, add_engine_flags, engine_config
from octavo.cli.tables import side_by_side, table
from octavo.config import EngineConfig

if TYPE_CHECKING:
    from octavo.bench.core import CoreRow, PoolRow
    from octavo.bench.offline import OfflineRow
    from octavo.ops.ceilings import Ceilings

DEFAULT_RUNS = 3


def add_throughput_flags(parser: argparse.ArgumentParser) -> None:
    _add_workload_flag(parser)
    parser.add_argument(
        "--baseline",
        choices=("contiguous",),
        help="run again with one slab of the maximum length for each request, for comparison",
    )
    add_runs_flag(parser, 1)
    add_record_flags(parser)
    add_engine_flags(parser, without=SERVER_ONLY)


def add_latency_flags(parser: argparse.ArgumentParser) -> None:
    _add_workload_flag(parser)
    parser.add_argument(
        "--concurrency",
        nargs="+",
        type=positive,
        default=[1, 8],
        metavar="N",
        help="so many requests at once, the next comes when one has ended (default: 1 8)",
    )
    add_runs_flag(parser, 1)
    add_record_flags(parser)
    add_engine_flags(parser, without=SERVER_ONLY)


def add_core_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sequences",
        nargs="+",
        type=positive,
        default=[64, 256, 1024],
        metavar="N",
        help="so many run at once (default: 64 256 1024)",
    )
    parser.add_argument(
        "--steps", type=positive, default=300, metavar="N", help="of each run (default: 300)"
    )
    add_runs_flag(parser, DEFAULT_RUNS)
    add_record_flags(parser)


def _add_workload_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", nargs="+", type=Path, required=True, metavar="FILE", help="JSON workloads"
    )


def add_runs_flag(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--runs",
        type=positive,
        default=default,
        metavar="N",
        help=f"figures are medians of so many runs (default: {default})",
    )


def add_record_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the record there too; - for stdout alone"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="add the record to this file, as one line"
    )


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def throughput(arguments: Namespace) -> int:
    """Run every workload file; 0 if all went through.

    Raises   ConfigError: a workload cannot be read or does not fit, a file cannot be written.
    """
    config, _ = engine_config(arguments)
    from octavo.bench.offline import measure
    from octavo.simulate.workload import load_workload

    cases: list[Callable[[], tuple[OfflineRow, Ceilings]]] = []
    for path in arguments.workload:
        items = load_workload(path)
        longest = max(item.length for item in items)
        slabs = [None, longest] if arguments.baseline == "contiguous" else [None]
        cases += [
            lambda name=path.stem, items=items, slab=slab: measure(  # type: ignore[misc]
                name, items, config, slab_tokens=slab
            )
            for slab in slabs
        ]
    return _offline(arguments, config, "throughput", cases, _throughput_table)


def latency(arguments: Namespace) -> int:
    """Run every workload file at each concurrency.

    Raises   as `throughput`.
    """
    config, _ = engine_config(arguments)
    from octavo.bench.offline import measure
    from octavo.simulate.workload import load_workload

    cases: list[Callable[[], tuple[OfflineRow, Ceilings]]] = [
        lambda name=path.stem, items=items, most=most: measure(  # type: ignore[misc]
            name, items, config, in_flight=most
        )
        for path in arguments.workload
        for items in [load_workload(path)]
        for most in arguments.concurrency
    ]
    return _offline(arguments, config, "latency", cases, _latency_table)


def _offline(
    arguments: Namespace,
    config: EngineConfig,
    benchmark: str,
    cases: "Sequence[Callable[[], tuple[OfflineRow, Ceilings]]]",
    tabled: "Callable[[Sequence[OfflineRow]], str]",
) -> int:
    """Each case once a run, so that cases take turns; then the medians."""
    from octavo.bench.record import limits_of, median_row, spread_of

    check_record_flags(arguments)
    runs = [[case() for case in cases] for _ in range(arguments.runs)]
    found = [[row for row, _ in one_case] for one_case in zip(*runs, strict=True)]
    rows = [median_row(one_case) for one_case in found]
    limits = median_limits([limits_of(ceilings) for run in runs for _, ceilings in run])
    finish(
        arguments,
        benchmark,
        tabled(rows) + limits_line(limits),
        rows,
        settings=settings_of(config),
        runs=arguments.runs,
        spread=[spread_of([row.output_tokens_per_s for row in case]) for case in found],
        limits=limits,
    )
    return 0


def core(arguments: Namespace) -> int:
    """Microseconds of plan and commit; no model."""
    from octavo.bench.core import FEW_BLOCKS, MANY_BLOCKS, measure_pools, measure_sizes
    from octavo.bench.record import median_row, spread_of

    check_record_flags(arguments)
    runs = [measure_sizes(arguments.sequences, arguments.steps) for _ in range(arguments.runs)]
    found = list(zip(*runs, strict=True))
    rows = [median_row(case) for case in found]
    pools = measure_pools(256, FEW_BLOCKS, MANY_BLOCKS, arguments.steps)
    finish(
        arguments,
        "core",
        _core_table(rows) + _pools_text(pools),
        [*rows, *pools],
        settings={"steps": arguments.steps},
        runs=arguments.runs,
        spread=[spread_of([row.both_us for row in case]) for case in found],
    )
    return 0


def check_record_flags(arguments: Namespace) -> None:
    from octavo.bench.record import check_writable

    check_writable(arguments.json, arguments.results)


def finish(
    arguments: Namespace,
    benchmark: str,
    text: str,
    rows: Sequence[Any],
    *,
    settings: dict[str, Any],
    runs: int,
    spread: Sequence[float] = (),
    limits: dict[str, float] | None = None,
) -> None:
    """Print the table, and write the record where it is wanted."""
    from octavo.bench.record import Record, engine_name, keep

    alone = arguments.json is not None and str(arguments.json) == "-"
    (sys.stderr if alone else sys.stdout).write(text)
    record = Record(
        benchmark=benchmark,
        engine=engine_name(),
        settings=settings,
        runs=runs,
        rows=[asdict(row) for row in rows],
        spread=spread,
        limits=limits,
    )
    keep(record, json_file=arguments.json, results=arguments.results)


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """Those that are not as they would be by default."""
    usual = asdict(EngineConfig())
    return {name: value for name, value in asdict(config).items() if value != usual[name]}


def median_limits(found: Sequence[dict[str, float]]) -> dict[str, float]:
    from statistics import median

    return {name: median(limits[name] for limits in found) for name in found[0]}


def limits_line(limits: dict[str, float]) -> str:
    return (
        f"the machine in this run: reads {limits['read_gb_s']:.1f} GB/s; multiplies and adds"
        f" {limits['bf16_gops']:.0f} G/s with bf16 weights, {limits['int8_gops']:.0f} with int8,"
        f" {limits['int4_gops']:.0f} with int4\n"
    )


def _speed_lines(rows: "Sequence[OfflineRow]") -> list[tuple[str, list[str]]]:
    """What both tables begin with."""
    tokens = [f"{row.prompt_tokens:,} / {row.output_tokens:,}" for row in rows]
    tpot = [f"{row.tpot_p50_s * 1e3:.1f} / {row.tpot_p99_s * 1e3:.1f} ms" for row in rows]
    return [
        ("workload", [row.workload for row in rows]),
        ("requests", [f"{row.requests}" for row in rows]),
        ("prompt / output tokens", tokens),
        ("wall", [f"{row.wall_s:.2f} s" for row in rows]),
        ("output tokens/s", [f"{row.output_tokens_per_s:.1f}" for row in rows]),
        ("share of the limit", [f"{row.share_of_limit:.0%}" for row in rows]),
        ("TTFT p50 / p99", [f"{row.ttft_p50_s:.2f} / {row.ttft_p99_s:.2f} s" for row in rows]),
        ("TPOT p50 / p99", tpot),
    ]


def _throughput_table(rows: "Sequence[OfflineRow]") -> str:
    concurrency = [f"{row.concurrency_mean:.1f} / {row.concurrency_max}" for row in rows]
    return side_by_side(
        [
            *_speed_lines(rows),
            ("total tokens/s", [f"{row.total_tokens_per_s:.1f}" for row in rows]),
            ("reservation", [row.reservation for row in rows]),
            ("pool utilisation", [f"{row.pool_utilisation:.1%}" for row in rows]),
            ("at the median step", [f"{row.pool_utilisation_median:.1%}" for row in rows]),
            ("pool occupancy", [f"{row.pool_occupancy:.1%}" for row in rows]),
            ("concurrency mean / max", concurrency),
            ("preemptions", [f"{row.preemptions}" for row in rows]),
            ("recomputed tokens", [f"{row.recomputed_tokens:,}" for row in rows]),
            ("prefix cache hit rate", [f"{row.cache_hit_rate:.1%}" for row in rows]),
            ("steps", [f"{row.steps:,}" for row in rows]),
        ]
    )


def _latency_table(rows: "Sequence[OfflineRow]") -> str:
    at_once = ("at once", [f"{row.in_flight}" for row in rows])
    return side_by_side([at_once, *_speed_lines(rows)])


def _core_table(rows: "Sequence[CoreRow]") -> str:
    return table(
        [
            [
                f"{row.traffic:6} {row.sequences:>5}",
                *(f"{us:.0f}" for us in (row.plan_us, row.commit_us, row.both_us)),
                f"{row.each_us:.1f}",
            ]
            for row in rows
        ],
        ["sequences", "plan µs", "commit µs", "both µs", "each"],
    )


def _pools_text(rows: "Sequence[PoolRow]") -> str:
    return "".join(
        f"{row.traffic}, {row.sequences} sequences: a pool of {row.many:,} blocks takes"
        f" {row.times:.2f} times what one of {row.few:,} takes\n"
        for row in rows
    )


@dataclass(frozen=True, slots=True)
class Measure:
    """One of the things that `octavo bench` measures."""

    name: str
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    command: Callable[[Namespace], int]


MEASURES = (
    Measure("core", "microseconds to plan and to commit a step; no model", add_core_flags, core),
    Measure(
        "throughput", "tokens a second, TTFT, TPOT on workloads", add_throughput_flags, throughput
    ),
    Measure(
        "latency",
        "TTFT and TPOT of single requests and of several at once",
        add_latency_flags,
        latency,
    ),
)
