"""From a plan to arrays: the rows' block tables, and one `Batch` a step."""

from collections.abc import Sequence

import numpy as np

from octavo.core.plan import Span, TableWrite
from octavo.ops.api import I32, Batch


class RowTables:
    """The block tables of every row, one int32 array `[rows, width]` a layer group."""

    def __init__(self, *, rows: int, width: int, groups: int) -> None:
        self._tables = [np.zeros((rows, width), np.int32) for _ in range(groups)]

    def apply(self, writes: Sequence[TableWrite]) -> None:
        for write in writes:
            stop = write.index + len(write.blocks)
            self._tables[write.group][write.row, write.index : stop] = write.blocks

    def row(self, row: int, group: int = 0) -> I32:
        """The table of one row in a layer group, a view."""
        table: I32 = self._tables[group][row]
        return table

    def gather(self, rows: Sequence[int], width: int) -> tuple[I32, ...]:
        """The first `width` entries of the tables of `rows`, in that order, a layer group each."""
        index = np.asarray(rows, np.intp)
        return tuple(np.ascontiguousarray(table[index, :width]) for table in self._tables)


def make_batch(
    spans: Sequence[Span], tokens: Sequence[Sequence[int]], tables: RowTables, block_size: int
) -> Batch:
    """The arrays of one step; sequence s of the batch is `spans[s]` with ids `tokens[s]`, drafts
    after them. Logits are wanted of the last token of a span that samples, and of its drafts."""
    counts = np.array([len(ids) for ids in tokens], np.int32)
    stops = np.array([span.start for span in spans], np.int32) + counts
    query_start = np.zeros(len(spans) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    total = int(query_start[-1])
    flat = np.fromiter((token for ids in tokens for token in ids), np.int32, total)
    positions = np.arange(total, dtype=np.int32) + np.repeat(stops - query_start[1:], counts)
    drawn = [
        len(ids) + span.start - span.stop + 1 if span.samples else 0
        for span, ids in zip(spans, tokens, strict=True)
    ]
    width = -(-int(stops.max()) // block_size)
    return Batch(
        tokens=flat,
        positions=positions.astype(np.int32, copy=False),
        query_start=query_start,
        context=stops,
        tables=tables.gather([span.row for span in spans], width),
        logit_rows=_tails(query_start[1:], np.array(drawn, np.int32)),
    )


def _tails(stops: I32, counts: I32) -> I32:
    """The last `counts[s]` rows before each `stops[s]`, in order.

    >>> _tails(np.array([3, 5, 9]), np.array([1, 0, 2])).tolist()
    [2, 7, 8]
    """
    ends = np.cumsum(counts)
    total = int(ends[-1])
    rows = np.arange(total, dtype=np.int32) + np.repeat(stops - ends, counts)
    return np.ascontiguousarray(rows, np.int32)
