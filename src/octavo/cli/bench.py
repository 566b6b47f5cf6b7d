"""`octavo bench throughput`: the same requests for every engine, and what they got.

Greedy, end of sequence ignored, exact answer lengths. With `--baseline contiguous` the requests run
a second time under one slab of the longest request's length each, with the same kernels and the
same pool: only the reservation differs.
"""

import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.config import EngineConfig
from octavo.core.events import Finished, Receipt, Refused
from octavo.engine.build import build
from octavo.engine.door import Ticket
from octavo.engine.engine import Engine
from octavo.engine.params import SamplingParams
from octavo.errors import ConfigError, EngineError
from octavo.simulate.workload import WorkItem, load_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of one workload; utilisation, occupancy and concurrency are means over time."""

    workload: str
    reservation: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    pool_utilisation: float
    """Token slots that hold KV, of those in blocks that sequences own."""
    pool_utilisation_median: float
    """The same at the median step."""
    pool_occupancy: float
    """Blocks owned, of all."""
    concurrency_mean: float
    concurrency_max: int
    preemptions: int
    recomputed_tokens: int
    cache_hit_rate: float
    steps: int


class _Meter:
    """Means over time of what the pool holds, taken after each step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seconds = self._used = self._slots = self._owned = self._running = 0.0
        self._utilisations: list[float] = []
        self.most_running = 0

    def sample(self, seconds: float) -> None:
        scheduler = self._engine.scheduler
        manager, running = scheduler.manager, scheduler.running
        tables = [(sequence.computed, table) for sequence in running for table in sequence.tables]
        slots = manager.pool.owned * manager.block_size
        empty = sum(len(table) * manager.block_size - computed for computed, table in tables)
        if slots:
            self._utilisations.append((slots - empty) / slots)
        self._seconds += seconds
        self._slots += slots * seconds
        self._used += (slots - empty) * seconds
        self._owned += manager.pool.owned / manager.pool.total * seconds
        self._running += len(running) * seconds
        self.most_running = max(self.most_running, len(running))

    def means(self) -> tuple[float, float, float]:
        """(utilisation, occupancy, concurrency)"""
        seconds = max(self._seconds, 1e-9)
        return self._used / max(self._slots, 1e-9), self._owned / seconds, self._running / seconds

    def median_utilisation(self) -> float:
        """Of the steps after which any block was owned."""
        return statistics.median(self._utilisations) if self._utilisations else 0.0


