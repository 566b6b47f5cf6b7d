"""Workloads run by an engine in this process: tokens a second, TTFT, TPOT, what the pool holds.

Greedy, end of sequence ignored, exact answer lengths, so that every engine does the same work. With
`slab_tokens` each request gets one slab of that length, with the same kernels and the same pool:
only the reservation differs.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.bench.record import percentile
from octavo.config import EngineConfig, Quantization
from octavo.core.calls import Answer, Call, Plan
from octavo.core.events import Event, Finished, Receipt, Refused
from octavo.core.plan import StepPlan
from octavo.engine.build import Built, build
from octavo.engine.door import Ticket
from octavo.engine.engine import Engine
from octavo.engine.params import SamplingParams
from octavo.errors import ConfigError, EngineError
from octavo.models.spec import ModelSpec
from octavo.ops.ceilings import Ceilings, measure_ceilings
from octavo.ops.costs import Cost, Products
from octavo.ops.native import NativeOps
from octavo.simulate.workload import WorkItem

FORMS: dict[Quantization, Products] = {
    "none": "bf16",
    "stored": "int4",
    "int8": "int8",
    "int4": "int4",
}
"""Whose products are taken; of several kinds the quickest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRow:
    """One run of one workload; utilisation, occupancy and concurrency are means over time."""

    workload: str
    reservation: str
    in_flight: int
    """At most so many requests at once; 0: as they arrive."""
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
    share_of_limit: float
    """The least that reading and multiplying by the weights takes on this machine, over the time
    that it took."""
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


class _Steps:
    """An observer: the positions that each step computed, and how many of them were sampled."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def observe(self, call: Call, answer: Answer) -> None:
        if isinstance(call, Plan) and isinstance(answer, StepPlan) and answer.spans:
            tokens = sum(span.stop - span.start for span in answer.spans)
            self.sizes.append((tokens, sum(span.samples for span in answer.spans)))


def step_cost(spec: ModelSpec, weights_bytes: int, tokens: int, rows: int) -> Cost:
    """What a step has to do at least: read the weights once, and multiply by them.

    An embedding that is not the head is looked up, not read. Attention is left out.
    """
    attention = spec.qkv_size + spec.heads * spec.head_dim
    layers = spec.layers * spec.hidden_size * (attention + 3 * spec.ffn_size)
    table = spec.hidden_size * spec.vocab_size
    tables = table if spec.tied_embeddings else 2 * table
    size_bytes = weights_bytes * (layers + table) // (layers + tables)
    return Cost(size_bytes, 2 * (tokens * layers + rows * table))


def ceilings_for(built: Built) -> Ceilings:
    """The machine's limits with the threads and the instruction set of an engine."""
    return measure_ceilings(NativeOps(threads=built.resolved.threads, isa=built.resolved.isa))


def measure(
    name: str,
    items: Sequence[WorkItem],
    config: EngineConfig,
    *,
    slab_tokens: int | None = None,
    in_flight: int = 0,
) -> tuple[OfflineRow, Ceilings]:
    """One run on a fresh engine; before it the machine's limits.

    With `in_flight` so many requests are there at a time, and the next comes when one has ended.
    Raises   ConfigError: the workload does not fit; EngineError: an answer failed.
    """
    steps = _Steps()
    built = build(config, slab_tokens=slab_tokens, observers=[steps])
    work = [(item, ticket_of(built, item)) for item in items]
    reservation = "paged" if slab_tokens is None else f"slabs of {slab_tokens}"
    sys.stderr.write(f"{name}, {reservation}: {len(items):,} requests\n")
    ceilings = ceilings_for(built)
    meter = _Meter(built.engine)
    started = time.monotonic()
    receipts = drive(
        built.engine, work, lambda _, seconds: meter.sample(seconds), in_flight=in_flight
    )
    wall_s = time.monotonic() - started
    form = FORMS[built.resolved.quantization]
    floor_s = sum(
        ceilings.floor_s(step_cost(built.spec, built.resolved.weights_bytes, *size), form)
        for size in steps.sizes
    )
    row = _row(receipts, wall_s, built.engine, meter)
    found = OfflineRow(
        workload=name,
        reservation=reservation,
        in_flight=in_flight,
        share_of_limit=floor_s / wall_s,
        **row,
    )
    return found, ceilings


def ticket_of(built: Built, item: WorkItem) -> Ticket:
    """The request of an entry: its ids, greedy, exactly as many tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=item.output_len, ignore_eos=True)
    return built.door.completion(item.prompt_token_ids, params)


def drive(
    engine: Engine,
    work: Sequence[tuple[WorkItem, Ticket]],
    stepped: Callable[[Sequence[Event], float], object],
    *,
    in_flight: int = 0,
) -> list[Receipt]:
    """Submit each request when it arrives, or with `in_flight` when one has ended, and step until
    all have. `stepped` is told what came of each step, and how long it took.

    Raises   ConfigError: a request does not fit; EngineError: one failed.
    """
    started = time.monotonic()
    receipts: list[Receipt] = []
    to_come = list(work)[::-1]
    while len(receipts) < len(work):
        before = time.monotonic()
        while to_come and _is_due(to_come[-1][0], before - started, in_flight, engine):
            for event in engine.submit(to_come.pop()[1].request):
                raise ConfigError(f"the workload does not fit: {getattr(event, 'message', event)}")
        if engine.idle:
            time.sleep(max(0.0, to_come[-1][0].arrival_s - (time.monotonic() - started)))
            continue
        events = engine.step()
        for event in events:
            assert not isinstance(event, Refused)
            if isinstance(event, Finished):
                if event.reason != "length":
                    raise EngineError(f"a request ended by {event.reason}: {event.message}")
                receipts.append(event.receipt)
        stepped(events, time.monotonic() - before)
    return receipts


def _is_due(item: WorkItem, elapsed_s: float, in_flight: int, engine: Engine) -> bool:
    if not in_flight:
        return item.arrival_s <= elapsed_s
    scheduler = engine.scheduler
    return len(scheduler.running) + len(scheduler.waiting) < in_flight


def _row(
    receipts: Sequence[Receipt], wall_s: float, engine: Engine, meter: _Meter
) -> dict[str, Any]:
    prompt = sum(receipt.prompt_tokens for receipt in receipts)
    output = sum(receipt.completion_tokens for receipt in receipts)
    ttft = [_first(receipt) - receipt.arrival_s for receipt in receipts]
    tpot = [
        (receipt.finished_s - _first(receipt)) / (receipt.completion_tokens - 1)
        for receipt in receipts
        if receipt.completion_tokens > 1
    ]
    status = engine.status()
    utilisation, occupancy, concurrency = meter.means()
    return {
        "requests": len(receipts),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "wall_s": wall_s,
        "output_tokens_per_s": output / wall_s,
        "total_tokens_per_s": (prompt + output) / wall_s,
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p99_s": percentile(ttft, 99),
        "tpot_p50_s": percentile(tpot, 50),
        "tpot_p99_s": percentile(tpot, 99),
        "pool_utilisation": utilisation,
        "pool_utilisation_median": meter.median_utilisation(),
        "pool_occupancy": occupancy,
        "concurrency_mean": concurrency,
        "concurrency_max": meter.most_running,
        "preemptions": status.preemptions,
        "recomputed_tokens": status.tokens_recomputed,
        "cache_hit_rate": status.prefix_tokens_hit / max(status.prefix_tokens_queried, 1),
        "steps": status.steps,
    }


def _first(receipt: Receipt) -> float:
    assert receipt.first_token_s is not None, "it has answered"
    return receipt.first_token_s
