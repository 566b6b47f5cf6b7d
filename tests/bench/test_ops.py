"""Kernels are measured at the shapes they are said to have."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.bench.tiny import save_tiny

from octavo.bench.ops import (
    COLD_BYTES,
    AttentionCase,
    Shape,
    cold_layers,
    measure_attention,
    measure_linear,
    shapes_of,
)
from octavo.cli.main import main
from octavo.models.loader import open_model
from octavo.ops.api import KVLayout, KVType
from octavo.ops.ceilings import Ceilings
from octavo.ops.native import NativeOps

CEILINGS = Ceilings(read_bytes_per_s=1e9, operations_per_s={"bf16": 2e9, "int8": 3e9, "int4": 4e9})
RECORD = {"read_gb_s": 1.0, "bf16_gops": 2.0, "int8_gops": 3.0, "int4_gops": 4.0}


def test_shapes_are_those_of_the_weights(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = open_model(save_tiny(rng, tmp_path, monkeypatch)).spec
    assert shapes_of(spec) == (
        Shape("qkv", (6 + 2 + 2) * 16, 48),
        Shape("output", 48, 6 * 16),
        Shape("gate, up", 80, 48, gated=True),
        Shape("down", 48, 80),
        Shape("head", 97, 48),
    )


@pytest.mark.parametrize("gated", [False, True])
def test_linear_rows(gated: bool) -> None:
    shape = Shape("m", 256, 512, gated=gated)
    rows = measure_linear(
        NativeOps(threads=1), [shape], ["bf16", "int4"], [1, 5], CEILINGS, budget_s=0.0
    )
    assert [(row.form, row.rows) for row in rows] == [
        ("bf16", 1),
        ("int4", 1),
        ("bf16", 5),
        ("int4", 5),
    ]
    pairs = 2 if gated else 1
    for row in rows:
        assert row.gops == pytest.approx(2 * row.rows * 256 * 512 * pairs / row.us / 1e3)
        rate = 2e9 if row.form == "bf16" else 4e9
        floor_us = max(row.gb_s * row.us / 1e9, row.gops * row.us / rate) * 1e9
        assert row.share == pytest.approx(floor_us / row.us)
    assert rows[0].gb_s * rows[0].us > 3 * rows[1].gb_s * rows[1].us


@pytest.mark.parametrize(("dtype", "head_bytes"), [("bfloat16", 2 * 32), ("int8", 4 + 32)])
def test_attention_reads_all_of_what_it_is_given(dtype: KVType, head_bytes: int) -> None:
    layout = KVLayout(layers=3, kv_heads=2, head_dim=32, dtype=dtype)
    assert cold_layers(layout, 10**9) == 1
    assert cold_layers(layout, 1000) * 1000 * 2 * 2 * head_bytes >= COLD_BYTES
    rng = np.random.default_rng(3)
    case = AttentionCase(rng, layout, heads=4, sequences=2, context=40, rows=1)
    assert case.cost.size_bytes == 2 * 40 * 2 * 2 * head_bytes + 2 * case.out.nbytes
    case.step(NativeOps(threads=1))
    assert np.isfinite(case.out).all()
    shared = AttentionCase(rng, layout, heads=4, sequences=2, context=40, rows=1, shared=32)
    assert shared.cost.size_bytes < case.cost.size_bytes
    [row] = measure_attention(NativeOps(threads=1), layout, 4, [(2, 4000)], CEILINGS, budget_s=0.0)
    assert (row.sequences, row.context, row.dtype) == (2, 4000, dtype)
    assert row.gb_s * row.us * 1e3 > 2 * 4000 * 2 * 2 * head_bytes
    assert row.over_contiguous > 0


@pytest.mark.parametrize("given", ["model", "matrix"])
def test_the_command(
    given: str,
    rng: np.random.Generator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("octavo.ops.ceilings.measure_ceilings", lambda _: CEILINGS)
    monkeypatch.setattr("octavo.bench.ops.best_s", lambda run, _: run() or 1e-3)
    model = ["--model", str(save_tiny(rng, tmp_path, monkeypatch)), "--contexts", "2x64"]
    model += ["--kv-cache-dtype", "int8"]
    which = model if given == "model" else ["--matrix", "64,32", "32,100"]
    file = tmp_path / "record.json"
    few = ["--rows", "1", "3", "--runs", "2", "--threads", "1", "--json", str(file)]
    assert main(["bench", "ops", *which, *few]) == 0
    record = json.loads(file.read_text())
    matrices = [(row["inputs"], row["outputs"]) for row in record["rows"] if "inputs" in row]
    attention = [row for row in record["rows"] if "context" in row]
    assert [row["dtype"] for row in attention] == (["int8"] if given == "model" else [])
    assert record["settings"].get("kv_cache_dtype") == ("int8" if given == "model" else None)
    assert record["limits"] == RECORD
    if given == "matrix":
        assert matrices == [(64, 32), (64, 32), (32, 100), (32, 100)]
    else:
        assert len(matrices) == 10
    assert len(record["spread"]) == len(record["rows"])
    out = capsys.readouterr().out
    assert "1 threads" in out
    assert ("decode attention" in out) == (given == "model")


@pytest.mark.parametrize(
    "flags", [("--matrix", "64"), ("--matrix", "0,5"), ("--contexts", "8"), ("--weights", "fp8")]
)
def test_what_is_no_shape_is_refused(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "ops", *flags])
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err
