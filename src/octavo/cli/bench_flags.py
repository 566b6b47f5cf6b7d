"""The flags of `octavo bench`."""

import argparse
from collections.abc import Callable
from pathlib import Path

from octavo.cli.flags import SERVER_ONLY, add_engine_flags
from octavo.config import RULES

DEFAULT_RUNS = 3


def add_ops_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--matrix",
        nargs="+",
        type=_pair("K,N", ","),
        default=[],
        metavar="K,N",
        help="matrices of K inputs and N outputs (default: those of the model)",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        type=_positive,
        default=[1, 8, 32, 128, 512],
        metavar="M",
        help="rows that are multiplied (default: 1 8 32 128 512)",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=("bf16", "int8", "int6", "int4"),
        default=["bf16"],
        help="forms of the weights, which take turns (default: bf16)",
    )
    parser.add_argument(
        "--contexts",
        nargs="+",
        type=_pair("SxC", "x"),
        default=[(1, 1024), (1, 8192), (64, 512)],
        metavar="SxC",
        help="S sequences that decode after C tokens (default: 1x1024 1x8192 64x512)",
    )
    add_runs_flag(parser, DEFAULT_RUNS)
    add_record_flags(parser)
    own = {"model", "threads", "isa", "block_size", "kv_cache_dtype"}
    add_engine_flags(parser, without=RULES.keys() - own)


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
        type=_positive,
        default=[1, 8],
        metavar="N",
        help="so many requests at once, the next comes when one has ended (default: 1 8)",
    )
    add_runs_flag(parser, 1)
    add_record_flags(parser)
    add_engine_flags(parser, without=SERVER_ONLY)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", metavar="URL", help="of a running server (default: one that is started for it)"
    )
    _add_workload_flag(parser)
    when = parser.add_mutually_exclusive_group()
    when.add_argument(
        "--rate",
        type=_rate,
        metavar="R",
        help="requests come by chance, R a second (default: when the workload says)",
    )
    when.add_argument(
        "--concurrency", type=_positive, metavar="N", help="N at once, the next when one has ended"
    )
    add_runs_flag(parser, 1)
    add_record_flags(parser)
    add_engine_flags(parser, without=SERVER_ONLY)


def add_core_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sequences",
        nargs="+",
        type=_positive,
        default=[64, 256, 1024],
        metavar="N",
        help="so many run at once (default: 64 256 1024)",
    )
    parser.add_argument(
        "--steps", type=_positive, default=300, metavar="N", help="of each run (default: 300)"
    )
    add_runs_flag(parser, DEFAULT_RUNS)
    add_record_flags(parser)


def add_runs_flag(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--runs",
        type=_positive,
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


def _add_workload_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", nargs="+", type=Path, required=True, metavar="FILE", help="JSON workloads"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be above 0, not {value:g}")
    return value


def _pair(form: str, separator: str) -> Callable[[str], tuple[int, int]]:
    def pair(text: str) -> tuple[int, int]:
        first, found, second = text.partition(separator)
        if not (found and first.isdecimal() and second.isdecimal() and int(first) * int(second)):
            raise argparse.ArgumentTypeError(f"expected {form}, two whole numbers, got {text!r}")
        return int(first), int(second)

    return pair