def run(arguments: Namespace, config: EngineConfig) -> int:
    """Run every workload file, print a table, and write rows to `--json`; 0 if all went through.

    Raises   ConfigError: a workload cannot be read or does not fit, the rows cannot be written.
    """
    if arguments.json:
        _write(arguments.json, "", mode="a")  # complains now, not after minutes of work
    rows: list[Row] = []
    for path in arguments.workload:
        items = load_workload(path)
        rows.append(_measure(path.stem, items, config, slab_tokens=None))
        if arguments.baseline == "contiguous":
            longest = max(item.length for item in items)
            rows.append(_measure(path.stem, items, config, slab_tokens=longest))
    sys.stdout.write(_table(rows))
    if arguments.json:
        _write(arguments.json, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write the figures to {path}: {error.strerror}") from error


def _measure(
    name: str, items: Sequence[WorkItem], config: EngineConfig, *, slab_tokens: int | None
) -> Row:
    built = build(config, slab_tokens=slab_tokens)
    tickets = [
        built.door.completion(
            item.prompt_token_ids,
            SamplingParams(temperature=0.0, max_tokens=item.output_len, ignore_eos=True),
        )
        for item in items
    ]
    reservation = "paged" if slab_tokens is None else f"slabs of {slab_tokens}"
    sys.stderr.write(f"{name}, {reservation}: {len(items):,} requests\n")
    meter = _Meter(built.engine)
    started = time.monotonic()
    receipts = _drive(built.engine, meter, list(zip(items, tickets, strict=True)), started)
    wall_s = time.monotonic() - started
    return _row(name, reservation, receipts, wall_s, built.engine, meter)


def _drive(
    engine: Engine, meter: _Meter, work: list[tuple[WorkItem, Ticket]], started: float
) -> list[Receipt]:
    """Submit each request when it arrives, and step until all have ended."""
    receipts: list[Receipt] = []
    total, work = len(work), work[::-1]
    while len(receipts) < total:
        before = time.monotonic()
        while work and work[-1][0].arrival_s <= before - started:
            for event in engine.submit(work.pop()[1].request):
                raise ConfigError(f"the workload does not fit: {getattr(event, 'message', event)}")
        if engine.idle:
            time.sleep(max(0.0, work[-1][0].arrival_s - (time.monotonic() - started)))
            continue
        for event in engine.step():
            assert not isinstance(event, Refused)
            if isinstance(event, Finished):
                if event.reason != "length":
                    raise EngineError(f"a request ended by {event.reason}: {event.message}")
                receipts.append(event.receipt)
        meter.sample(time.monotonic() - before)
    return receipts


def _row(
    name: str,
    reservation: str,
    receipts: Sequence[Receipt],
    wall_s: float,
    engine: Engine,
    meter: _Meter,
) -> Row:
    prompt = sum(receipt.prompt_tokens for receipt in receipts)
    output = sum(receipt.completion_tokens for receipt in receipts)
    ttft = [_first(receipt) - receipt.arrival_s for receipt in receipts]
    tpot = [
        (receipt.finished_s - _first(receipt)) / (receipt.completion_tokens - 1)
        for receipt in receipts
        if receipt.completion_tokens > 1
    ] or [0.0]
    status = engine.status()
    utilisation, occupancy, concurrency = meter.means()
    return Row(
        workload=name,
        reservation=reservation,
        requests=len(receipts),
        prompt_tokens=prompt,
        output_tokens=output,
        wall_s=wall_s,
        output_tokens_per_s=output / wall_s,
        total_tokens_per_s=(prompt + output) / wall_s,
        ttft_p50_s=_percentile(ttft, 50),
        ttft_p99_s=_percentile(ttft, 99),
        tpot_p50_s=_percentile(tpot, 50),
        tpot_p99_s=_percentile(tpot, 99),
        pool_utilisation=utilisation,
        pool_utilisation_median=meter.median_utilisation(),
        pool_occupancy=occupancy,
        concurrency_mean=concurrency,
        concurrency_max=meter.most_running,
        preemptions=status.preemptions,
        recomputed_tokens=status.tokens_recomputed,
        cache_hit_rate=status.prefix_tokens_hit / max(status.prefix_tokens_queried, 1),
        steps=status.steps,
    )


def _first(receipt: Receipt) -> float:
    assert receipt.first_token_s is not None, "it has answered"
    return receipt.first_token_s


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _table(rows: Sequence[Row]) -> str:
    """One column a run, so that paged and contiguous stand side by side."""
    lines: list[tuple[str, list[str]]] = [
        ("workload", [row.workload for row in rows]),
        ("reservation", [row.reservation for row in rows]),
        ("requests", [f"{row.requests}" for row in rows]),
        (
            "prompt / output tokens",
            [f"{row.prompt_tokens:,} / {row.output_tokens:,}" for row in rows],
        ),
        ("wall", [f"{row.wall_s:.2f} s" for row in rows]),
        ("output tokens/s", [f"{row.output_tokens_per_s:.1f}" for row in rows]),
        ("total tokens/s", [f"{row.total_tokens_per_s:.1f}" for row in rows]),
        ("TTFT p50 / p99", [f"{row.ttft_p50_s:.2f} / {row.ttft_p99_s:.2f} s" for row in rows]),
        (
            "TPOT p50 / p99",
            [f"{row.tpot_p50_s * 1e3:.1f} / {row.tpot_p99_s * 1e3:.1f} ms" for row in rows],
        ),
        ("pool utilisation", [f"{row.pool_utilisation:.1%}" for row in rows]),
        ("at the median step", [f"{row.pool_utilisation_median:.1%}" for row in rows]),
        ("pool occupancy", [f"{row.pool_occupancy:.1%}" for row in rows]),
        (
            "concurrency mean / max",
            [f"{row.concurrency_mean:.1f} / {row.concurrency_max}" for row in rows],
        ),
        ("preemptions", [f"{row.preemptions}" for row in rows]),
        ("recomputed tokens", [f"{row.recomputed_tokens:,}" for row in rows]),
        ("prefix cache hit rate", [f"{row.cache_hit_rate:.1%}" for row in rows]),
        ("steps", [f"{row.steps:,}" for row in rows]),
    ]
    label = max(len(name) for name, _ in lines)
    width = max(len(cell) for _, cells in lines for cell in cells)
    return "".join(
        f"{name:<{label}}  " + "  ".join(f"{cell:>{width}}" for cell in cells) + "\n"
        for name, cells in lines
    )
