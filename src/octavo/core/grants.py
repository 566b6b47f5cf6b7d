"""Grants: what the block manager answers to those who need blocks.

Whoever cannot be given what they ask gets a `block_pool.Shortage` instead, and nothing has changed.
"""

from dataclasses import dataclass
from typing import NamedTuple

from octavo.core.hits import Parent
from octavo.core.plan import BlockCopy, Move, TableWrite
from octavo.core.policy import Yielding


class Reservation(NamedTuple):
    """What a runner must apply before it computes, and which cached blocks were reused for it."""

    writes: tuple[TableWrite, ...]
    copies: tuple[BlockCopy, ...]
    evicted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admission:
    """Blocks for a sequence to start: the first `cached_tokens` positions hold their KV already.

    `blocks_found` are shared whole, those allocated are new, a copy among them. `parent` is whose
    blocks were found, None for those of the prefix cache. If `restored_tokens` are more, the
    `moves` bring the KV of the first so many positions back from the host arena.
    """

    writes: tuple[TableWrite, ...]
    copies: tuple[BlockCopy, ...]
    cached_tokens: int
    blocks_found: int
    blocks_allocated: int
    evicted: tuple[int, ...]
    parent: Parent | None = None
    restored_tokens: int = 0
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True)
class Yielded:
    """What a victim gave: so many `blocks` are available again, or will be when their transfers
    are over. The `moves` keep its KV; without any it is computed again."""

    how: Yielding
    blocks: int
    moves: tuple[Move, ...]
