"""Counters: what a scheduler did, in totals since the start."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Tokens, but for `steps`, `preemptions`, `evictions` (blocks) and `finished` (by reason)."""

    steps: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    tokens_recomputed: int = 0
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    """Drafts that were right."""
    tokens_moved_out: int = 0
    tokens_moved_in: int = 0
    prompt_tokens: int = 0
    """Of requests whose first token was sampled, once each."""
    prompt_tokens_cached: int = 0
    """How many of those were found in the prefix cache."""
    preemptions: int = 0
    preemptions_moved: int = 0
    """Those whose KV was kept."""
    evictions: int = 0
    prefix_tokens_queried: int = 0
    prefix_tokens_hit: int = 0
    finished: dict[str, int] = field(default_factory=dict)
