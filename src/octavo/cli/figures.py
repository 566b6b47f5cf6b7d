"""What `octavo bench` found, as tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.cli.tables import side_by_side, table

if TYPE_CHECKING:
    from octavo.bench.core import CoreRow, PoolRow
    from octavo.bench.load import ServeRow
    from octavo.bench.offline import OfflineRow
    from octavo.bench.ops import AttentionRow, LinearRow

Lines = list[tuple[str, list[str]]]


def limits_line(limits: dict[str, float]) -> str:
    return (
        f"the machine in this run: reads {limits['read_gb_s']:.1f} GB/s; multiplies and adds"
        f" {limits['bf16_gops']:.0f} G/s with bf16 weights, {limits['int8_gops']:.0f} with int8,"
        f" {limits['int4_gops']:.0f} with int4\n"
    )


def objects_line(limits: dict[str, float]) -> str:
    return f"the machine in this run: Python visits an object in {limits['object_ns']:.0f} ns\n"


def serve_table(rows: "Sequence[ServeRow]") -> str:
    lines: Lines = [
        ("workload", [row.workload for row in rows]),
        ("arrivals", [row.arrivals for row in rows]),
        ("requests / errors", [f"{row.requests} / {row.errors}" for row in rows]),
        *_latency_lines(rows),
        ("goodput", [f"{row.goodput_per_s:.2f}/s, {row.goodput_share:.0%}" for row in rows]),
    ]
    complaints = [
        f"{row.workload}: {row.first_error}\n" for row in rows if row.errors and row.first_error
    ]
    return side_by_side(lines) + "".join(complaints)


def _latency_lines(
    rows: "Sequence[OfflineRow] | Sequence[ServeRow]",
) -> Lines:
    """What every table of requests says."""
    tokens = [f"{row.prompt_tokens:,} / {row.output_tokens:,}" for row in rows]
    tpot = [f"{row.tpot_p50_s * 1e3:.1f} / {row.tpot_p99_s * 1e3:.1f} ms" for row in rows]
    return [
        ("prompt / output tokens", tokens),
        ("wall", [f"{row.wall_s:.2f} s" for row in rows]),
        ("output tokens/s", [f"{row.output_tokens_per_s:.1f}" for row in rows]),
        ("TTFT p50 / p99", [f"{row.ttft_p50_s:.2f} / {row.ttft_p99_s:.2f} s" for row in rows]),
        ("TPOT p50 / p99", tpot),
    ]


def _speed_lines(rows: "Sequence[OfflineRow]") -> Lines:
    """What both tables begin with."""
    return [
        ("workload", [row.workload for row in rows]),
        ("requests", [f"{row.requests}" for row in rows]),
        *_latency_lines(rows),
        ("share of the limit", [f"{row.share_of_limit:.0%}" for row in rows]),
    ]


def throughput_table(rows: "Sequence[OfflineRow]") -> str:
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


def latency_table(rows: "Sequence[OfflineRow]") -> str:
    at_once = ("at once", [f"{row.in_flight}" for row in rows])
    return side_by_side([at_once, *_speed_lines(rows)])


def linear_table(rows: "Sequence[LinearRow]") -> str:
    cells = [
        [
            row.matrix,
            row.form,
            f"{row.rows}",
            f"{row.us:.0f}",
            f"{row.gops:.1f}",
            f"{row.gb_s:.1f}",
            f"{row.share:.0%}",
        ]
        for row in rows
    ]
    return table(cells, ["linear", "weights", "rows", "µs", "G/s", "GB/s", "of limit"])


def attention_table(rows: "Sequence[AttentionRow]") -> str:
    if not rows:
        return ""
    cells = [
        [
            f"{row.sequences} × {row.context:,}",
            row.dtype,
            f"{row.us:.0f}",
            f"{row.gb_s:.1f}",
            f"{row.share:.0%}",
            f"{row.over_contiguous:.2f}",
        ]
        for row in rows
    ]
    return table(cells, ["decode attention", "KV", "µs", "GB/s", "of limit", "over contiguous"])


def core_table(rows: "Sequence[CoreRow]") -> str:
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


def pools_text(rows: "Sequence[PoolRow]") -> str:
    return "".join(
        f"{row.traffic}, {row.sequences} sequences: a pool of {row.many:,} blocks takes"
        f" {row.times:.2f} times what one of {row.few:,} takes\n"
        for row in rows
    )
