"""Transfers: the KV of preempted sequences on its way to the host arena, and back.

    blocks of the pool ── out ──▶ slots of the arena ── in ──▶ other blocks of the pool

A block that leaves, and each slot, has the transfer as an owner more from the plan with the move
until that plan is committed or has failed: `settle`.
"""

from collections.abc import Sequence as Items

from octavo.core.block_pool import BlockPool
from octavo.core.block_table import ABSENT
from octavo.core.budget import Preemption
from octavo.core.hits import Hits
from octavo.core.plan import Move
from octavo.core.policy import Yielding, swap_or_recompute
from octavo.core.sequence import Sequence
from octavo.core.swap import HostArena


class Transfers:
    """Between `pool` and `arena`; without an arena nothing is ever swapped."""

    def __init__(
        self, pool: BlockPool, arena: HostArena | None, hits: Hits, block_size: int
    ) -> None:
        self._pool = pool
        self._arena = arena
        self._hits = hits
        self._block_size = block_size

    def swapped_tokens(self, sequence: Sequence) -> int:
        """Of how many leading positions of `sequence` the arena holds the KV, or will."""
        swapped = None if self._arena is None else self._arena.swapped(sequence.id)
        return 0 if swapped is None else swapped.tokens

    def in_transfer(self, sequence: Sequence) -> int:
        """How many blocks of a swapped sequence are still on their way to the arena."""
        return 0 if self._arena is None else self._arena.in_transfer(sequence.id)

    def keep(
        self, victim: Sequence, preemption: Preemption, *, recompute_s: float | None, intact: bool
    ) -> tuple[Yielding, tuple[Move, ...]]:
        """How `victim` yields, and the moves that keep its KV if that pays.

        A step of its own that computes it again would take `recompute_s`, if that is known. If not
        `intact`, some block does not hold what it should, and nothing is kept.
        """
        held = self._hits.computed_by(victim)
        count = sum(block != ABSENT for row in held for block in row)
        swap_s = None
        if self._arena is not None:
            if recompute_s is None:
                recompute_s = victim.scheduled / self._arena.setup.tokens_per_s
            if intact and 0 < count <= self._arena.room:
                swap_s = self._arena.setup.seconds(count)
        how = swap_or_recompute(preemption, swap_s=swap_s, recompute_s=recompute_s)
        return how, self._move_out(victim, held) if how.mode == "swap" else ()

    def _move_out(self, victim: Sequence, held: Items[Items[int]]) -> tuple[Move, ...]:
        assert self._arena is not None
        swapped = self._arena.put(victim.id, victim.scheduled, held)
        moves = tuple(
            Move("out", row[index], slots[index])
            for index in range(len(held[0]))
            for row, slots in zip(held, swapped.slots, strict=True)
            if row[index] != ABSENT
        )
        for move in moves:
            self._pool.fence(move.block)
        return moves

    def bring_back(self, sequence: Sequence, found: int) -> tuple[Move, ...]:
        """Move what the arena holds beyond the positions `found` to the tables of `sequence`; give
        all its slots back."""
        swapped = None if self._arena is None else self._arena.swapped(sequence.id)
        if self._arena is None or swapped is None:
            return ()
        moves = []
        if swapped.tokens > found:
            for table, slots in zip(sequence.tables, swapped.slots, strict=True):
                for index in range(max(found // self._block_size, table.first), len(slots)):
                    if slots[index] != ABSENT:
                        moves.append(Move("in", table[index], slots[index]))
        self._arena.take(sequence.id, [move.slot for move in moves])
        return tuple(moves)

    def drop(self, sequence: Sequence) -> None:
        """Forget what the arena holds of `sequence`, if anything."""
        if self._arena is not None:
            self._arena.drop(sequence.id)

    def settle(self, moves: tuple[Move, ...], done: int) -> None:
        """The transfers of a plan are over; the first `done` were carried out.

        Whoever's KV did not get to the arena is computed again.
        """
        if self._arena is None:
            return
        self._arena.lose(move.slot for move in moves[done:] if move.kind == "out")
        for move in reversed(moves):  # the tail of a prefix is evicted before its head
            self._arena.lift(move.slot)
            if move.kind == "out":
                self._pool.lift(move.block, keep=self._hits.publishes(move.block))
