"""`octavo bench ops | core | throughput | latency | serve`: flags in, a table and a record out."""

import argparse
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from octavo.cli.bench_flags import (
    add_core_flags,
    add_latency_flags,
    add_ops_flags,
    add_serve_flags,
    add_throughput_flags,
)
from octavo.cli.figures import (
    attention_table,
    core_table,
    latency_table,
    limits_line,
    linear_table,
    objects_line,
    pools_text,
    serve_table,
    throughput_table,
)
from octavo.cli.flags import engine_config, given_flags
from octavo.config import RULES, EngineConfig, flag_of
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.load import ServeRow, Targets
    from octavo.bench.offline import OfflineRow
    from octavo.ops.ceilings import Ceilings
    from octavo.ops.native import NativeOps

TARGETS = {"ttft_target", "tpot_target"}
"""Settings that mean something for a server that runs already."""
ELSEWHERE = "limits are not measured: the server runs on another machine"


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
    return _offline(arguments, config, "throughput", cases, throughput_table)


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
    return _offline(arguments, config, "latency", cases, latency_table)


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


def ops(arguments: Namespace) -> int:
    """Kernels alone, at the shapes of a model, whose weights are not read, or at given ones.

    Raises   SetupError of any kind: the model or the instruction set cannot be used.
    """
    config, _ = engine_config(arguments)
    from octavo.bench.ops import Shape, measure_attention, measure_linear, shapes_of
    from octavo.bench.record import limits_of, median_row, spread_of
    from octavo.models.loader import open_model
    from octavo.models.reference import resolve_reference
    from octavo.ops.ceilings import measure_ceilings
    from octavo.resolve import kv_cache_dtype_of

    check_record_flags(arguments)
    backend = ops_of(config)
    if arguments.matrix:
        spec, shapes = None, [Shape(f"{k},{n}", n, k) for k, n in arguments.matrix]
    else:
        spec = open_model(resolve_reference(config.model)).spec
        shapes = list(shapes_of(spec))
    matrices, attention, limits = [], [], []
    for _ in range(arguments.runs):
        ceilings = measure_ceilings(backend)
        limits.append(limits_of(ceilings))
        matrices.append(
            measure_linear(backend, shapes, arguments.weights, arguments.rows, ceilings)
        )
        if spec is not None:
            layout = spec.kv_layout(config.block_size, kv_cache_dtype_of(config))
            attention.append(
                measure_attention(backend, layout, spec.heads, arguments.contexts, ceilings)
            )
    found = list(zip(*matrices, strict=True)), list(zip(*attention, strict=True))
    linear_rows, attention_rows = ([median_row(case) for case in kind] for kind in found)
    finish(
        arguments,
        "ops",
        f"{backend.name}, {backend.threads} threads\n"
        + linear_table(linear_rows)
        + attention_table(attention_rows)
        + limits_line(median_limits(limits)),
        [*linear_rows, *attention_rows],
        settings=settings_of(config),
        runs=arguments.runs,
        spread=[spread_of([row.us for row in case]) for kind in found for case in kind],
        limits=median_limits(limits),
    )
    return 0


def serve(arguments: Namespace) -> int:
    """Load a server over HTTP: the one at `--url`, or one that has the settings given here.

    Raises   RequestError: there is no server; ConfigError: it does not start, a file cannot be
             read or written, settings are given for a server that has its own.
    """
    config, _ = engine_config(arguments)
    from octavo.bench.load import Targets, own_server

    check_record_flags(arguments)
    targets = Targets(ttft_s=config.ttft_target, tpot_s=config.tpot_target)
    if arguments.url is None:
        with own_server(given_flags(arguments)) as (url, _):
            return _load(arguments, url, targets, config, settings_of(config))
    others = [name for name in vars(arguments) if name in RULES and name not in TARGETS]
    if others:
        flag = flag_of(others[0])
        raise ConfigError(f"{flag}: the server at {arguments.url} has its own settings; leave out")
    return _load(arguments, arguments.url, targets, config, {"url": arguments.url})


