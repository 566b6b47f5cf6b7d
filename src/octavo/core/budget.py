"""What one step may spend, and what the whole engine may hold."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from octavo.core.events import TokenLimit
from octavo.errors import ConfigError

AdmissionRule = Literal["full", "chunked", "predicted"]
"""For what blocks are reserved when a sequence is admitted: for all positions that it has then, or
for its first chunk only, the rest as it goes on. `predicted` is `full`, and as many stay available
as all that run are expected to grow by."""

Policy = Literal["fcfs", "priority", "fair", "slo"]
"""Who goes first: by arrival; by priority, and in one priority by arrival, by what each tenant was
served, or by deadline."""

Preemption = Literal["auto", "swap", "recompute"]
"""How a victim yields: its KV is swapped to the host arena, or computed again; `auto` takes what is
estimated to cost less. What does not fit the arena is computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`sequences` run at once; `tokens` are computed a step.

    `waiting` answers may queue, with `waiting_tokens` prompt tokens among them (None: no limit).
    Who waits `waiting_s` for its first admission is over time (None: nobody).
    `watermark_blocks` stay available when a sequence is admitted beside others, so that those can
    grow for a while before anyone must be preempted. Who waits climbs one priority class for each
    `aging_s` (None or 0: never). The targets are those of requests that bring none (None: none).
    Up to `drafts` tokens are guessed ahead for a sequence in a step (0: none are).
    At most `pinned_blocks` are kept in the pool for prompts to come because requests asked for it.

    Every limit may change while the core runs: whoever keeps one asks for it each time. What is
    fixed from the start stands in the `CoreSetup`.

    Raises  ConfigError for limits under which nothing could ever run.
    """

    sequences: int
    tokens: int
    waiting: int | None = None
    waiting_tokens: int | None = None
    waiting_s: float | None = None
    watermark_blocks: int = 1
    admission: AdmissionRule = "full"
    policy: Policy = "priority"
    aging_s: float | None = None
    drafts: int = 0
    pinned_blocks: int = 0
    preemption: Preemption = "auto"
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:  # NaN is not
                raise ConfigError(f"{name} is {value}: it must be at least {least}", param=name)
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}: it must be one of {', '.join(known)}",
                    param=name,
                )


_LEAST = {
    "sequences": 1,
    "tokens": 1,
    "waiting": 1,
    "waiting_tokens": 1,
    "waiting_s": 1e-3,
    "watermark_blocks": 0,
    "aging_s": 0,
    "drafts": 0,
    "pinned_blocks": 0,
    "ttft_target_s": 1e-3,
    "tpot_target_s": 1e-3,
}
_KNOWN = {
    "admission": get_args(AdmissionRule),
    "policy": get_args(Policy),
    "preemption": get_args(Preemption),
}


LEAST_DRAWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What pool and runner are built for: how far limits of these names may be raised."""

    sequences: int
    tokens: int
    watermark_blocks: int

    @property
    def draws(self) -> int:
        """For how many positions tokens can be drawn in one step."""
        return max(self.sequences, min(LEAST_DRAWS, self.tokens))

    def check(self, limits: Limits) -> None:
        """Raises  ConfigError naming the limit that is above its ceiling."""
        for ceiling in fields(self):
            name = ceiling.name
            value, most = getattr(limits, name), getattr(self, name)
            if value > most:
                raise ConfigError(
                    f"{name} is {value}: this engine is built for at most {most}", param=name
                )


class Budget:
    """The tokens of one step, handed out until they are gone; `limit` says what ends them."""

    def __init__(self, tokens: int, limit: TokenLimit = "tokens") -> None:
        self.left = tokens
        self.limit = limit

    def covers(self, demand: int) -> bool:
        return demand <= self.left

    def grant(self, demand: int) -> int:
        """As much of `demand` as is left."""
        granted = min(demand, self.left)
        self.left -= granted
        return granted

    def refund(self, tokens: int) -> None:
        self.left += tokens
