"""What the drivers of peers share: workloads in, the record of `octavo bench` out."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from octavo.bench.load import ServeRow, Targets, Timing, serve_row
from octavo.bench.record import Record, check_writable, keep, median_row, spread_of
from octavo.simulate.workload import WorkItem, load_workload, shifted

WARM_UP = WorkItem(prompt_token_ids=tuple(range(100, 132)), output_len=8)


def arguments(description: str) -> argparse.ArgumentParser:
    """The flags that all drivers have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="as the peer wants it: a folder or a file")
    parser.add_argument("--workload", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="- for stdout alone")
    parser.add_argument("--results", type=Path, metavar="FILE")
    return parser


def measure(
    chosen: argparse.Namespace,
    engine: str,
    settings: dict[str, Any],
    run: Callable[[Sequence[WorkItem]], list[Timing]],
    *,
    tells_first_token: bool,
) -> None:
    """Run every workload `--runs` times, with other ids each time, and print the record.

    `run` carries out the requests, all at once, and says how each fared. Where a peer does not tell
    when the first token came, rows have neither TTFT nor TPOT.
    """
    check_writable(chosen.json, chosen.results)
    loads = [(path.stem, load_workload(path)) for path in chosen.workload]
    for name, items in loads:
        if any(item.arrival_s for item in items):
            raise SystemExit(f"{name}: requests come at different times; here all come at once")
    found: list[list[ServeRow]] = [[] for _ in loads]
    run([WARM_UP])
    for number in range(chosen.runs):
        for (name, items), rows in zip(loads, found, strict=True):
            rows.append(serve_row(name, "all at once", run(shifted(items, number)), Targets()))
            print(f"{engine}, {name}: {rows[-1].output_tokens_per_s:.1f} tokens/s", file=sys.stderr)
    record = Record(
        benchmark="throughput",
        engine=engine,
        settings={"model": Path(chosen.model).name, "threads": chosen.threads, **settings},
        runs=chosen.runs,
        rows=[_known(asdict(median_row(rows)), tells_first_token) for rows in found],
        spread=[spread_of([row.output_tokens_per_s for row in rows]) for rows in found],
    )
    keep(record, json_file=chosen.json, results=chosen.results)


def _known(row: dict[str, Any], tells_first_token: bool) -> dict[str, Any]:
    times = () if tells_first_token else ("ttft", "tpot", "goodput")
    return {name: value for name, value in row.items() if not name.startswith(times)}


def together(items: Sequence[WorkItem], counts: Sequence[int], seconds: float) -> list[Timing]:
    """Timings of requests of which only the end of all is known, and how many tokens each got."""
    return [
        Timing(
            due_s=0.0,
            last_s=seconds,
            prompt_tokens=len(item.prompt_token_ids),
            output_tokens=count,
            error="" if count == item.output_len else f"{count} tokens, not {item.output_len}",
        )
        for item, count in zip(items, counts, strict=True)
    ]


def stopwatch() -> Callable[[], float]:
    """Seconds since this call."""
    started = time.monotonic()
    return lambda: time.monotonic() - started