def _load(
    arguments: Namespace,
    url: str,
    targets: "Targets",
    config: EngineConfig,
    settings: dict[str, Any],
) -> int:
    from octavo.bench.load import arrivals, run_closed, run_open, serve_row, server_at, warm_up
    from octavo.bench.record import median_row, spread_of
    from octavo.simulate.workload import load_workload, shifted

    loads = [(path.stem, load_workload(path)) for path in arguments.workload]
    server = server_at(url)
    warm_up(server, loads[0][1])
    at_once, rate = arguments.concurrency, arguments.rate
    came = f"{at_once} at once" if at_once else f"{rate:g} a second" if rate else "as in the file"
    found: list[list[ServeRow]] = [[] for _ in loads]
    limits: list[dict[str, float]] = []
    for run in range(arguments.runs):
        if server.here:
            limits.append(limits_here(config))  # while the server has nothing to do
        for (name, items), rows in zip(loads, found, strict=True):
            fresh = shifted(items, run)
            if at_once:
                timings = run_closed(server, fresh, at_once)
            else:
                timings = run_open(server, fresh, arrivals(fresh, rate, seed=run + 1))
            rows.append(serve_row(name, came, timings, targets))
    rows = [median_row(one_case) for one_case in found]
    finish(
        arguments,
        "serve",
        serve_table(rows) + (limits_line(median_limits(limits)) if limits else f"{ELSEWHERE}\n"),
        rows,
        settings={"model": server.model, **settings},
        runs=arguments.runs,
        spread=[spread_of([row.output_tokens_per_s for row in case]) for case in found],
        limits=median_limits(limits) if limits else None,
        no_limits="" if limits else ELSEWHERE,
    )
    return 1 if any(row.errors for case in found for row in case) else 0


def core(arguments: Namespace) -> int:
    """Microseconds of plan and commit; no model."""
    from octavo.bench.core import FEW_BLOCKS, MANY_BLOCKS, measure_pools, measure_sizes, object_ns
    from octavo.bench.record import median_row, spread_of

    check_record_flags(arguments)
    runs, limits = [], []
    for _ in range(arguments.runs):
        limits.append({"object_ns": object_ns()})
        runs.append(measure_sizes(arguments.sequences, arguments.steps))
    found = list(zip(*runs, strict=True))
    rows = [median_row(case) for case in found]
    pools = measure_pools(256, FEW_BLOCKS, MANY_BLOCKS, arguments.steps)
    finish(
        arguments,
        "core",
        core_table(rows) + pools_text(pools) + objects_line(median_limits(limits)),
        [*rows, *pools],
        settings={"steps": arguments.steps},
        runs=arguments.runs,
        spread=[spread_of([row.both_us for row in case]) for case in found],
        limits=median_limits(limits),
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
    no_limits: str = "",
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
        no_limits=no_limits,
    )
    keep(record, json_file=arguments.json, results=arguments.results)


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """Those that are not as they would be by default."""
    usual = asdict(EngineConfig())
    return {name: value for name, value in asdict(config).items() if value != usual[name]}


def ops_of(config: EngineConfig) -> "NativeOps":
    """Kernels with the threads and the instruction set of an engine that has these settings."""
    from octavo.ops.native import NativeOps
    from octavo.resolve import read_machine

    return NativeOps(threads=config.threads or read_machine().cores, isa=config.isa)


def limits_here(config: EngineConfig) -> dict[str, float]:
    """What this machine can do now."""
    from octavo.bench.record import limits_of
    from octavo.ops.ceilings import measure_ceilings

    return limits_of(measure_ceilings(ops_of(config)))


def median_limits(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: median(limits[name] for limits in found) for name in found[0]}


@dataclass(frozen=True, slots=True)
class Measure:
    """One of the things that `octavo bench` measures."""

    name: str
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    command: Callable[[Namespace], int]


MEASURES = (
    Measure("ops", "kernels alone, beside what the machine can do", add_ops_flags, ops),
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
    Measure("serve", "load over HTTP: TTFT, TPOT, goodput, errors", add_serve_flags, serve),
)
