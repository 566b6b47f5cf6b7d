"""From settings to a running engine: each part gets its own small record, made here."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo import __version__
from octavo.config import EngineConfig
from octavo.core.calls import CoreSetup
from octavo.core.plan import Runner
from octavo.core.prefix_cache import Context
from octavo.core.setup import scheduler_of
from octavo.core.swap import SwapSetup
from octavo.engine.door import Door
from octavo.engine.engine import Engine, Observer
from octavo.models.loader import OpenModel, load_model, open_model
from octavo.models.reference import resolve_reference
from octavo.models.spec import ModelSpec
from octavo.models.weights.gguf import GGUFFile
from octavo.models.weights.pack import Weights
from octavo.observe.journal import Journal
from octavo.ops.api import Ops
from octavo.ops.native import NativeOps
from octavo.resolve import (
    CORE_FLOPS,
    ModelFacts,
    Resolved,
    boot_lines,
    kv_cache_dtype_of,
    quantization_of,
    read_machine,
    resolve,
)
from octavo.runtime.movers import Mover, measured_bytes_per_s
from octavo.runtime.runner import ModelRunner
from octavo.runtime.storage import KVStorage
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is there and opened, and every default decided; no weight is read yet."""

    path: Path
    opened: OpenModel
    resolved: Resolved

    def door(self, seed: int | None) -> Door:
        """The door in front of an engine of this model."""
        return Door(
            tokenizer_of(self.path, self.opened),
            max_model_len=self.resolved.max_model_len,
            vocab_size=self.opened.spec.vocab_size,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class Built:
    """An engine that can take requests, the door in front of it, and how it was sized."""

    engine: Engine
    door: Door
    resolved: Resolved
    spec: ModelSpec
    weights: Weights


def prepare(config: EngineConfig, *, progress: bool = True) -> Prepared:
    """Fetch the model if needed, open it, and size the pool.

    Raises   SetupError of any kind: the message says what to change.
    """
    path = resolve_reference(config.model, progress=progress)
    opened = open_model(path)
    resolved = resolve(config, facts_of(opened, config), read_machine())
    for line in boot_lines(resolved):
        logger.info("%s", line)
    return Prepared(path, opened, resolved)


def build(
    config: EngineConfig,
    *,
    progress: bool = True,
    slab_tokens: int | None = None,
    observers: Sequence[Observer] = (),
    wrap: Callable[[Ops], Ops] | None = None,
) -> Built:
    """An engine in this process, with its door.

    With `slab_tokens` each sequence gets a slab of that many tokens and shares nothing: a baseline.
    `wrap` puts something around the ops, to take their time say.

    Raises   SetupError of any kind: the message says what to change.
    """
    prepared = prepare(config, progress=progress)
    engine, weights = build_engine(
        prepared.opened,
        config,
        prepared.resolved,
        slab_tokens=slab_tokens,
        observers=observers,
        wrap=wrap,
    )
    return Built(
        engine=engine,
        door=prepared.door(config.seed),
        resolved=prepared.resolved,
        spec=prepared.opened.spec,
        weights=weights,
    )


def build_engine(
    opened: OpenModel,
    config: EngineConfig,
    resolved: Resolved,
    *,
    slab_tokens: int | None = None,
    observers: Sequence[Observer] = (),
    wrap: Callable[[Ops], Ops] | None = None,
    watch: Callable[[Runner], Runner] | None = None,
) -> tuple[Engine, Weights]:
    """Load the weights, make the pool, and an engine over both. `watch` puts something around the
    runner.

    Raises   SetupError of any kind: the message says what to change.
    """
    spec = opened.spec
    native = NativeOps(threads=resolved.threads, isa=resolved.isa)
    logger.info("kernels: %s, threads: %d", native.name, native.threads)
    ops = native if wrap is None else wrap(native)
    layout = spec.kv_layout(resolved.block_size, resolved.kv_cache_dtype)
    context = Context(model=spec.fingerprint, layout=f"{layout} {ops.name} {resolved.quantization}")
    swap = None if slab_tokens is not None else swap_setup(resolved)
    setup = _setup(resolved, context, slab_tokens, swap)
    # Before the weights: a file that cannot be written costs no waiting.
    journal = _journal(config, setup)
    model = load_model(
        opened,
        ops,
        resolved.ceilings.tokens,
        quantization=resolved.quantization,
        max_rows=resolved.ceilings.sequences,
        max_context=resolved.max_model_len,
    )
    pool = KVStorage(layout, resolved.blocks)
    runner: Runner = ModelRunner(
        model.decoder,
        ops,
        pool,
        rows=resolved.ceilings.sequences,
        max_context=resolved.max_model_len,
        groups=len(resolved.windows),
        mover=None if swap is None else Mover(pool, KVStorage(layout, swap.host_blocks)),
    )
    if watch is not None:
        runner = watch(runner)
    engine = Engine(scheduler_of(setup), runner, observers=(*observers, *journal))
    return engine, model.decoder.weights


def swap_setup(resolved: Resolved) -> SwapSetup | None:
    """The swap space, and what moving a block costs on this machine; None if there is none."""
    if not resolved.swap_blocks:
        return None
    # A token takes a multiplication and an addition a weight, each of which has two bytes.
    token_s = resolved.weights_bytes / (resolved.threads * CORE_FLOPS)
    swap = SwapSetup(
        host_blocks=resolved.swap_blocks,
        block_bytes=resolved.block_bytes,
        bytes_per_s=measured_bytes_per_s(),
        tokens_per_s=1 / token_s,
    )
    logger.info(
        "swap space: %s blocks; one moves out and back in %.0f µs",
        f"{swap.host_blocks:,}",
        1e6 * swap.seconds(1),
    )
    return swap


def _setup(
    resolved: Resolved, context: Context, slab_tokens: int | None, swap: SwapSetup | None
) -> CoreSetup:
    return CoreSetup(
        blocks=resolved.blocks,
        block_size=resolved.block_size,
        limits=resolved.limits,
        ceilings=resolved.ceilings,
        windows=resolved.windows,
        prefix_caching=resolved.enable_prefix_caching and slab_tokens is None,
        slab_tokens=slab_tokens or 0,
        context=context,
        swap=swap,
    )


def _journal(config: EngineConfig, setup: CoreSetup) -> tuple[Journal, ...]:
    if config.journal is None:
        return ()
    return (Journal(Path(config.journal), setup, octavo=__version__, started_at=time.time()),)


def facts_of(opened: OpenModel, config: EngineConfig) -> ModelFacts:
    """What sizing needs to know of a model in the forms asked for; the weights need not be read."""
    spec = opened.spec
    layout = spec.kv_layout(config.block_size, kv_cache_dtype_of(config))
    return ModelFacts(
        weights_bytes=opened.weights_bytes(quantization_of(config)),
        kv_token_bytes=layout.block_bytes // layout.block_size,
        windows=tuple(group.window for group in spec.groups),
        max_context=spec.max_context,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        ffn_size=spec.ffn_size,
        qkv_width=spec.qkv_size,
    )


def tokenizer_of(path: Path, opened: OpenModel) -> Tokenizer:
    """The tokenizer of the model at `path`, from its GGUF metadata or its tokenizer.json."""
    if isinstance(opened.checkpoint, GGUFFile):
        return Tokenizer.from_gguf(opened.checkpoint.metadata)
    return Tokenizer.from_folder(path)
