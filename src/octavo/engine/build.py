"""From settings to a running engine with its door: each part gets its own small record."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.config import EngineConfig
from octavo.engine.defaults import model_defaults
from octavo.engine.door import Door
from octavo.engine.drafts import Found, find_draft
from octavo.engine.engine import Engine, Observer
from octavo.engine.loading import build_engine, tokenizer_of
from octavo.models.loader import OpenModel, open_model
from octavo.models.reference import resolve_reference
from octavo.models.spec import ModelSpec
from octavo.models.weights.pack import Weights
from octavo.observe.phases import Phases
from octavo.ops.api import Ops
from octavo.resolve import (
    ModelFacts,
    Resolved,
    boot_lines,
    kv_cache_dtype_of,
    quantization_of,
    read_machine,
    resolve,
    with_draft,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is there and opened, and every default decided; no weight is read yet."""

    path: Path
    opened: OpenModel
    resolved: Resolved
    draft: Found | None = None

    def door(self, config: EngineConfig) -> Door:
        """The door in front of an engine of this model.

        Raises   ModelFileError: its tokenizer or its defaults cannot be used.
        """
        asked = config.generation_config == "auto"
        return Door(
            tokenizer_of(self.path, self.opened),
            max_model_len=self.resolved.max_model_len,
            vocab_size=self.opened.spec.vocab_size,
            seed=config.seed,
            defaults=model_defaults(self.path) if asked else None,
            max_logprobs=config.max_logprobs,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
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
    phases = Phases()
    path = resolve_reference(config.model, progress=progress)
    phases.end("model found")
    opened = open_model(path)
    phases.end("model opened")
    facts, draft = facts_of(opened, config), None
    if config.draft_model is not None:
        draft = find_draft(config.draft_model, Found(path, opened), progress=progress)
        facts = with_draft(facts, facts_of(draft.opened, config))
        phases.end("draft model checked")
    resolved = resolve(config, facts, read_machine())
    phases.end("settings resolved")
    for line in boot_lines(resolved):
        logger.info("%s", line)
    return Prepared(path, opened, resolved, draft)


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
    door = prepared.door(config)
    engine, weights = build_engine(
        prepared.opened,
        config,
        prepared.resolved,
        door.grammars,
        draft=None if prepared.draft is None else prepared.draft.opened,
        slab_tokens=slab_tokens,
        observers=observers,
        wrap=wrap,
    )
    return Built(
        engine=engine,
        door=door,
        resolved=prepared.resolved,
        spec=prepared.opened.spec,
        weights=weights,
    )


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
