"""From plans to arrays."""

import numpy as np

from octavo.core.plan import Span, TableWrite
from octavo.runtime.batch import RowTables, make_batch


def test_spans_lie_back_to_back_with_their_positions_and_tables() -> None:
    tables = RowTables(rows=4, width=8, groups=2)
    tables.apply(
        [
            TableWrite(3, 0, 0, (9, 8)),
            TableWrite(3, 1, 0, (5, 6)),
            TableWrite(1, 0, 0, (2,)),
            TableWrite(1, 0, 1, (7, 4)),
            TableWrite(1, 1, 0, (1, 0, 3)),
        ]
    )
    spans = [Span(3, 4, 6, (40, 50), False), Span(1, 8, 9, (90,), True)]
    batch = make_batch(spans, [span.tokens for span in spans], tables, block_size=4)
    np.testing.assert_array_equal(batch.tokens, [40, 50, 90])
    np.testing.assert_array_equal(batch.positions, [4, 5, 8])
    np.testing.assert_array_equal(batch.query_start, [0, 2, 3])
    np.testing.assert_array_equal(batch.context, [6, 9])
    np.testing.assert_array_equal(batch.logit_rows, [2])
    np.testing.assert_array_equal(batch.tables[0], [[9, 8, 0], [2, 7, 4]])
    np.testing.assert_array_equal(batch.tables[1], [[5, 6, 0], [1, 0, 3]])
    arrays = (batch.tokens, batch.positions, batch.query_start, batch.context, batch.logit_rows)
    assert all(array.dtype == np.int32 for array in (*arrays, *batch.tables))
    assert all(array.flags.c_contiguous for array in (*arrays, *batch.tables))


def test_a_step_that_samples_nothing_has_no_logit_rows() -> None:
    tables = RowTables(rows=1, width=4, groups=1)
    spans = [Span(0, 0, 3, (1, 2, 3), False)]
    batch = make_batch(spans, [span.tokens for span in spans], tables, block_size=4)
    assert batch.logit_rows.shape == (0,)


def test_entries_that_a_window_has_left_behind_say_anything() -> None:
    """A table may begin in the middle; what stood there before goes to the kernels as it is: they
    do not follow it."""
    tables = RowTables(rows=2, width=6, groups=2)
    tables.apply([TableWrite(0, 0, 0, (9, 8, 7)), TableWrite(0, 1, 0, (1, 2, 3))])
    tables.apply([TableWrite(0, 0, 0, (4, 5, 6, 0)), TableWrite(0, 1, 2, (11, 12))])
    span = Span(0, 14, 15, (1,), True)
    batch = make_batch([span], [span.tokens], tables, block_size=4)
    np.testing.assert_array_equal(batch.tables[0], [[4, 5, 6, 0]])
    np.testing.assert_array_equal(batch.tables[1], [[1, 2, 11, 12]])
