"""`octavo bench throughput`: the figures, and paged beside contiguous."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.text.vocabulary import metadata_of

from octavo.cli import bench
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.core.block_manager import BlockManager
from octavo.core.budget import Limits
from octavo.core.prefix_cache import PrefixCache
from octavo.core.scheduler import Scheduler
from octavo.engine.build import Built
from octavo.engine.door import Door
from octavo.engine.engine import Engine
from octavo.simulate.oracle import OracleRunner
from octavo.text.tokenizer import Tokenizer

BLOCKS, BLOCK_SIZE, VOCABULARY = 60, 4, 250
PREAMBLE = list(range(3, 15))


def built_on_an_oracle(config: EngineConfig, *, slab_tokens: int | None = None) -> Built:
    """What `build` gives, with a runner that needs no model."""
    manager = BlockManager(
        blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        cache=None if slab_tokens else PrefixCache(block_size=BLOCK_SIZE),
        slab_tokens=slab_tokens or 0,
    )
    runner = OracleRunner(blocks=BLOCKS, block_size=BLOCK_SIZE, vocabulary=VOCABULARY)
    scheduler = Scheduler(manager, Limits(sequences=32, tokens=64, watermark_blocks=0))
    tokenizer = Tokenizer.from_gguf(metadata_of([]))
    door = Door(tokenizer, max_model_len=240, vocab_size=VOCABULARY)
    return Built(Engine(scheduler, runner), door, None, None)  # type: ignore[arg-type]


def workload(folder: Path, seed: int, requests: int = 24) -> tuple[Path, list[dict[str, Any]]]:
    """Answers of very different lengths after a common preamble: what a slab is worst at."""
    draw = random.Random(seed)
    entries = [
        {
            "prompt_token_ids": PREAMBLE + [draw.randrange(3, VOCABULARY) for _ in range(10)],
            "output_len": 98 if number == 0 else draw.randint(1, 40),
            "arrival_s": number * 1e-5,
        }
        for number in range(requests)
    ]
    path = folder / "mix.json"
    path.write_text(json.dumps(entries))
    return path, entries


def test_paged_beside_contiguous(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "build", built_on_an_oracle)
    path, entries = workload(tmp_path, seed)
    rows_file = tmp_path / "rows.json"
    argv = ["--workload", str(path), "--baseline", "contiguous", "--json", str(rows_file)]
    assert main(["bench", "throughput", *argv]) == 0
    paged, slabs = json.loads(rows_file.read_text())

    for row in (paged, slabs):
        assert row["workload"] == "mix"
        assert row["requests"] == len(entries)
        assert row["prompt_tokens"] == 22 * len(entries)
        assert row["output_tokens"] == sum(entry["output_len"] for entry in entries)
        assert row["output_tokens_per_s"] == pytest.approx(row["output_tokens"] / row["wall_s"])
        assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"] < row["wall_s"]
        assert 0 < row["tpot_p50_s"] <= row["tpot_p99_s"] < row["wall_s"]
        assert 1 <= row["concurrency_mean"] <= row["concurrency_max"]
    # A slab is as long as the longest request, 30 of the 60 blocks: two fit.
    assert (paged["reservation"], slabs["reservation"]) == ("paged", "slabs of 120")
    assert (slabs["concurrency_max"], slabs["preemptions"], slabs["cache_hit_rate"]) == (2, 0, 0)
    assert slabs["pool_utilisation"] < 0.5
    assert paged["pool_utilisation"] > 0.85
    assert slabs["pool_utilisation_median"] < 0.5 < 0.85 < paged["pool_utilisation_median"]
    assert paged["concurrency_mean"] > 2 * slabs["concurrency_mean"]
    assert paged["steps"] < slabs["steps"]
    assert paged["preemptions"] > 0
    assert paged["recomputed_tokens"] > 0
    assert 0.2 < paged["cache_hit_rate"] < 12 / 22

    table = capsys.readouterr().out
    for name in ("pool utilisation", "preemptions", "prefix cache hit rate", "TTFT", "TPOT"):
        (line,) = (line for line in table.splitlines() if line.startswith(name))
        assert len(line.split("  ")[1:]) >= 2
    assert f"{paged['pool_utilisation']:.1%}" in table
    assert f"{slabs['pool_utilisation']:.1%}" in table


def test_utilisation_counts_filled_slots_of_the_blocks_held() -> None:
    engine = built_on_an_oracle(EngineConfig()).engine
    door = built_on_an_oracle(EngineConfig()).door
    meter = bench._Meter(engine)
    for _ in range(2):  # the second shares three blocks of the first, and they count once
        ticket = door.completion([*PREAMBLE, 50], bench.SamplingParams(max_tokens=3))
        engine.submit(ticket.request)
        engine.step()
    meter.sample(2.0)
    # First: 14 positions in 4 blocks. Second: 13 positions, 3 of its 4 blocks are the first's.
    used, slots = 14 + 1, (4 + 1) * BLOCK_SIZE
    assert meter.means() == pytest.approx((used / slots, 5 / BLOCKS, 2.0))
    assert meter.median_utilisation() == pytest.approx(used / slots)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--json", "{tmp}/no/such/rows.json"), "cannot write the figures to"),
        (("--baseline", "none"), "invalid choice"),
        (("--kv-cache-memory", "1KiB"), "kv_cache_memory"),
        (("--max-model-len", "40"), "do not fit into the context of 40"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    argv: tuple[str, ...],
    says: str,
    tmp_path: Path,
    seed: int,
    demo_model_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, _ = workload(tmp_path, seed)
    given = [word.replace("{tmp}", str(tmp_path)) for word in argv]
    model = ("--model", str(demo_model_path))
    try:
        code = main(["bench", "throughput", "--workload", str(path), *model, *given])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1), captured.err
    assert says in captured.err


def test_the_demo_model_under_a_small_pool(
    demo_model_path: Path, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path, entries = workload(tmp_path, seed, requests=6)
    rows_file = tmp_path / "rows.json"
    given = ("--kv-cache-memory", "6MiB", "--threads", "2", "--baseline", "contiguous")
    argv = ["--workload", str(path), "--model", str(demo_model_path), "--json", str(rows_file)]
    assert main(["bench", "throughput", *argv, *given]) == 0
    paged, slabs = json.loads(rows_file.read_text())
    assert paged["output_tokens"] == sum(entry["output_len"] for entry in entries)
    assert paged["pool_utilisation"] > slabs["pool_utilisation"]
    assert paged["concurrency_max"] > slabs["concurrency_max"]
