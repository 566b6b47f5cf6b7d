"""What one step may spend, and what the whole engine may hold."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`sequences` run at once; `tokens` are computed a step; `waiting` may queue (None: no limit).

    `watermark_blocks` stay available when a sequence is admitted beside others, so that those can
    grow for a while before anyone must be preempted.
    """

    sequences: int
    tokens: int
    waiting: int | None = None
    watermark_blocks: int = 1


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
