"""A draft model: a smaller network that guesses, with KV of its own in the blocks of the pool.

    block 7 ┬─ KV of the model                      whoever shares, copies, swaps or evicts a block
            └─ KV of the draft model                does so with both
               ├─ as far as `Filled` says
               └─ not computed yet

The draft model follows where it is asked to guess, and nowhere else. Positions that it has not
seen, those of a prompt say, it computes before its first guess there, so many a step.

Each guess is drawn by the rule and at the point by which the model will draw that position: the
nearer the logits of the two are, the likelier they agree.

Keeps    its KV decides what is guessed, never what is answered. So it may be written to a block
         that several own: its bits follow from the tokens, which they share.
Source   Leviathan et al. 2023 (arXiv:2211.17192); the rule of acceptance is that of `drafting`.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from octavo.core.plan import Sampled, Span, StepPlan
from octavo.core.request import Request
from octavo.ops.api import F32, I32, Ops
from octavo.runtime.batch import RowTables, make_batch
from octavo.runtime.drafting import Guess
from octavo.runtime.movers import Mover, copy_blocks
from octavo.runtime.network import Network
from octavo.runtime.sampler import Draw, Sampler
from octavo.runtime.storage import KVStorage
from octavo.units import ceil_div

MOST_BEHIND = 256
"""Positions that are computed at most in one step to catch up: neighbours wait for them."""


class Filled:
    """How many leading positions of each block have KV of the draft model; of each slot too."""

    def __init__(self, *, blocks: int, slots: int, block_size: int) -> None:
        self._size = block_size
        self._blocks: I32 = np.zeros(blocks, np.int32)
        self._slots: I32 = np.zeros(slots, np.int32)

    def carry(self, plan: StepPlan) -> None:
        """Moves out, copies, moves in, as `StepPlan` orders them."""
        for move in plan.moves:
            if move.kind == "out":
                self._slots[move.slot] = self._blocks[move.block]
        for copy in plan.copies:
            self._blocks[copy.target] = self._blocks[copy.source]
        for move in plan.moves:
            if move.kind == "in":
                self._blocks[move.block] = self._slots[move.slot]

    def cut(self, table: I32, start: int, stop: int) -> None:
        """At [start, stop) other tokens stand from now on."""
        first, offset = divmod(start, self._size)
        self._blocks[table[first]] = min(self._blocks[table[first]], offset)
        self._blocks[table[first + 1 : ceil_div(stop, self._size)]] = 0

    def reach(self, table: I32, upto: int) -> int:
        """How many leading positions of a table have KV, at most `upto`."""
        filled = self._blocks[table[: ceil_div(upto, self._size)]]
        short = np.flatnonzero(filled < self._size)
        if not len(short):
            return upto
        return min(upto, int(short[0]) * self._size + int(filled[short[0]]))

    def fill(self, table: I32, start: int, stop: int) -> None:
        """The KV of [start, stop) is there; that before was."""
        last, rest = divmod(stop, self._size)
        self._blocks[table[start // self._size : last]] = self._size
        if rest:
            self._blocks[table[last]] = rest


class DraftModel:
    """Keeps  `Filled` holds for the tokens of each row up to the start of its newest span."""

    def __init__(
        self,
        network: Network,
        ops: Ops,
        storage: KVStorage,
        arena: KVStorage,
        *,
        rows: int,
        max_tokens: int,
        max_context: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`arena` has a slot for each of the host arena; steps have up to `max_tokens`."""
        self._network = network
        self._ops = ops
        self._storage = storage
        self._mover = Mover(storage, arena)
        self._block_size = storage.layout.block_size
        self._filled = Filled(
            blocks=len(storage.pool), slots=len(arena.pool), block_size=self._block_size
        )
        self._sampler = Sampler(ops, max_rows=rows)
        self._max_tokens = max_tokens
        self._max_context = max_context
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._tokens: dict[int, list[int]] = {}
        self._rounds: list[tuple[int, float]] = []

    @property
    def rounds(self) -> tuple[tuple[int, float], ...]:
        return tuple(self._rounds)

    def carry(self, plan: StepPlan) -> None:
        """Copy and move the draft model's half of blocks."""
        self._filled.carry(plan)
        self._mover.move_out(plan.moves)
        copy_blocks(self._ops, self._storage, plan.copies)
        self._mover.move_in(plan.moves)

    def bind(self, row: int, request: Request, tokens: Sequence[int]) -> None:
        self._requests[row] = replace(request, top_logprobs=0)  # nobody reads those of a guess
        self._tokens[row] = list(tokens)

    def append(self, row: int, tokens: Iterable[int]) -> None:
        self._tokens[row] += tokens

    def guess(self, spans: Sequence[Span], tables: RowTables) -> Sequence[Guess]:
        """What the draft model draws after each of these spans.

        Cost     a forward pass of the draft model for each guess of the longest.
        """
        self._rounds = []
        for span in spans:
            self._filled.cut(tables.row(span.row), span.start, span.stop + span.drafts)
        wanted = {
            span.row: min(span.drafts, self._max_context - span.stop)
            for span in spans
            if span.drafts and span.stop < self._max_context
        }
        guesses: dict[int, list[int]] = {row: [] for row in wanted}
        steps = self._unseen([span for span in spans if span.row in wanted], tables)
        while steps:
            drawn = self._round(steps, tables)
            for row, token in drawn.items():
                guesses[row].append(token)
            steps = [
                Span(step.row, step.stop, step.stop + 1, (drawn[step.row],), True)
                for step in steps
                if step.row in drawn and len(guesses[step.row]) < wanted[step.row]
            ]
        return [tuple(guesses.get(span.row, ())) for span in spans]

    def _unseen(self, spans: Sequence[Span], tables: RowTables) -> list[Span]:
        """What the draft model has to compute before its first guess for each of these spans; where
        that is more than a step allows it goes so far, and guesses in a later one."""
        unseen, left = [], min(MOST_BEHIND, self._max_tokens)
        for span in spans:
            start = self._filled.reach(tables.row(span.row), span.start)
            stop = min(span.stop, start + left)
            if stop > start:
                tokens = tuple(self._tokens[span.row][start:stop])
                unseen.append(Span(span.row, start, stop, tokens, stop == span.stop))
                left -= stop - start
        return unseen

    def _round(self, steps: Sequence[Span], tables: RowTables) -> dict[int, int]:
        """Compute these positions; returns what is drawn after those that sample, by row."""
        began_s = self._clock()
        batch = make_batch(steps, [step.tokens for step in steps], tables, self._block_size)
        logits = self._network.forward(batch, self._storage.pool)
        drawn = self._draw(logits, [step for step in steps if step.samples])
        for step in steps:
            self._filled.fill(tables.row(step.row), step.start, step.stop)
        self._rounds.append((len(batch.tokens), self._clock() - began_s))
        return drawn

    def _draw(self, logits: F32, steps: Sequence[Span]) -> dict[int, int]:
        draws = [Draw(step.row, step.stop, self._requests[step.row]) for step in steps]
        found = self._sampler.sample(logits, draws)
        return {one.row: one.token for one in found if isinstance(one, Sampled)}
