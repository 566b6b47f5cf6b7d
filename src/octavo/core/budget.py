"""What one step may spend, and what the whole engine may hold."""

from dataclasses import dataclass
from typing import Literal, get_args

from octavo.errors import ConfigError

AdmissionRule = Literal["full", "chunked"]
"""For what blocks are reserved when a sequence is admitted: for all positions that it has then, or
for its first chunk only, the rest as it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`sequences` run at once; `tokens` are computed a step; `waiting` may queue (None: no limit).

    `watermark_blocks` stay available when a sequence is admitted beside others, so that those can
    grow for a while before anyone must be preempted.

    Raises  ConfigError for limits under which nothing could ever run.
    """

    sequences: int
    tokens: int
    waiting: int | None = None
    watermark_blocks: int = 1
    admission: AdmissionRule = "full"

    def __post_init__(self) -> None:
        least_of = {"sequences": 1, "tokens": 1, "waiting": 1, "watermark_blocks": 0}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}: it must be at least {least}", param=name)
        rules = get_args(AdmissionRule)
        if self.admission not in rules:
            raise ConfigError(
                f"admission is {self.admission!r}: it must be one of {', '.join(rules)}",
                param="admission",
            )


class Budget:
    """The tokens of one step, handed out until they are gone."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def grant(self, demand: int) -> int:
        """As much of `demand` as is left."""
        granted = min(demand, self.left)
        self.left -= granted
        return granted

    def refund(self, tokens: int) -> None:
        self.left += tokens
