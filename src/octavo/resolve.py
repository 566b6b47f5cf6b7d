"""Every default is decided here, and only here, from what was asked, the model and the machine.

    free memory of machine or cgroup                               (`read_machine`)
    └── × memory_fraction = budget
        ├── weights, as packed
        ├── headroom: activations of a full step, logits, the interpreter
        ├── pool: blocks of equal size; a token costs a share of one in each layer group
        └── swap space: slots of one block each

`resolve` is pure. What it accepts can run: the limits agree with each other and one request of
the maximum length fits into the pool, alone.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.config import RULES, EngineConfig, KVCacheDtype, Quantization, Sources
from octavo.core.budget import LEAST_DRAWS, Ceilings, Limits
from octavo.core.windows import Windows, blocks_for, longest_sequence
from octavo.errors import ConfigError
from octavo.units import MIB, human_bytes

DEFAULT_NUM_SEQS = 64
DEFAULT_BATCHED_TOKENS = 512
DEFAULT_DRAFTS = 8
DEFAULT_QUANTIZATION: Quantization = "none"
DEFAULT_KV_CACHE_DTYPE: KVCacheDtype = "bfloat16"
SWAP_SHARE = 8
"""One part in so many of the KV memory is swap space, unless asked otherwise."""
CORE_FLOPS = 2e10
"""What one core is guessed to compute a second, before the first step has shown it."""
LEAST_STALL_S = 60.0
STALL_STEPS = 20
"""An engine is stuck when a step takes so many times as long as the largest should."""
INTERPRETER_BYTES = 96 * MIB
"""What Python, the libraries and the tokenizer hold beside the arrays that are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a loaded model says of itself.

    `weights_bytes` as packed; `kv_token_bytes` the KV of one token in one layer group; `windows`
    how many positions each of those sees, None for all; `qkv_width` the queries, keys and values of
    one token, as floats.
    """

    weights_bytes: int
    kv_token_bytes: int
    windows: Windows
    max_context: int
    vocab_size: int
    hidden_size: int
    ffn_size: int
    qkv_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Memory that is free, and cores that may be used, inside the cgroup of this process."""

    free_bytes: int
    cores: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What the engine is built from. Every value is decided."""

    model: str
    served_model_name: str
    blocks: int
    block_size: int
    block_bytes: int
    swap_blocks: int
    windows: Windows
    max_model_len: int
    limits: Limits
    ceilings: Ceilings
    enable_prefix_caching: bool
    quantization: Quantization
    kv_cache_dtype: KVCacheDtype
    threads: int
    stall_s: float
    isa: str | None
    seed: int | None
    free_bytes: int
    weights_bytes: int
    headroom_bytes: int

    @property
    def pool_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def swap_bytes(self) -> int:
        return self.swap_blocks * self.block_bytes

    @property
    def pool_tokens(self) -> int:
        """Tokens of one sequence whose KV fits at once."""
        most = self.blocks * self.block_size
        return longest_sequence(self.windows, self.block_size, self.blocks, most)

    @property
    def token_bytes(self) -> int:
        """What a token costs while it is in every window."""
        return self.block_bytes * len(self.windows) // self.block_size

    @property
    def full_requests(self) -> int:
        """Requests of the maximum length that fit at once."""
        return self.blocks // blocks_for(self.windows, self.max_model_len, self.block_size)


def quantization_of(config: EngineConfig) -> Quantization:
    """The form of the weights, which `ModelFacts.weights_bytes` depends on."""
    return config.quantization or DEFAULT_QUANTIZATION


def kv_cache_dtype_of(config: EngineConfig) -> KVCacheDtype:
    """The numbers of the KV cache, which `ModelFacts.kv_token_bytes` depends on."""
    return config.kv_cache_dtype or DEFAULT_KV_CACHE_DTYPE


def resolve(config: EngineConfig, model: ModelFacts, machine: MachineFacts) -> Resolved:
    """Decide what was left open and check all limits against each other.

    Raises   ConfigError: the settings contradict each other, the model or the machine; the
             message says which to change.
    """
    sequences, tokens = _step_limits(config)
    most_sequences, most_tokens = _step_ceilings(config, sequences, tokens)
    draws = max(most_sequences, min(LEAST_DRAWS, most_tokens))
    headroom_bytes = _headroom_bytes(model, draws, most_tokens)
    block_bytes = model.kv_token_bytes * config.block_size
    fixed_bytes = model.weights_bytes + headroom_bytes
    blocks, swap_blocks = _kv_blocks(config, machine, fixed_bytes, block_bytes)
    max_model_len = _max_model_len(config, model, blocks, block_bytes)
    threads = config.threads or machine.cores
    return Resolved(
        model=config.model,
        served_model_name=config.served_model_name or config.model,
        blocks=blocks,
        block_size=config.block_size,
        block_bytes=block_bytes,
        swap_blocks=swap_blocks,
        windows=model.windows,
        max_model_len=max_model_len,
        limits=Limits(
            # A running sequence holds a block of every group at least.
            sequences=min(sequences, blocks // len(model.windows)),
            tokens=tokens,
            waiting=config.max_queued_requests,
            waiting_tokens=config.max_queued_tokens,
            waiting_s=config.max_queue_time,
            watermark_blocks=int(config.watermark * blocks),
            admission=config.admission,
            pinned_blocks=int(config.pin_quota * blocks) if config.enable_prefix_caching else 0,
            policy=config.policy,
            aging_s=config.aging,
            drafts=_drafts(config),
            ttft_target_s=config.ttft_target,
            tpot_target_s=config.tpot_target,
            preemption=config.preemption,
        ),
        ceilings=Ceilings(
            sequences=min(most_sequences, blocks // len(model.windows)),
            tokens=most_tokens,
            watermark_blocks=blocks,
        ),
        enable_prefix_caching=config.enable_prefix_caching,
        quantization=quantization_of(config),
        kv_cache_dtype=kv_cache_dtype_of(config),
        threads=threads,
        stall_s=_stall_s(config, model.weights_bytes * most_tokens / threads),
        isa=config.isa,
        seed=config.seed,
        free_bytes=machine.free_bytes,
        weights_bytes=model.weights_bytes,
        headroom_bytes=headroom_bytes,
    )


def with_draft(model: ModelFacts, draft: ModelFacts) -> ModelFacts:
    """A model and its draft model, as sizing sees them: a block has the KV of both, and each has
    buffers for a full step."""
    return replace(
        model,
        weights_bytes=model.weights_bytes + draft.weights_bytes,
        kv_token_bytes=model.kv_token_bytes + draft.kv_token_bytes,
        vocab_size=model.vocab_size + draft.vocab_size,
        hidden_size=model.hidden_size + draft.hidden_size,
        ffn_size=model.ffn_size + draft.ffn_size,
        qkv_width=model.qkv_width + draft.qkv_width,
    )


def _drafts(config: EngineConfig) -> int:
    asked = config.max_draft_tokens
    if asked is None:
        return DEFAULT_DRAFTS
    if asked == 0 and config.draft_model is not None:
        raise ConfigError(
            f"draft_model is {config.draft_model} and max_draft_tokens is 0: it would never guess;"
            " raise max_draft_tokens or leave draft_model out"
        )
    return asked


def _stall_s(config: EngineConfig, core_flop: float) -> float:
    """After how long without a step an engine is stuck. `core_flop` is the work of the largest step
    for one core: a token takes two operations a weight, which has two bytes."""
    if config.stall_timeout is not None:
        return config.stall_timeout
    return max(LEAST_STALL_S, STALL_STEPS * core_flop / CORE_FLOPS)


def boot_lines(resolved: Resolved) -> tuple[str, ...]:
    """What an operator should know of the memory and the limits, for the log at start."""
    limits = resolved.limits
    return (
        f"memory: {human_bytes(resolved.free_bytes)} free; "
        f"weights {human_bytes(resolved.weights_bytes)}"
        f"{_unusual(resolved.quantization, DEFAULT_QUANTIZATION)}, "
        f"headroom {human_bytes(resolved.headroom_bytes)}, "
        f"KV pool {human_bytes(resolved.pool_bytes)}"
        f"{_unusual(resolved.kv_cache_dtype, DEFAULT_KV_CACHE_DTYPE)}, "
        f"swap space {human_bytes(resolved.swap_bytes)}",
        f"KV pool: {resolved.blocks:,} blocks of {resolved.block_size} tokens = "
        f"{resolved.pool_tokens:,} tokens; one token costs {human_bytes(resolved.token_bytes)}",
        f"limits: {_counted(resolved.full_requests, 'request')} of the maximum length "
        f"{resolved.max_model_len:,} fit at once; at most {_counted(limits.sequences, 'sequence')} "
        f"at a time, {limits.tokens:,} tokens a step, {_counted(resolved.threads, 'thread')}",
    )


def _unusual(form: str, usual: str) -> str:
    return "" if form == usual else f" ({form})"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def settings_line(config: EngineConfig, sources: Sources, resolved: Resolved) -> str:
    """Every setting as it holds now, and where it came from."""
    decided: Mapping[str, object] = {
        "served_model_name": resolved.served_model_name,
        "max_model_len": resolved.max_model_len,
        "quantization": resolved.quantization,
        "kv_cache_dtype": resolved.kv_cache_dtype,
        "max_num_seqs": resolved.limits.sequences,
        "max_num_batched_tokens": resolved.limits.tokens,
        "max_draft_tokens": resolved.limits.drafts,
        "kv_cache_memory": resolved.pool_bytes,
        "swap_space": resolved.swap_bytes,
        "threads": resolved.threads,
        "stall_timeout": resolved.stall_s,
    }
    parts = []
    for name, source in sources.items():
        asked = getattr(config, name)
        value = decided.get(name, asked)
        origin = "decided" if asked is None and value is not None else source
        note = f", asked {_shown(name, asked)}" if asked is not None and asked != value else ""
        parts.append(f"{name}={_shown(name, value)} ({origin}{note})")
    return "settings: " + ", ".join(parts)


def _shown(name: str, value: object) -> str:
    if value is None or value == ():
        return "unset"
    if RULES[name].secret:
        return "***"
    if isinstance(value, tuple):
        return ",".join(value)
    is_size = RULES[name].kind == "size"
    return human_bytes(value) if is_size and isinstance(value, int) else str(value)


def _step_limits(config: EngineConfig) -> tuple[int, int]:
    """Sequences and tokens of a step. Each running sequence needs a token a step to go on."""
    sequences, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if sequences is None:
        sequences = min(DEFAULT_NUM_SEQS, tokens or DEFAULT_NUM_SEQS)
    if tokens is None:
        tokens = max(DEFAULT_BATCHED_TOKENS, sequences)
    if tokens < sequences:
        raise ConfigError(
            f"max_num_batched_tokens {tokens} is less than max_num_seqs {sequences}: each running "
            f"sequence takes a token a step; raise the first or lower the second"
        )
    return sequences, tokens


def _step_ceilings(config: EngineConfig, sequences: int, tokens: int) -> tuple[int, int]:
    """How far these may be raised while the engine runs: to twice what was left to us to decide.

    What was asked for is the most: who sets it low saves the memory of a larger step.
    """
    most_tokens = tokens if config.max_num_batched_tokens is not None else 2 * tokens
    most_sequences = sequences if config.max_num_seqs is not None else 2 * sequences
    return min(most_sequences, most_tokens), most_tokens


def _headroom_bytes(model: ModelFacts, sequences: int, tokens: int) -> int:
    """Memory of one full step beside weights and KV.

    Per token in float32: the residual stream and two of its size around it, queries, keys,
    values and attention output, gate and up with their product. Per sequence: its logits, and
    two copies of them while it is sampled.
    """
    a_token = 3 * model.hidden_size + 2 * model.qkv_width + 3 * model.ffn_size
    a_sequence = 3 * model.vocab_size
    return INTERPRETER_BYTES + 4 * (tokens * a_token + sequences * a_sequence)


def _kv_blocks(
    config: EngineConfig, machine: MachineFacts, fixed_bytes: int, block_bytes: int
) -> tuple[int, int]:
    """Blocks of the pool and slots of the swap space, beside `fixed_bytes` of everything else."""
    asked = config.swap_space
    if config.preemption == "swap" and asked == 0:
        raise ConfigError("preemption swap needs swap space, and swap_space is 0; raise it")
    if config.kv_cache_memory is not None:
        return _asked_blocks(config, config.kv_cache_memory, machine, fixed_bytes, block_bytes)
    left_bytes = int(config.memory_fraction * machine.free_bytes) - fixed_bytes
    if left_bytes - (asked or 0) <= 0:
        lower = f"lower swap_space {human_bytes(asked)}, " if asked else ""
        raise ConfigError(
            f"no memory is left for the KV cache: {config.memory_fraction:g} of "
            f"{human_bytes(machine.free_bytes)} free, weights and activations take "
            f"{human_bytes(fixed_bytes)}; {lower}raise memory_fraction, lower max_num_seqs or "
            "max_num_batched_tokens, or take a smaller model"
        )
    swap_bytes = _default_swap(config, left_bytes) if asked is None else asked
    swap_blocks = swap_bytes // block_bytes
    return (left_bytes - swap_blocks * block_bytes) // block_bytes, swap_blocks


def _asked_blocks(
    config: EngineConfig,
    pool_bytes: int,
    machine: MachineFacts,
    fixed_bytes: int,
    block_bytes: int,
) -> tuple[int, int]:
    """As asked, if the machine has it; swap space that nobody asked for takes what is left."""
    left_bytes = machine.free_bytes - fixed_bytes - pool_bytes
    if left_bytes < (config.swap_space or 0):
        beside = f", swap_space {human_bytes(config.swap_space)}" if config.swap_space else ""
        raise ConfigError(
            f"kv_cache_memory {human_bytes(pool_bytes)} is not there: "
            f"{human_bytes(machine.free_bytes)} are free, weights and activations take "
            f"{human_bytes(fixed_bytes)}{beside}; lower it"
        )
    swap_bytes = config.swap_space
    if swap_bytes is None:
        swap_bytes = min(_default_swap(config, pool_bytes), left_bytes)
    return pool_bytes // block_bytes, swap_bytes // block_bytes


def _default_swap(config: EngineConfig, kv_bytes: int) -> int:
    return 0 if config.preemption == "recompute" else kv_bytes // SWAP_SHARE


def _max_model_len(config: EngineConfig, model: ModelFacts, blocks: int, block_bytes: int) -> int:
    """The longest prompt and answer that the model knows and the pool holds."""
    size, windows = config.block_size, model.windows
    fits = longest_sequence(windows, size, blocks, max(model.max_context, blocks * size))
    if fits == 0:
        raise ConfigError(
            f"the KV cache is smaller than one block of {size} tokens "
            f"({human_bytes(block_bytes * len(windows))}); raise kv_cache_memory or memory_fraction"
        )
    asked = config.max_model_len
    if asked is None:
        return min(model.max_context, fits)
    if asked > model.max_context:
        raise ConfigError(
            f"max_model_len {asked} is more than the {model.max_context} tokens the model knows; "
            "lower it"
        )
    if asked > fits:
        needed_bytes = blocks_for(windows, asked, size) * block_bytes
        raise ConfigError(
            f"max_model_len {asked} does not fit: the KV cache holds {fits} tokens; lower it to "
            f"that, or give kv_cache_memory {needed_bytes} ({human_bytes(needed_bytes)})"
        )
    return asked


# --- the machine ---------------------------------------------------------------------------------


def read_machine(root: Path = Path("/")) -> MachineFacts:
    """Free memory and usable cores, by the tightest of machine, cgroup and CPU affinity.

    `root` is where `proc` and `sys/fs/cgroup` are looked for.
    """
    free_bytes = min([_available_bytes(root), *_cgroup_free_bytes(root)])
    cores = min([len(os.sched_getaffinity(0)), *_cgroup_cores(root)])
    return MachineFacts(free_bytes=max(0, free_bytes), cores=max(1, cores))


def _available_bytes(root: Path) -> int:
    """Memory that can be had without swapping.

    Source   proc_meminfo(5), MemAvailable.
    """
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise ConfigError("cannot tell the free memory: /proc/meminfo has no MemAvailable line")


@dataclass(frozen=True, slots=True)
class _MemoryFiles:
    """The names of the same three facts in both versions of cgroups."""

    limit: str
    usage: str
    reclaimable: str


_MEMORY_V1 = _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_MEMORY_V2 = _MemoryFiles("memory.max", "memory.current", "inactive_file")


def _cgroup_free_bytes(root: Path) -> list[int]:
    """What each cgroup above this process still grants; file cache it can drop counts as free.

    Source   Linux kernel documentation, cgroup-v1/memory and cgroup-v2.
    """
    free = []
    for version, folder in _cgroup_folders(root, "memory"):
        files = _MEMORY_V1 if version == 1 else _MEMORY_V2
        limit, usage = _number(folder / files.limit), _number(folder / files.usage)
        if limit is not None and usage is not None:
            dropped = _fields(folder / "memory.stat").get(files.reclaimable, 0)
            free.append(limit - usage + dropped)
    return free


def _cgroup_cores(root: Path) -> list[int]:
    """Whole cores that the CPU quotas above this process are worth."""
    cores = []
    for version, folder in _cgroup_folders(root, "cpu"):
        if version == 1:
            quota, period = (
                _number(folder / "cpu.cfs_quota_us"),
                _number(folder / "cpu.cfs_period_us"),
            )
        else:
            quota, period = _pair(folder / "cpu.max")
        if quota is not None and period and quota > 0:
            cores.append(quota // period)
    return cores


def _cgroup_folders(root: Path, controller: str) -> list[tuple[int, Path]]:
    """The cgroups of this process for one controller, from its own to the topmost.

    In a container the path in /proc/self/cgroup may be the host's; what does not exist is left out.
    """
    mount = root / "sys/fs/cgroup"
    folders = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, base = 2, mount
        elif controller in controllers.split(","):
            version, base = 1, mount / controller
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        places = [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
        folders += [(version, place) for place in places if place.is_dir()]
    return folders


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _pair(file: Path) -> tuple[int | None, int | None]:
    """Quota and period of cpu.max; `max` is no quota."""
    words = _text(file).split()
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None, None
    return int(words[0]), int(words[1])


def _fields(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
