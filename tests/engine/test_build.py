"""What an engine is built from follows from the settings, before a weight is read and after."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.bench.tiny import save_tiny

from octavo.config import EngineConfig
from octavo.engine.build import Built, build, facts_of
from octavo.models.loader import open_model
from octavo.resolve import MachineFacts, resolve
from octavo.units import GIB, MIB

MACHINE = MachineFacts(free_bytes=16 * GIB, cores=2)


@pytest.mark.parametrize("swap_space", [0, 256 * MIB])
def test_int8_holds_more_tokens_in_the_same_memory(demo_model_path: Path, swap_space: int) -> None:
    """Heads of 64: 4 + 64 bytes in place of 128."""
    opened = open_model(demo_model_path)
    plain, small = (
        resolve(config, facts_of(opened, config), MACHINE)
        for config in (
            EngineConfig(kv_cache_memory=GIB, swap_space=swap_space, kv_cache_dtype=dtype)
            for dtype in (None, "int8")
        )
    )
    assert (plain.kv_cache_dtype, small.kv_cache_dtype) == ("bfloat16", "int8")
    assert plain.token_bytes == 30 * 2 * 3 * 128
    assert small.token_bytes == 30 * 2 * 3 * 68
    assert small.pool_tokens / plain.pool_tokens == pytest.approx(128 / 68, rel=1e-3)
    assert small.swap_blocks == pytest.approx(plain.swap_blocks * 128 / 68, abs=1)
    assert small.weights_bytes == plain.weights_bytes


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_token_costs_the_same_in_blocks_of_any_size(
    demo_model_path: Path, dtype: Any, block_size: int
) -> None:
    config = EngineConfig(kv_cache_dtype=dtype, block_size=block_size)
    facts = facts_of(open_model(demo_model_path), config)
    assert facts.kv_token_bytes == 30 * 2 * 3 * (128 if dtype == "bfloat16" else 68)


@pytest.fixture
def tiny(rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return save_tiny(rng, tmp_path, monkeypatch)


def built(tiny: Path, name: str, **settings: Any) -> tuple[Built, dict[str, Any]]:
    """An engine, and the setup that its journal tells."""
    journal = tiny.parent / f"{name}.journal"
    config = EngineConfig(
        model=str(tiny), threads=1, kv_cache_memory=MIB, journal=str(journal), **settings
    )
    found = build(config)
    return found, json.loads(journal.read_text().splitlines()[0])["setup"]


def layout_of(tiny: Path, name: str, **settings: Any) -> str:
    layout: str = built(tiny, name, **settings)[1]["context"]["layout"]
    return layout


def test_what_kv_depends_on_is_in_its_context(tiny: Path) -> None:
    """Each of these makes other bits: blocks of one must not be found by the other."""
    settings: dict[str, dict[str, Any]] = {
        "usual": {},
        "kv": {"kv_cache_dtype": "int8"},
        "weights": {"quantization": "int8"},
        "both": {"kv_cache_dtype": "int8", "quantization": "int8"},
        "size": {"block_size": 32},
    }
    layouts = [layout_of(tiny, name, **given) for name, given in settings.items()]
    assert len(set(layouts)) == len(settings)
    assert layout_of(tiny, "named", kv_cache_dtype="bfloat16") == layouts[0]


def test_pool_and_swap_space_hold_blocks_of_int8(tiny: Path) -> None:
    """Heads of 16, so 20 bytes in place of 32, in 3 layers with 2 of them."""
    found, setup = built(tiny, "kv", kv_cache_dtype="int8", swap_space=MIB)
    block_bytes = 16 * 3 * 2 * 2 * (4 + 16)
    assert found.resolved.block_bytes == setup["swap"]["block_bytes"] == block_bytes
    assert found.resolved.blocks == setup["blocks"] == MIB // block_bytes
    assert setup["swap"]["host_blocks"] == MIB // block_bytes
