"""Where time goes: every moment counts once, at the right place, beside what it has to cost."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from tests.bench.tiny import LAYERS, VOCABULARY, save_tiny

from octavo.bench.picture import drawn, svg
from octavo.bench.profile import PYTHON, Place, Profile, Recorder, profile, summary
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.ops.ceilings import Ceilings
from octavo.ops.costs import Cost
from octavo.ops.measured import Measured
from octavo.simulate.workload import uniform_workload

REQUESTS, PROMPT, ANSWER = 3, 9, 4
CEILINGS = Ceilings(read_bytes_per_s=1e9, operations_per_s={"bf16": 2e9, "int8": 3e9, "int4": 4e9})


@pytest.fixture
def found(rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    monkeypatch.setattr("octavo.bench.profile.ceilings_for", lambda _: CEILINGS)
    path = save_tiny(rng, tmp_path, monkeypatch)
    items = uniform_workload(REQUESTS, PROMPT, ANSWER, vocabulary=VOCABULARY)
    return profile(items, EngineConfig(model=str(path), threads=2, kv_cache_memory=1 << 22))


def test_all_calls_of_all_steps_are_there(found: Profile) -> None:
    # One step computes the prompts, and three more the other tokens.
    assert (found.steps, found.tokens) == (ANSWER, REQUESTS * ANSWER)
    calls = {row.part: row.calls for row in found.rows}
    assert {part: count for part, count in calls.items() if part not in PYTHON} == {
        "embed": ANSWER,
        "take_rows": ANSWER,
        "head": ANSWER,
        "argmax": ANSWER,
        **dict.fromkeys(
            ("qkv", "rotary, KV", "attention", "output", "gate, up", "down"), ANSWER * LAYERS
        ),
    }
    assert set(PYTHON) <= set(calls)
    assert calls["planning"] >= ANSWER
    assert len(found.layers) == 6 * LAYERS
    for layer in range(LAYERS):
        assert sum(row.calls for row in found.layers if row.layer == layer) == 6 * ANSWER


def test_every_moment_counts_once(found: Profile) -> None:
    assert all(row.seconds >= 0 for row in found.rows)
    assert sum(row.share for row in found.rows) == pytest.approx(1.0, abs=0.02)
    for row in found.rows:
        own = [layer.seconds for layer in found.layers if layer.part == row.part]
        assert not own or sum(own) == pytest.approx(row.seconds)


def test_costs_stand_beside_the_limits(found: Profile) -> None:
    rows = {row.part: row for row in found.rows}
    positions = REQUESTS * (PROMPT + ANSWER - 1)
    # Hidden size 48, 6 + 2 · 2 heads of 16, gate and up of 80.
    assert rows["qkv"].operations == 2 * positions * 48 * 160 * LAYERS
    assert rows["gate, up"].operations == 2 * positions * 48 * 160 * LAYERS
    assert rows["head"].operations == 2 * REQUESTS * ANSWER * 48 * VOCABULARY
    pairs = REQUESTS * sum(range(1, PROMPT + ANSWER))
    assert rows["attention"].operations == pairs * 6 * 16 * 4 * LAYERS
    for name, row in rows.items():
        if name in PYTHON:
            assert (row.limit_share, row.size_bytes) == (None, 0)
            continue
        assert row.gb_s == pytest.approx(row.size_bytes / row.seconds / 1e9)
        least = max(row.size_bytes / 1e9, row.operations / 2e9)
        # Layer by layer it may be a little more than all together.
        assert row.limit_share is not None
        assert least <= row.limit_share * row.seconds * 1.001 <= 1.001 * least * 2


def test_gaps_belong_to_what_went_on_in_them() -> None:
    recorder = Recorder(_at_s=10.0)
    recorder.told(Measured("embed", 11.0, 11.5, Cost(8, 0)))
    recorder._at_s = 11.5
    recorder.told(Measured("linear", 12.5, 13.5, Cost(8, 0)))
    recorder._at_s = 13.5
    recorder.told(Measured("argmax", 15.5, 16.0, Cost(8, 0)))
    seconds = {place.part: total.seconds for place, total in recorder.totals.items()}
    assert seconds == {
        "batch": 1.0,
        "embed": 0.5,
        "between ops": 1.0,
        "head": 1.0,
        "sampling": 2.0,
        "argmax": 0.5,
    }
    rows = {row.part: row for row in summary(recorder, 8.0, CEILINGS).rows}
    assert rows["rest"].seconds == pytest.approx(2.0)
    assert rows["head"].share == pytest.approx(1 / 8)
    assert Place("head") in recorder.totals


def test_the_picture_stands_alone(found: Profile) -> None:
    root = ET.fromstring(svg(found, "a <title> & more"))
    names = {element.tag.split("}")[1] for element in root.iter()}
    assert names == {"svg", "rect", "text", "title"}
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert "a <title> & more" in texts
    assert any(text == "attention" for text in texts)
    titles = [element.text or "" for element in root.iter() if element.tag.endswith("title")]
    assert sum("layer 2" in title for title in titles) == 6
    for rect in root.iter():
        for side in ("x", "y", "width", "height"):
            assert float(rect.get(side, "0")) >= 0
    page = drawn(found, "T", "a < b", ".html")
    assert page.startswith("<!doctype html>")
    assert "<pre>a &lt; b</pre>" in page
    assert "href" not in page
    assert "<script" not in page


def test_the_command(
    rng: np.random.Generator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("octavo.bench.profile.ceilings_for", lambda _: CEILINGS)
    path = save_tiny(rng, tmp_path, monkeypatch)
    items = uniform_workload(2, 5, 3, vocabulary=VOCABULARY)
    workload, out, record = (tmp_path / name for name in ("few.json", "p.svg", "p.json"))
    entries = [{"prompt_token_ids": list(i.prompt_token_ids), "output_len": 3} for i in items]
    workload.write_text(json.dumps(entries))
    given = ["--model", str(path), "--workload", str(workload), "--kv-cache-memory", "4MiB"]
    assert main(["profile", *given, "--out", str(out), "--json", str(record)]) == 0
    table = capsys.readouterr().out
    assert table.startswith("3 steps, 6 tokens, ")
    for name in ("planning", "between ops", "gate, up", "layer 2"):
        assert any(line.startswith(name) for line in table.splitlines()), name
    ET.fromstring(out.read_text())
    saved = json.loads(record.read_text())
    assert saved["benchmark"] == "profile"
    assert {row["part"] for row in saved["rows"]} >= {"qkv", "text", "argmax"}

    assert main(["profile", *given, "--out", str(tmp_path / "p.png")]) == 2
    assert "must end in .svg or .html" in capsys.readouterr().err
