"""How likely the model finds tokens: the likeliest of a position, and those of a prompt."""

from collections.abc import Mapping, Sequence

import numpy as np

from octavo.core.events import Likeliest, Score
from octavo.core.plan import RowFailed, RowScores, Span
from octavo.core.request import Request
from octavo.ops.api import F32, I32, Batch, Ops
from octavo.runtime.network import Head

WIDE = 512
"""Beyond so many a row is sorted whole: a list kept sorted takes longer."""


def likeliest(
    ops: Ops, logits: F32, rows: Sequence[int], counts: Sequence[int], greatest: Sequence[float]
) -> list[Likeliest]:
    """So many likeliest tokens of each of these rows; `greatest` is the log-probability of the
    first."""
    most = min(max(counts), logits.shape[1])
    if most > WIDE:
        ids, values = _sorted(logits[list(rows)], most)
    else:
        ids, values = np.empty((len(rows), most), np.int32), np.empty((len(rows), most), np.float32)
        ops.likeliest(logits, np.array(rows, np.int32), ids, values)
    return [
        tuple(
            zip(tokens[:count], (value - found[0] + first for value in found[:count]), strict=True)
        )
        for tokens, found, count, first in zip(
            ids.tolist(), values.tolist(), counts, greatest, strict=True
        )
    ]


def _sorted(rows: F32, most: int) -> tuple[I32, F32]:
    """The greatest logits of each row and their ids, of equals the lowest id first."""
    ids = np.argsort(-rows, axis=1, kind="stable")[:, :most].astype(np.int32)
    return ids, np.take_along_axis(rows, ids, axis=1)


class PromptScorer:
    """Scores the tokens of prompts, a few rows of logits at a time.

    Cost     the head of the network for each position, in the buffers that sampling uses.
    """

    def __init__(self, head: Head, ops: Ops, *, max_rows: int) -> None:
        self._head = head
        self._ops = ops
        self._max_rows = max_rows

    def score(
        self, spans: Sequence[Span], requests: Mapping[int, Request], batch: Batch
    ) -> list[RowScores | RowFailed]:
        """What the batch computed last says of the prompts that are to be scored."""
        told: list[RowScores | RowFailed] = []
        for index, span in enumerate(spans):
            request = requests[span.row]
            if request.prompt_logprobs is None:
                continue
            if tokens := request.prompt[span.start + 1 : span.stop + 1]:
                first_row = int(batch.query_start[index])
                told.append(self._span(span, first_row, tokens, request.prompt_logprobs))
        return told

    def _span(
        self, span: Span, first_row: int, tokens: Sequence[int], count: int
    ) -> RowScores | RowFailed:
        scores: list[Score] = []
        for start in range(0, len(tokens), self._max_rows):
            part = tokens[start : start + self._max_rows]
            rows = np.arange(len(part), dtype=np.int32) + np.int32(first_row + start)
            found = self._scores(self._head.logits(rows), part, count)
            if found is None:
                return RowFailed(span.row, "the logits of its prompt are not finite")
            scores += found
        return RowScores(span.row, span.start + 1, tuple(scores))

    def _scores(self, logits: F32, tokens: Sequence[int], count: int) -> list[Score] | None:
        """Of each row the token that follows; None if the logits of one are not finite."""
        rows = np.arange(len(tokens))
        best, logprob = np.empty(len(tokens), np.int32), np.empty(len(tokens), np.float32)
        self._ops.argmax(logits, best, logprob)
        if (best < 0).any():
            return None
        values = logits[rows, list(tokens)]
        ranks = 1 + (logits > values[:, None]).sum(axis=1)
        below = values.astype(np.float64) - logits[rows, best] + logprob
        tops: Sequence[Likeliest] = [()] * len(tokens)
        if count:
            counts = [count] * len(tokens)
            tops = likeliest(self._ops, logits, rows.tolist(), counts, logprob.tolist())
        fields = zip(tokens, below.tolist(), ranks.tolist(), tops, strict=True)
        return [Score(*each) for each in fields]
