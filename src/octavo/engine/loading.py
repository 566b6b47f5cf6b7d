"""From decided sizes to an engine: weights, pool, runner and scheduler. Without its door: an engine
process has no use for tokenizers and templates, and starts sooner."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo import __version__
from octavo.config import EngineConfig
from octavo.core.calls import CoreSetup
from octavo.core.plan import Runner
from octavo.core.prefix_cache import Context
from octavo.core.setup import scheduler_of
from octavo.core.swap import SwapSetup
from octavo.engine.engine import Engine, Observer
from octavo.models.loader import OpenModel, load_model
from octavo.models.weights.gguf import GGUFFile
from octavo.models.weights.pack import Weights
from octavo.observe.journal import Journal
from octavo.observe.phases import Phases
from octavo.ops.api import Ops
from octavo.ops.native import NativeOps
from octavo.resolve import CORE_FLOPS, Resolved
from octavo.runtime.draft_model import DraftModel
from octavo.runtime.movers import Mover, measured_bytes_per_s
from octavo.runtime.runner import ModelRunner
from octavo.runtime.storage import KVStorage
from octavo.text.grammar import Grammars

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def build_engine(
    opened: OpenModel,
    config: EngineConfig,
    resolved: Resolved,
    grammars: Grammars,
    *,
    draft: OpenModel | None = None,
    slab_tokens: int | None = None,
    observers: Sequence[Observer] = (),
    wrap: Callable[[Ops], Ops] | None = None,
    watch: Callable[[Runner], Runner] | None = None,
) -> tuple[Engine, Weights]:
    """Load the weights, make the pool, and an engine over both. A `draft` model guesses for it.
    `watch` puts something around the runner.

    Raises   SetupError of any kind: the message says what to change.
    """
    phases, spec = Phases(), opened.spec
    native = NativeOps(threads=resolved.threads, isa=resolved.isa)
    logger.info("kernels: %s, threads: %d", native.name, native.threads)
    ops = native if wrap is None else wrap(native)
    layout = spec.kv_layout(resolved.block_size, resolved.kv_cache_dtype)
    context = Context(model=spec.fingerprint, layout=f"{layout} {ops.name} {resolved.quantization}")
    swap = None if slab_tokens is not None else swap_setup(resolved)
    setup = _setup(resolved, context, slab_tokens, swap)
    # Before the weights: a file that cannot be written costs no waiting.
    journal = _journal(config, setup)
    phases.end("kernels chosen")
    model = load_model(
        opened,
        ops,
        resolved.ceilings.tokens,
        quantization=resolved.quantization,
        max_rows=resolved.ceilings.draws,
        max_context=resolved.max_model_len,
    )
    phases.end("weights packed")
    pool = KVStorage(layout, resolved.blocks)
    runner: Runner = ModelRunner(
        model.decoder,
        ops,
        pool,
        rows=resolved.ceilings.sequences,
        draws=resolved.ceilings.draws,
        max_context=resolved.max_model_len,
        groups=len(resolved.windows),
        mover=None if swap is None else Mover(pool, KVStorage(layout, swap.host_blocks)),
        guesser=None if draft is None else _draft_model(draft, ops, resolved, swap),
        grammars=grammars,
    )
    phases.end("KV cache allocated")
    if watch is not None:
        runner = watch(runner)
    engine = Engine(scheduler_of(setup), runner, observers=(*observers, *journal))
    return engine, model.decoder.weights


def _draft_model(
    opened: OpenModel, ops: Ops, resolved: Resolved, swap: SwapSetup | None
) -> DraftModel:
    ceilings = resolved.ceilings
    layout = opened.spec.kv_layout(resolved.block_size, resolved.kv_cache_dtype)
    decoder = load_model(
        opened,
        ops,
        ceilings.tokens,
        quantization=resolved.quantization,
        max_rows=ceilings.sequences,
        max_context=resolved.max_model_len,
    ).decoder
    return DraftModel(
        decoder,
        ops,
        KVStorage(layout, resolved.blocks),
        KVStorage(layout, 0 if swap is None else swap.host_blocks),
        rows=ceilings.sequences,
        max_tokens=ceilings.tokens,
        max_context=decoder.max_context,
    )


def tokenizer_of(path: Path, opened: OpenModel) -> "Tokenizer":
    """The tokenizer of the model at `path`, from its GGUF metadata or its tokenizer.json."""
    from octavo.text.tokenizer import Tokenizer  # an engine process needs it for grammars only

    if isinstance(opened.checkpoint, GGUFFile):
        return Tokenizer.from_gguf(opened.checkpoint.metadata)
    return Tokenizer.from_folder(path)


def grammars_of(path: Path, opened: OpenModel) -> Grammars:
    """The grammars of the model at `path`; its tokenizer is read with the first."""
    return Grammars(lambda: tokenizer_of(path, opened), opened.spec.vocab_size)


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
