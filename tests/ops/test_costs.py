"""Bytes and operations of each op, against values counted by hand."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from octavo.ops import costs
from octavo.ops.api import Batch, Entries, KVLayout, KVPages, Norm, Rope
from octavo.ops.costs import Cost


@dataclass(frozen=True)
class Weight:
    """A packed matrix, as far as costs look at it."""

    rows: int
    columns: int
    nbytes: int


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_linear_reads_its_weights_once_and_takes_each_product_and_sum() -> None:
    x, out = floats(3, 10), floats(3, 7)
    weight = Weight(rows=7, columns=10, nbytes=160)
    moved = 160 + 4 * 3 * 10 + 4 * 3 * 7
    assert costs.linear(x, weight, out) == Cost(moved, 2 * 3 * 10 * 7)
    # Added to: `out` is read too. Norm and bias are read.
    more = costs.linear(x, weight, out, norm=Norm(floats(10), 1e-5), bias=floats(7), add=True)
    assert more == Cost(moved + 4 * 3 * 7 + 4 * 10 + 4 * 7, 420)


def test_a_gated_pair_is_two_matrices() -> None:
    pair = Weight(rows=12, columns=5, nbytes=120)
    assert costs.linear(floats(2, 5), pair, floats(2, 6)).operations == 2 * 2 * 5 * 12


def test_an_embedding_reads_the_rows_of_its_tokens() -> None:
    table = Weight(rows=100, columns=8, nbytes=1600)
    assert costs.embed(table, ints(5, 9, 5), floats(3, 8)) == Cost(3 * 16 + 3 * 8 * 4, 0)


def test_ops_on_rows() -> None:
    x = floats(4, 6)
    assert costs.rms_norm(x, Norm(floats(6), 1e-5), x) == Cost(96 + 24 + 96, 4 * 24)
    assert costs.take_rows(floats(2, 6)) == Cost(2 * 48, 0)
    assert costs.argmax(floats(2, 50)) == Cost(400, 400)
    assert costs.draw(floats(5, 50), ints(0, 3)) == Cost(400, 400)
    assert costs.likeliest(floats(5, 50), ints(0, 3), np.zeros((2, 4), np.int32)) == Cost(464, 100)
    entries = Entries(ints(0, 3), ints(0, 1, 3), ints(7, 8, 9))
    assert costs.add_bias(entries) == Cost(60, 3)
    assert costs.penalise(entries) == Cost(60, 15)
    assert costs.mask(floats(5, 50), np.zeros((2, 2), np.int32)) == Cost(416, 0)
    pool = np.zeros((9, 2, 2, 1, 1, 64), ml_dtypes.bfloat16)
    assert costs.copy_blocks(pool, ints(1, 2, 3)) == Cost(2 * 3 * 2 * 2 * 64 * 2, 0)


LAYOUT = KVLayout(layers=1, kv_heads=2, head_dim=4)
HEADS = 6


def case(*sequences: tuple[int, int], tables: list[list[int]]) -> tuple[Batch, KVPages]:
    """Sequences as (context, rows), blocks of 16."""
    counts = [rows for _, rows in sequences]
    positions = [np.arange(context - rows, context) for context, rows in sequences]
    table = np.array(tables, np.int32)
    batch = Batch(
        tokens=np.zeros(sum(counts), np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_start=np.cumsum([0, *counts]).astype(np.int32),
        context=ints(*(context for context, _ in sequences)),
        tables=(table,),
        logit_rows=ints(),
    )
    pool = np.zeros((8, *LAYOUT.shape), ml_dtypes.bfloat16)
    return batch, KVPages(pool, LAYOUT, 0, table)


def test_rotation_turns_queries_and_keys_and_writes_keys_and_values() -> None:
    _, pages = case((3, 3), tables=[[0]])
    qkv = floats(3, (HEADS + 2 * 2) * 4)
    stored = 3 * 2 * (2 * 4) * 2  # rows, keys and values, elements, bfloat16
    whole = Rope(floats(10, 2), floats(10, 2))
    tables, queries_and_keys = 2 * 3 * 2 * 4, 3 * (HEADS + 2) * 4 * 4
    moved = qkv.nbytes + stored
    # Eight heads of two pairs, six operations each.
    assert costs.rope_write_kv(qkv, whole, pages) == Cost(
        moved + queries_and_keys + tables, 6 * 3 * 8 * 2
    )
    assert costs.rope_write_kv(qkv, None, pages) == Cost(moved, 0)


@pytest.mark.parametrize(
    ("sequences", "tables", "window", "positions_read", "pairs"),
    [
        # One that decodes: its row sees all 20.
        ([(20, 1)], [[4, 5]], None, 20, 20),
        # A prefill of 3 sees 1 + 2 + 3.
        ([(3, 3)], [[4, 0]], None, 3, 6),
        # A chunk of 2 after 5.
        ([(7, 2)], [[4, 0]], None, 7, 6 + 7),
        # Two that decode, apart.
        ([(20, 1), (17, 1)], [[4, 5], [6, 7]], None, 37, 37),
        # The first block is one: 3 blocks of 16 hold less than 20 + 32 positions.
        ([(20, 1), (32, 1)], [[4, 5], [4, 6]], None, 48, 52),
        # A window of 8 sees 12 … 19; of a chunk of 2 that ends at 20, 11 … 19.
        ([(20, 1)], [[4, 5]], 8, 8, 8),
        ([(20, 2)], [[4, 5]], 8, 9, 16),
        # Wider than the context.
        ([(5, 2)], [[4, 0]], 8, 5, 4 + 5),
    ],
)
def test_attention_reads_what_rows_see_and_takes_two_products(
    sequences: list[tuple[int, int]],
    tables: list[list[int]],
    window: int | None,
    positions_read: int,
    pairs: int,
) -> None:
    batch, pages = case(*sequences, tables=tables)
    out = floats(len(batch.tokens), HEADS * 4)
    kv_bytes = positions_read * 2 * 2 * 4 * 2  # keys and values, heads, elements, bfloat16
    assert costs.paged_attention(batch, pages, out, window=window) == Cost(
        kv_bytes + 2 * out.nbytes, pairs * HEADS * 4 * 2 * 2
    )
