"""`octavo bench`: the figures, paged beside contiguous, medians of runs, records."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.text.vocabulary import metadata_of

from octavo.bench import offline
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.core.block_manager import BlockManager
from octavo.core.budget import Limits
from octavo.core.prefix_cache import PrefixCache
from octavo.core.scheduler import Scheduler
from octavo.engine.build import Built
from octavo.engine.door import Door
from octavo.engine.engine import Engine, Observer
from octavo.engine.params import SamplingParams
from octavo.models.spec import ModelSpec, RopeSpec, full_attention
from octavo.ops.ceilings import Ceilings
from octavo.simulate.oracle import OracleRunner
from octavo.text.tokenizer import Tokenizer

BLOCKS, BLOCK_SIZE, VOCABULARY = 60, 4, 250
PREAMBLE = list(range(3, 15))


SPEC = ModelSpec(
    name="tiny",
    architecture="llama",
    vocab_size=VOCABULARY,
    hidden_size=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    ffn_size=16,
    norm_eps=1e-5,
    activation="silu",
    rope=RopeSpec(theta=1e4, dims=4),
    max_context=512,
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    ffn_bias=False,
    groups=full_attention(2),
    bos_id=None,
    eos_ids=(),
    stored_as="BF16",
    fingerprint="",
)
NO_WEIGHTS: Any = None
RATES = Ceilings(read_bytes_per_s=1e9, operations_per_s={"bf16": 1e9, "int8": 2e9, "int4": 3e9})


def built_on_an_oracle(
    config: EngineConfig, *, slab_tokens: int | None = None, observers: Sequence[Observer] = ()
) -> Built:
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
    resolved: Any = SimpleNamespace(weights_bytes=5000, quantization="none", threads=1, isa=None)
    return Built(Engine(scheduler, runner, observers=observers), door, resolved, SPEC, NO_WEIGHTS)


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines without a model, on a machine of known speed."""
    monkeypatch.setattr(offline, "build", built_on_an_oracle)
    monkeypatch.setattr(offline, "ceilings_for", lambda _: RATES)


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
    tmp_path: Path, seed: int, oracle: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path, entries = workload(tmp_path, seed)
    rows_file = tmp_path / "rows.json"
    argv = ["--workload", str(path), "--baseline", "contiguous", "--json", str(rows_file)]
    assert main(["bench", "throughput", *argv]) == 0
    paged, slabs = json.loads(rows_file.read_text())["rows"]

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


def test_a_record_says_what_was_measured_where_and_how(
    tmp_path: Path, seed: int, oracle: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path, entries = workload(tmp_path, seed)
    results = tmp_path / "results.jsonl"
    argv = ["--workload", str(path), "--runs", "3", "--json", "-", "--results", str(results)]
    for _ in range(2):
        assert main(["bench", "throughput", *argv, "--max-num-seqs", "32"]) == 0
    first, second = (json.loads(line) for line in results.read_text().splitlines())
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [first, second]
    assert first["benchmark"] == "throughput"
    assert first["engine"].startswith("octavo ")
    assert (first["runs"], first["settings"]) == (3, {"max_num_seqs": 32})
    assert first["limits"] == {"read_gb_s": 1, "bf16_gops": 1, "int8_gops": 2, "int4_gops": 3}
    assert first["machine"]["cores"] >= 1
    [row], [spread] = first["rows"], first["spread"]
    assert spread >= 1
    # Weights: 2 layers of 8 · (16 + 8 + 3 · 16), a head of 8 · 250; no step is large enough to be
    # bound by reading 5,000 bytes.
    computed = row["prompt_tokens"] + row["output_tokens"] - len(entries)
    least = 2 * row["output_tokens"] * 2000 / 1e9
    most = 2 * (computed + row["recomputed_tokens"]) * 1152 / 1e9 + least
    assert least < row["share_of_limit"] * row["wall_s"] < 1.5 * (most + row["steps"] * 5e-6)


def test_latency_keeps_so_many_in_flight(
    tmp_path: Path, seed: int, oracle: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path, entries = workload(tmp_path, seed)
    rows_file = tmp_path / "rows.json"
    argv = ["--workload", str(path), "--concurrency", "1", "3", "--json", str(rows_file)]
    assert main(["bench", "latency", *argv]) == 0
    alone, three = json.loads(rows_file.read_text())["rows"]
    assert (alone["in_flight"], alone["concurrency_max"]) == (1, 1)
    assert (three["in_flight"], three["concurrency_max"]) == (3, 3)
    assert alone["requests"] == three["requests"] == len(entries)
    assert alone["steps"] > three["steps"]
    table = capsys.readouterr().out
    assert table.splitlines()[0].split() == ["at", "once", "1", "3"]
    assert "TTFT p50 / p99" in table
    assert "the machine in this run: reads 1.0 GB/s" in table


def test_core_needs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_file = tmp_path / "rows.json"
    argv = ["--sequences", "4", "9", "--steps", "5", "--runs", "2", "--json", str(rows_file)]
    assert main(["bench", "core", *argv]) == 0
    record = json.loads(rows_file.read_text())
    sizes = [row for row in record["rows"] if "each_us" in row]
    assert [(row["traffic"], row["sequences"]) for row in sizes] == [
        ("decode", 4),
        ("decode", 9),
        ("mixed", 4),
        ("mixed", 9),
    ]
    for row in sizes:
        assert row["each_us"] == pytest.approx(row["both_us"] / row["sequences"])
        assert min(row["plan_us"], row["commit_us"]) > 0
    assert [row["many"] for row in record["rows"][4:]] == [1_000_000] * 2
    assert list(record["limits"]) == ["object_ns"]
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["sequences", "plan", "µs", "commit", "µs", "both", "µs", "each"]
    assert len(table) == 8
    visit = f"Python visits an object in {record['limits']['object_ns']:.0f} ns"
    assert table[-1] == f"the machine in this run: {visit}"


def test_utilisation_counts_filled_slots_of_the_blocks_held() -> None:
    engine = built_on_an_oracle(EngineConfig()).engine
    door = built_on_an_oracle(EngineConfig()).door
    meter = offline._Meter(engine)
    for _ in range(2):  # the second shares three blocks of the first, and they count once
        ticket = door.completion([*PREAMBLE, 50], SamplingParams(max_tokens=3))
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
        (("--results", "{tmp}/no/such/lines"), "cannot write the figures to"),
        (("--runs", "0"), "must be at least 1, not 0"),
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
    paged, slabs = json.loads(rows_file.read_text())["rows"]
    assert paged["output_tokens"] == sum(entry["output_len"] for entry in entries)
    assert paged["pool_utilisation"] > slabs["pool_utilisation"]
    assert paged["concurrency_max"] > slabs["concurrency_max"]
