"""Defaults and limits: as tables, as a cross product, and against made-up machines."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config import EngineConfig, load_config
from octavo.core.windows import blocks_for
from octavo.errors import ConfigError
from octavo.resolve import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_NUM_SEQS,
    MachineFacts,
    ModelFacts,
    Resolved,
    boot_lines,
    read_machine,
    resolve,
    settings_line,
)
from octavo.units import GIB, MIB

MODEL = ModelFacts(
    weights_bytes=256 * MIB,
    kv_token_bytes=23_040,
    windows=(None,),
    max_context=8192,
    vocab_size=49_152,
    hidden_size=576,
    ffn_size=1536,
    qkv_width=960,
)
MACHINE = MachineFacts(free_bytes=16 * GIB, cores=2)


def test_all_defaults() -> None:
    resolved = resolve(EngineConfig(), MODEL, MACHINE)
    assert resolved.max_model_len == 8192
    assert resolved.limits.sequences == DEFAULT_NUM_SEQS
    assert resolved.limits.tokens == DEFAULT_BATCHED_TOKENS
    assert resolved.threads == 2
    assert resolved.quantization == "none"
    assert resolved.kv_cache_dtype == "bfloat16"
    assert resolved.served_model_name == "demo"
    assert resolved.block_bytes == 16 * 23_040
    assert resolved.token_bytes == 23_040
    assert resolved.pool_tokens == resolved.blocks * 16
    spent = resolved.weights_bytes + resolved.headroom_bytes + resolved.pool_bytes
    spent += resolved.swap_bytes
    assert 0 <= 8 * GIB - spent < resolved.block_bytes


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"max_num_seqs": 1000}, {"sequences": 1000, "tokens": 1000}),
        ({"max_num_seqs": 3}, {"sequences": 3, "tokens": DEFAULT_BATCHED_TOKENS}),
        ({"max_num_batched_tokens": 7}, {"sequences": 7, "tokens": 7}),
        ({"max_num_batched_tokens": 9999}, {"sequences": DEFAULT_NUM_SEQS, "tokens": 9999}),
        ({"kv_cache_memory": 2 * 16 * 23_040}, {"sequences": 2, "watermark_blocks": 0}),
        ({"max_queued_requests": 5}, {"waiting": 5}),
        ({}, {"admission": "full"}),
        ({"admission": "chunked"}, {"admission": "chunked"}),
        ({}, {"preemption": "auto"}),
        ({"preemption": "recompute"}, {"preemption": "recompute"}),
        ({"max_queued_tokens": 5}, {"waiting_tokens": 5}),
        ({}, {"waiting_s": None}),
        ({"max_queue_time": 2.5}, {"waiting_s": 2.5}),
        ({}, {"policy": "priority", "aging_s": 300}),
        ({"policy": "fcfs", "aging": 0.5}, {"policy": "fcfs", "aging_s": 0.5}),
        ({"ttft_target": 2, "tpot_target": 0.1}, {"ttft_target_s": 2, "tpot_target_s": 0.1}),
        ({"kv_cache_memory": 1000 * 16 * 23_040, "watermark": 0.1}, {"watermark_blocks": 100}),
        ({"kv_cache_memory": 1000 * 16 * 23_040, "pin_quota": 0.5}, {"pinned_blocks": 500}),
    ],
)
def test_limits(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    limits = resolve(EngineConfig(**asked), MODEL, MACHINE).limits
    assert {name: getattr(limits, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("asked", "length"),
    [
        ({}, 8192),
        ({"max_model_len": 100}, 100),
        ({"kv_cache_memory": 5 * 16 * 23_040}, 80),
        ({"kv_cache_memory": 5 * 16 * 23_040, "max_model_len": 80}, 80),
        ({"kv_cache_memory": 16 * 23_040}, 16),
    ],
)
def test_the_longest_request(asked: dict[str, int], length: int) -> None:
    assert resolve(EngineConfig(**asked), MODEL, MACHINE).max_model_len == length


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"max_model_len": 8193}, "more than the 8192 tokens the model knows"),
        ({"kv_cache_memory": 5 * 16 * 23_040, "max_model_len": 81}, "holds 80 tokens"),
        ({"kv_cache_memory": 16 * 23_040 - 1}, "smaller than one block"),
        ({"kv_cache_memory": 16 * GIB}, "lower it"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "less than max_num_seqs 8"),
        ({"memory_fraction": 0.02}, "raise memory_fraction"),
        ({"max_num_seqs": 65536}, "lower max_num_seqs"),
        ({"swap_space": 8 * GIB}, "lower swap_space 8.0 GiB"),
        ({"kv_cache_memory": GIB, "swap_space": 15 * GIB}, "swap_space 15.0 GiB; lower it"),
        ({"preemption": "swap", "swap_space": 0}, "swap_space is 0; raise it"),
    ],
)
def test_what_is_refused_says_what_to_change(asked: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(EngineConfig(**asked), MODEL, MACHINE)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


BLOCK = 16 * 23_040


@pytest.mark.parametrize(
    ("asked", "slots"),
    [
        ({"kv_cache_memory": 160 * BLOCK}, 20),
        ({"kv_cache_memory": 160 * BLOCK, "preemption": "recompute"}, 0),
        ({"kv_cache_memory": 160 * BLOCK, "swap_space": 0}, 0),
        ({"kv_cache_memory": 160 * BLOCK, "swap_space": 3 * BLOCK - 1}, 2),
        ({"kv_cache_memory": 7 * BLOCK}, 0),
        ({"swap_space": 100 * BLOCK}, 100),
        ({"swap_space": 5 * BLOCK, "preemption": "recompute"}, 5),
    ],
)
def test_swap_space(asked: dict[str, Any], slots: int) -> None:
    """It is part of the memory plan: what it takes the pool has not, or is there beside it."""
    resolved = resolve(EngineConfig(**asked), MODEL, MACHINE)
    assert resolved.swap_blocks == slots
    without = resolve(EngineConfig(**(asked | {"swap_space": 0})), MODEL, MACHINE)
    given = asked.get("kv_cache_memory") is not None
    assert without.blocks - resolved.blocks == (0 if given else slots)


def test_swap_space_nobody_asked_for_takes_only_what_is_left() -> None:
    config = EngineConfig(kv_cache_memory=15 * GIB)
    machine = replace(MACHINE, free_bytes=15 * GIB + 600 * MIB)
    resolved = resolve(config, MODEL, machine)
    spent = resolved.weights_bytes + resolved.headroom_bytes + 15 * GIB + resolved.swap_bytes
    assert 0 <= machine.free_bytes - spent < BLOCK


def test_groups_share_the_pool() -> None:
    config = EngineConfig(kv_cache_memory=10 * 16 * 23_040)
    resolved = resolve(config, replace(MODEL, windows=(None,) * 3), MACHINE)
    assert (resolved.blocks, resolved.pool_tokens, resolved.max_model_len) == (10, 48, 48)
    assert resolved.token_bytes == 3 * 23_040
    assert resolved.full_requests == 1


def runs(resolved: Resolved) -> bool:
    """A request of the maximum length can be served, and every limit leaves room to go on."""
    needed = blocks_for(resolved.windows, resolved.max_model_len, resolved.block_size)
    return (
        needed <= resolved.blocks
        and resolved.full_requests >= 1
        and resolved.max_model_len >= 2
        and 1 <= resolved.limits.sequences <= resolved.limits.tokens
        and 0 <= resolved.limits.watermark_blocks < resolved.blocks
        and resolved.threads >= 1
    )


def test_every_mix_of_settings_is_refused_or_runs(rng: np.random.Generator) -> None:
    """Odd settings in all orders: two limits that meet in one place only have killed loops."""
    block = 16 * MODEL.kv_token_bytes
    mixes = itertools.product(
        (None, 2, 80, int(rng.integers(2, 8192))),
        (None, 1, 96, int(rng.integers(1, 5000))),
        (None, 1, 64, int(rng.integers(1, 5000))),
        (16, 128),
        (None, block, 7 * block + 1, int(rng.integers(1, 4000)) * block),
        (0.0, 0.5),
        ((None,), (None,) * 3, (512, None, 512), (1024,)),
    )
    accepted = refused = 0
    for length, sequences, tokens, size, memory, watermark, windows in mixes:
        config = EngineConfig(
            max_model_len=length,
            max_num_seqs=sequences,
            max_num_batched_tokens=tokens,
            block_size=size,
            kv_cache_memory=memory,
            watermark=watermark,
        )
        try:
            resolved = resolve(config, replace(MODEL, windows=windows), MACHINE)
        except ConfigError:
            refused += 1
            continue
        accepted += 1
        assert runs(resolved), config
    assert accepted > 100
    assert refused > 100


def test_the_boot_log() -> None:
    config = EngineConfig(kv_cache_memory=100 * 16 * 23_040, max_model_len=500)
    text = "\n".join(boot_lines(resolve(config, MODEL, MACHINE)))
    for expected in (
        "100 blocks of 16 tokens = 1,600 tokens",
        "one token costs 22.5 KiB",
        "3 requests of the maximum length 500 fit",
        "weights 256.0 MiB",
        "swap space 4.2 MiB",
    ):
        assert expected in text
    full = replace(config, max_model_len=1000)
    assert (
        "1 request of the maximum length 1,000 fit" in boot_lines(resolve(full, MODEL, MACHINE))[2]
    )


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "KV pool 35.2 MiB, swap"),
        ({}, "weights 256.0 MiB, headroom"),
        ({"quantization": "int8"}, "KV pool 35.2 MiB, swap"),
        ({"quantization": "int8"}, "weights 256.0 MiB (int8), headroom"),
        ({"kv_cache_dtype": "int8"}, "KV pool 35.2 MiB (int8), swap"),
        ({"kv_cache_dtype": "bfloat16"}, "KV pool 35.2 MiB, swap"),
    ],
)
def test_the_boot_log_names_unusual_forms(asked: dict[str, Any], told: str) -> None:
    config = EngineConfig(kv_cache_memory=100 * 16 * 23_040, max_model_len=500, **asked)
    assert told in boot_lines(resolve(config, MODEL, MACHINE))[0]


def test_the_printed_settings_say_where_values_came_from() -> None:
    config, sources = load_config(
        {"max_num_seqs": "1000", "kv_cache_memory": str(10 * 16 * 23_040)},
        {"OCTAVO_SEED": "9", "OCTAVO_API_KEY": "sk-secret,sk-secret2"},
    )
    line = settings_line(config, sources, resolve(config, MODEL, MACHINE))
    assert "\n" not in line
    assert "model=demo (default)" in line
    assert "seed=9 (environment OCTAVO_SEED)" in line
    assert "max_model_len=160 (decided)" in line
    assert "kv_cache_dtype=bfloat16 (decided)" in line
    assert "max_num_seqs=10 (flag --max-num-seqs, asked 1000)" in line
    assert "max_queued_requests=unset (default)" in line
    assert "kv_cache_memory=3.5 MiB (flag --kv-cache-memory)" in line
    assert "api_key=*** (environment OCTAVO_API_KEY)" in line
    assert "admin_api_key=unset (default)" in line
    assert "secret" not in line


# --- machines ------------------------------------------------------------------------------------


def machine(root: Path, files: dict[str, str], available_kib: int = 10_000_000) -> MachineFacts:
    files = {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {available_kib} kB\n",
        **files,
    }
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return read_machine(root)


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(32)))


@pytest.mark.usefixtures("many_cores")
def test_a_machine_without_cgroups(tmp_path: Path) -> None:
    facts = machine(tmp_path, {})
    assert facts == MachineFacts(free_bytes=10_240_000_000, cores=32)


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("where", ["pod/box", "pod", ""])
def test_the_tightest_cgroup_counts(tmp_path: Path, where: str) -> None:
    base = "sys/fs/cgroup"
    files = {f"{base}/pod/box/memory.max": "max\n", "proc/self/cgroup": "0::/pod/box\n"}
    folder = f"{base}/{where}".rstrip("/")
    files |= {
        f"{folder}/memory.max": f"{3 * GIB}\n",
        f"{folder}/memory.current": f"{2 * GIB}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        f"{folder}/cpu.max": "350000 100000\n",
    }
    assert machine(tmp_path, files) == MachineFacts(free_bytes=3 * GIB // 2, cores=3)


@pytest.mark.usefixtures("many_cores")
def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/box\n3:cpu,cpuacct:/\n0::/\n",
        f"{base}/memory/box/memory.limit_in_bytes": f"{4 * GIB}\n",
        f"{base}/memory/box/memory.usage_in_bytes": f"{GIB}\n",
        f"{base}/memory/box/memory.stat": "total_inactive_file 1000\n",
        f"{base}/memory/memory.limit_in_bytes": "9223372036854771712\n",
        f"{base}/memory/memory.usage_in_bytes": "5\n",
        f"{base}/cpu/cpu.cfs_quota_us": "50000\n",
        f"{base}/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert machine(tmp_path, files) == MachineFacts(free_bytes=3 * GIB + 1000, cores=1)


@pytest.mark.usefixtures("many_cores")
def test_a_container_that_sees_the_path_of_its_host(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../../docker/abc\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": "0\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
    }
    assert machine(tmp_path, files) == MachineFacts(free_bytes=GIB, cores=32)


def test_this_machine() -> None:
    facts = read_machine()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**20 < facts.free_bytes <= physical
    assert 1 <= facts.cores <= len(os.sched_getaffinity(0))


def test_this_machine_with_one_core_allowed() -> None:
    """In a process of its own: all threads of this one would be bound."""
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from octavo.resolve import read_machine; print(read_machine().cores)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
