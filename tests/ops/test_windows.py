"""Attention with a window: each row sees the last positions only, and nothing else is followed.

Before each step the blocks that nobody needs any more are filled with NaN, and so are the positions
before the window in the block where it begins; table entries name blocks that do not exist.
"""

from dataclasses import replace

import numpy as np
import pytest
from tests.ops.paging import NEVER, PagedStories, Part, assert_near, random_rope, random_stories

from octavo.ops.api import KVLayout, KVType, Ops
from octavo.ops.native import NativeOps
from octavo.ops.reference import ReferenceOps, read_sequence

SCALE = 0.21


def layout_of(head_dim: int = 64, kv_heads: int = 2, block_size: int = 16) -> KVLayout:
    return KVLayout(layers=2, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)


def in_chunks(
    ops: Ops,
    paged: PagedStories,
    lengths: list[int],
    window: int,
    *,
    entry: int = NEVER,
    rope: object = None,
) -> np.ndarray:
    """Story 0, a chunk a step; before each what has left the window is given back."""
    outs, start = [], 0
    for length in lengths:
        paged.give_back(0, max(0, start + 1 - window), entry)
        part = Part(0, start, start + length)
        outs += paged.attend(ops, [part], scale=SCALE, window=window, rope=rope)
        start += length
    return np.concatenate(outs)


def cut(total: int, length: int) -> list[int]:
    return [min(length, total - start) for start in range(0, total, length)]


@pytest.mark.parametrize("window", [1, 5, 16, 33, 70, 400])
def test_the_reference_is_masked_attention(rng: np.random.Generator, window: int) -> None:
    layout = layout_of(8)
    stories = random_stories(rng, [70], query_heads=4, layout=layout)
    paged = PagedStories(rng, stories, layout, 0, np.float64)
    parts = [Part(0, 0, 70)]
    out = paged.attend(ReferenceOps(), parts, scale=SCALE, window=window)[0].reshape(70, 4, 8)
    qkv, _, pages = paged.batch(parts)
    keys, values = read_sequence(pages, 0, 70)
    queries = qkv.reshape(70, 8, 8)[:, :4].astype(np.float64)
    behind = np.arange(70)[:, None] - np.arange(70)
    for head in range(4):
        scores = queries[:, head] @ keys[:, head // 2].T * SCALE
        scores = np.where((behind < 0) | (behind >= window), -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        truth = weights / weights.sum(axis=1, keepdims=True) @ values[:, head // 2]
        np.testing.assert_allclose(out[:, head], truth, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("window", [1, 2, 15, 24, 255, 256, 257, 300, 600])
@pytest.mark.parametrize(
    ("block_size", "dtype"), [(16, "bfloat16"), (64, "bfloat16"), (16, "int8")]
)
def test_a_prompt_and_what_follows(
    ops: NativeOps, rng: np.random.Generator, window: int, block_size: int, dtype: KVType
) -> None:
    layout = replace(layout_of(64, block_size=block_size), dtype=dtype)
    stories = random_stories(rng, [620, 9], query_heads=6, layout=layout)
    paged = PagedStories(rng, stories, layout, layer=1)
    steps = [[Part(0, 0, 260)], [Part(1, 0, 9), Part(0, 260, 600)]]
    steps += [[Part(0, at, at + 1)] for at in range(600, 620)]
    for parts in steps:
        for part in parts:
            paged.give_back(part.story, max(0, part.start + 1 - window))
        outs = paged.attend(ops, parts, scale=SCALE, window=window)
        truths = paged.attend(ReferenceOps(), parts, scale=SCALE, window=window)
        assert_near(ops, outs, truths)


@pytest.mark.parametrize("group", [1, 3, 8, 50])
@pytest.mark.parametrize("head_dim", [50, 80, 256])
def test_group_and_head_sizes(
    ops: NativeOps, rng: np.random.Generator, group: int, head_dim: int
) -> None:
    layout, scale = layout_of(head_dim, kv_heads=1), head_dim**-0.5
    stories = random_stories(rng, [330], query_heads=group, layout=layout)
    paged = PagedStories(rng, stories, layout, layer=0)
    paged.attend(ops, [Part(0, 0, 290)], scale=scale, window=37)
    paged.give_back(0, 290 + 1 - 37)
    parts = [Part(0, 290, 330)]
    outs = paged.attend(ops, parts, scale=scale, window=37)
    assert_near(ops, outs, paged.attend(ReferenceOps(), parts, scale=scale, window=37))


@pytest.mark.parametrize("window", [1, 3, 16, 40, 250, 512])
@pytest.mark.parametrize("entry", [-1, NEVER])
def test_same_bits_for_every_cut_and_thread_count(
    isa: str, rng: np.random.Generator, window: int, entry: int
) -> None:
    layout = layout_of(64, kv_heads=3)
    stories = random_stories(rng, [700], query_heads=9, layout=layout)
    rope = random_rope(rng, 700, 64)
    one, two = NativeOps(threads=1, isa=isa), NativeOps(threads=2, isa=isa)
    paged = PagedStories(rng, stories, layout, 1)
    whole = paged.attend(one, [Part(0, 0, 700)], scale=SCALE, rope=rope, window=window)[0]
    for ops, length in ((two, 700), (one, 16), (two, 64), (two, 300), (one, 333)):
        fresh = PagedStories(rng, stories, layout, 0)
        outs = in_chunks(ops, fresh, cut(700, length), window, entry=entry, rope=rope)
        assert (outs == whole).all(), length


def test_one_token_at_a_time_gives_the_bits_of_the_prompt(
    ops: NativeOps, rng: np.random.Generator
) -> None:
    layout = layout_of(32, kv_heads=1, block_size=32)
    stories = random_stories(rng, [530], query_heads=4, layout=layout)
    for window in (1, 20, 200):
        paged = PagedStories(rng, stories, layout, 0)
        whole = paged.attend(ops, [Part(0, 0, 530)], scale=SCALE, window=window)[0]
        singles = in_chunks(ops, PagedStories(rng, stories, layout, 1), [1] * 530, window)
        assert (singles == whole).all()


def test_a_window_that_holds_all_changes_no_bit(ops: NativeOps, rng: np.random.Generator) -> None:
    layout = layout_of(64)
    stories = random_stories(rng, [600], query_heads=4, layout=layout)
    paged = PagedStories(rng, stories, layout, 0)
    full = paged.attend(ops, [Part(0, 0, 600)], scale=SCALE)[0]
    for window in (600, 601, 10**9):
        assert (paged.attend(ops, [Part(0, 0, 600)], scale=SCALE, window=window)[0] == full).all()


def test_entries_that_a_window_reaches_are_checked(rng: np.random.Generator) -> None:
    ops, layout = NativeOps(threads=1), layout_of()
    stories = random_stories(rng, [60], query_heads=4, layout=layout)
    paged = PagedStories(rng, stories, layout, 0)
    paged.attend(ops, [Part(0, 0, 50)], scale=SCALE, window=20)
    paged.tables[0][:1] = -1
    paged.attend(ops, [Part(0, 50, 60)], scale=SCALE, window=35)
    with pytest.raises(ValueError, match="outside the pool"):
        paged.attend(ops, [Part(0, 50, 60)], scale=SCALE, window=36)
    qkv, batch, pages = paged.batch([Part(0, 50, 60)])
    out = np.empty((10, 256), np.float32)
    with pytest.raises(ValueError, match="window must be at least 1"):
        ops.paged_attention(qkv, batch, pages, out, scale=1.0, window=-1)
