"""ModelRunner: carries out plans with a model. It decides nothing."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from octavo.core.plan import (
    Bind,
    BlockCopy,
    RowFailed,
    RowScores,
    Sampled,
    Span,
    StepPlan,
    StepResult,
)
from octavo.core.request import Request
from octavo.ops.api import F32, Batch, KVPool, Ops
from octavo.runtime.batch import RowTables, make_batch
from octavo.runtime.edits import Edits
from octavo.runtime.movers import Mover
from octavo.runtime.sampler import Draw, Sampler
from octavo.runtime.scores import Head, PromptScorer
from octavo.runtime.storage import KVStorage


class Network(Head, Protocol):
    """A decoder: writes the KV of the batch, and gives the logits of its `logit_rows`."""

    def forward(self, batch: Batch, pool: KVPool) -> F32: ...


class ModelRunner:
    """Keeps  rows: a request and block tables each, from its bind to the next bind of that row."""

    def __init__(
        self,
        network: Network,
        ops: Ops,
        storage: KVStorage,
        *,
        rows: int,
        max_context: int,
        groups: int = 1,
        mover: Mover | None = None,
    ) -> None:
        self._network = network
        self._ops = ops
        self._storage = storage
        self._mover = mover
        self._sampler = Sampler(ops, max_rows=rows)
        self._scorer = PromptScorer(network, ops, max_rows=rows)
        self._block_size = storage.layout.block_size
        self._tables = RowTables(
            rows=rows, width=-(-max_context // self._block_size), groups=groups
        )
        self._requests: dict[int, Request] = {}
        self._last: dict[int, int] = {}
        self._edits: dict[int, Edits] = {}
        """Of the rows whose requests ask for any."""
        self._scored: set[int] = set()
        """The rows whose prompts are to be scored."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan: moves out, binds, table writes, copies, moves in, then all spans in
        one forward pass."""
        moved = 0 if self._mover is None else self._mover.move_out(plan.moves)
        for bind in plan.binds:
            self._bind(bind)
        self._tables.apply(plan.writes)
        self._copy(plan.copies)
        moved += 0 if self._mover is None else self._mover.move_in(plan.moves)
        if not plan.spans:
            return StepResult(plan.id, (), moved)
        tokens = [self._tokens(span) for span in plan.spans]
        batch = make_batch(plan.spans, tokens, self._tables, self._block_size)
        logits = self._network.forward(batch, self._storage.pool)
        outcomes = self._sample(logits, plan.spans)
        if not self._scored:
            return StepResult(plan.id, outcomes, moved)
        told = self._scorer.score(plan.spans, self._requests, batch)
        failed = {one.row: one for one in told if isinstance(one, RowFailed)}
        sound = tuple(one for one in outcomes if one.row not in failed)
        scores = tuple(one for one in told if isinstance(one, RowScores))
        return StepResult(plan.id, (*sound, *failed.values()), moved, scores)

    def _bind(self, bind: Bind) -> None:
        self._requests[bind.row] = bind.request
        if bind.request.prompt_logprobs is None:
            self._scored.discard(bind.row)
        else:
            self._scored.add(bind.row)
        edits = Edits.of(bind)
        if edits is None:
            self._edits.pop(bind.row, None)
        else:
            self._edits[bind.row] = edits

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            sources = np.array([copy.source for copy in copies], np.int32)
            targets = np.array([copy.target for copy in copies], np.int32)
            self._ops.copy_blocks(self._storage.pool, sources, targets)

    def _tokens(self, span: Span) -> tuple[int, ...]:
        missing = span.stop - span.start - len(span.tokens)
        return (*span.tokens, self._last[span.row]) if missing else span.tokens

    def _sample(self, logits: F32, spans: Sequence[Span]) -> tuple[Sampled | RowFailed, ...]:
        draws = [
            Draw(span.row, span.stop, self._requests[span.row], self._edits.get(span.row))
            for span in spans
            if span.samples
        ]
        outcomes = self._sampler.sample(logits, draws)
        for outcome in outcomes:
            if isinstance(outcome, Sampled):
                self._last[outcome.row] = outcome.token
                if (edits := self._edits.get(outcome.row)) is not None:
                    edits.append(outcome.token)
        return outcomes
