"""Native attention against the float64 reference, and against itself bit for bit.

Truth is the reference on the same pages: keys and values are rounded once, to bfloat16 or to int8,
so that only the float32 arithmetic differs.
"""

from dataclasses import replace
from typing import cast, get_args

import numpy as np
import numpy.typing as npt
import pytest
from tests.ops.arrays import expands
from tests.ops.paging import (
    NEVER,
    PagedStories,
    Part,
    assert_near,
    exact_stories,
    random_rope,
    random_stories,
)

from octavo.ops.api import KVLayout, KVType
from octavo.ops.native import NativeOps
from octavo.ops.reference import ReferenceOps

SCALE = 0.21


@pytest.fixture(params=get_args(KVType))
def dtype(request: pytest.FixtureRequest) -> KVType:
    return cast(KVType, request.param)


def layout_of(
    head_dim: int = 64,
    kv_heads: int = 2,
    block_size: int = 16,
    dtype: KVType = "bfloat16",
) -> KVLayout:
    return KVLayout(2, kv_heads, head_dim, block_size, dtype)


def chunks(story: int, *lengths: int) -> list[Part]:
    """Consecutive parts of a story, of the given lengths."""
    stops = np.cumsum(lengths)
    return [
        Part(story, int(stop) - length, int(stop))
        for length, stop in zip(lengths, stops, strict=True)
    ]


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 6, 50])
def test_head_and_block_sizes(
    ops: NativeOps, rng: np.random.Generator, head_dim: int, block_size: int, dtype: KVType
) -> None:
    layout = layout_of(head_dim, block_size=block_size, dtype=dtype)
    stories = random_stories(rng, [275, 9], query_heads=6, layout=layout)
    paged = PagedStories(rng, stories, layout, layer=1)
    scale = head_dim**-0.5
    paged.attend(ops, [Part(0, 0, 255), Part(1, 0, 1)], scale=scale)
    parts = [Part(1, 1, 9), Part(0, 255, 275)]
    outs = paged.attend(ops, parts, scale=scale)
    assert_near(ops, outs, paged.attend(ReferenceOps(), parts, scale=scale))


@pytest.mark.parametrize("group", range(1, 9))
def test_group_sizes(ops: NativeOps, rng: np.random.Generator, group: int, dtype: KVType) -> None:
    layout = layout_of(32, dtype=dtype)
    stories = random_stories(rng, [70, 300], query_heads=2 * group, layout=layout)
    paged = PagedStories(rng, stories, layout, layer=0)
    paged.attend(ops, [Part(1, 0, 280)], scale=SCALE)
    parts = [Part(0, 0, 70), Part(1, 280, 300)]
    outs = paged.attend(ops, parts, scale=SCALE)
    assert_near(ops, outs, paged.attend(ReferenceOps(), parts, scale=SCALE))


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 255, 256, 257, 511, 513, 1000, 5000])
def test_decode_at_any_context(
    ops: NativeOps, rng: np.random.Generator, context: int, dtype: KVType
) -> None:
    layout = layout_of(64, kv_heads=1, dtype=dtype)
    stories = random_stories(rng, [context], query_heads=3, layout=layout)
    paged = PagedStories(rng, stories, layout, layer=0)
    qkv, batch, pages = paged.batch([Part(0, 0, context)])
    ops.rope_write_kv(qkv, batch, None, pages)
    last = [Part(0, context - 1, context)]
    outs = paged.attend(ops, last, scale=SCALE)
    assert_near(ops, outs, paged.attend(ReferenceOps(), last, scale=SCALE))


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("head_dim", "query_heads"), [(64, 6), (80, 2), (128, 8), (50, 14), (6, 66)]
)
@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_weights_that_no_rounding_changes(
    ops: NativeOps,
    rng: np.random.Generator,
    head_dim: int,
    query_heads: int,
    block_size: int,
    window: int | None,
) -> None:
    layout = layout_of(head_dim, block_size=block_size)
    stories = exact_stories(rng, [603, 41, 300], query_heads=query_heads, layout=layout)
    paged = PagedStories(rng, stories, layout, layer=1)
    for story, length in ((0, 520), (2, 299)):
        paged.write(ops, Part(story, 0, length))
    parts = [Part(0, 520, 603), Part(1, 0, 41), Part(2, 299, 300)]
    outs = paged.attend(ops, parts, scale=np.log(2), window=window)
    truths = paged.attend(ReferenceOps(), parts, scale=np.log(2), window=window)
    for out, truth in zip(outs, truths, strict=True):
        np.testing.assert_allclose(out, truth, rtol=2e-5, atol=4e-6)


def test_scores_far_apart_keep_their_accuracy(
    ops: NativeOps, isa: str, rng: np.random.Generator
) -> None:
    layout = layout_of(64)
    stories = random_stories(rng, [600], query_heads=2, layout=layout)
    stories[0].qkv[:, :128] = np.round(stories[0].qkv[:, :128] * 8)  # bfloat16 holds them
    paged = PagedStories(rng, stories, layout, layer=0)
    part = [Part(0, 0, 600)]
    truths = paged.attend(ReferenceOps(), part, scale=1.0)
    outs = paged.attend(ops, part, scale=1.0)
    np.testing.assert_allclose(outs[0], truths[0], rtol=2e-3, atol=2**-6 if expands(isa) else 2e-4)


def test_same_bits_for_every_cut_company_place_and_thread_count(
    isa: str, rng: np.random.Generator, dtype: KVType
) -> None:
    layout = layout_of(64, kv_heads=3, dtype=dtype)
    stories = random_stories(rng, [700, 333, 40, 1], query_heads=9, layout=layout)
    rope = random_rope(rng, 700, 64)
    one, two = NativeOps(threads=1, isa=isa), NativeOps(threads=2, isa=isa)
    paged = PagedStories(rng, stories, layout, layer=1)
    whole = paged.attend(one, [Part(0, 0, 700)], scale=SCALE, rope=rope)[0]

    def computed(ops: NativeOps, steps: list[list[Part]]) -> np.ndarray:
        """Story 0, from these steps on fresh pages."""
        elsewhere = PagedStories(rng, stories, layout, layer=0)
        rows = [
            out
            for parts in steps
            for part, out in zip(
                parts, elsewhere.attend(ops, parts, scale=SCALE, rope=rope), strict=True
            )
            if part.story == 0
        ]
        return np.concatenate(rows)

    for ops in (one, two):
        assert (computed(ops, [[Part(0, 0, 700)]]) == whole).all()
        for length in (7, 16, 64, 300):
            steps = [[Part(0, at, min(at + length, 700))] for at in range(0, 700, length)]
            assert (computed(ops, steps) == whole).all()
        others = [[Part(1, 0, 333), Part(3, 0, 1)], [Part(2, 0, 39)], [Part(2, 39, 40)]]
        mine = chunks(0, 100, 1, 599)
        mixed = [[*other, part] for other, part in zip(others, mine, strict=True)]
        assert (computed(ops, mixed) == whole).all()
        assert (computed(ops, [parts[::-1] for parts in mixed]) == whole).all()


def test_one_token_at_a_time_gives_the_bits_of_the_prompt(
    ops: NativeOps, rng: np.random.Generator, dtype: KVType
) -> None:
    layout = layout_of(32, kv_heads=1, block_size=32, dtype=dtype)
    stories = random_stories(rng, [530], query_heads=4, layout=layout)
    whole = PagedStories(rng, stories, layout, 0).attend(ops, [Part(0, 0, 530)], scale=SCALE)
    paged = PagedStories(rng, stories, layout, 1)
    singles = [paged.attend(ops, [part], scale=SCALE)[0] for part in chunks(0, *[1] * 530)]
    assert (np.concatenate(singles) == whole[0]).all()


SHARED = (  # (parent, positions shared, length); the parent is told before the child
    (None, 0, 1600),
    (0, 1536, 1537),
    (0, 1280, 1400),
    (2, 1280, 1290),
    (0, 700, 1100),
    (0, 255, 400),
    (None, 0, 530),
    (6, 512, 513),
    (6, 512, 512),
    (6, 256, 600),
    (None, 0, 40),
    *[(4, 1000, 1001 + 16 * place) for place in range(9)],
)


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(9, 3), (4, 4), (8, 1), (60, 1)])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [(16, 16, "bfloat16"), (6, 64, "bfloat16"), (16, 16, "int8")],
)
@pytest.mark.parametrize("window", [None, 700])
def test_same_bits_whoever_shares_the_beginning(
    isa: str,
    rng: np.random.Generator,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: KVType,
    window: int | None,
) -> None:
    """Those that decode in the blocks of others get what they get alone, in blocks of their own."""
    layout = layout_of(head_dim, kv_heads, block_size, dtype)
    lengths = [length for _, _, length in SHARED]
    stories = random_stories(rng, lengths, query_heads=query_heads, layout=layout)
    own = PagedStories(rng, stories, layout, 0)
    together = PagedStories(rng, stories, layout, 1)
    for child, (parent, positions, _) in enumerate(SHARED):
        if parent is not None:
            stories[child].qkv[:positions] = stories[parent].qkv[:positions]
            together.share(child, parent, positions // block_size)
    parts = [Part(story, length - 1, length) for story, length in enumerate(lengths)]
    before = [Part(part.story, 0, part.start) for part in parts]
    ops, alone = NativeOps(threads=2, isa=isa), NativeOps(threads=1, isa=isa)
    for paged in (own, together):
        for part in before:
            paged.write(ops, part)
    expected = [own.attend(alone, [part], scale=SCALE, window=window)[0] for part in parts]
    order = rng.permutation(len(parts))
    extra = Part(0, 1500, 1520)  # a chunk among them
    rows = together.attend(ops, [*(parts[i] for i in order), extra], scale=SCALE, window=window)
    for place, row in zip(order, rows, strict=False):
        assert (row == expected[place]).all(), f"story {place}"
    assert (rows[-1] == own.attend(alone, [extra], scale=SCALE, window=window)[0]).all()


def test_positions_after_a_row_do_not_reach_it(
    ops: NativeOps, rng: np.random.Generator, dtype: KVType
) -> None:
    layout = layout_of(64, dtype=dtype)
    stories = random_stories(rng, [290], query_heads=4, layout=layout)
    clean = PagedStories(rng, stories, layout, 0).attend(ops, [Part(0, 0, 290)], scale=SCALE)[0]
    stories[0].qkv[271:, 4 * 64 :] = np.nan
    torn = PagedStories(rng, stories, layout, 0).attend(ops, [Part(0, 0, 290)], scale=SCALE)[0]
    assert (torn[:271] == clean[:271]).all()
    assert np.isnan(torn[271:]).all()


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_broken_query_shows_in_its_own_row_only(
    ops: NativeOps, rng: np.random.Generator, broken: float
) -> None:
    layout = layout_of(64)
    stories = random_stories(rng, [300], query_heads=4, layout=layout)
    clean = PagedStories(rng, stories, layout, 0).attend(ops, [Part(0, 0, 300)], scale=SCALE)[0]
    stories[0].qkv[280, :64] = broken
    out = PagedStories(rng, stories, layout, 0).attend(ops, [Part(0, 0, 300)], scale=SCALE)[0]
    assert np.isnan(out[280, :64]).all()
    out[280, :64] = clean[280, :64]
    assert (out == clean).all()


def test_indices_outside_the_arrays_are_refused(rng: np.random.Generator) -> None:
    ops = NativeOps(threads=1)
    layout = layout_of(64)
    stories = random_stories(rng, [20], query_heads=4, layout=layout)
    paged = PagedStories(rng, stories, layout, 0)
    qkv, batch, pages = paged.batch([Part(0, 0, 20)])
    out = np.full((20, 256), np.nan, np.float32)
    with pytest.raises(ValueError, match="scale must be positive"):
        ops.paged_attention(qkv, batch, pages, out, scale=0.0)
    with pytest.raises(ValueError, match="axis 0"):
        ops.paged_attention(qkv, batch, pages, out[:19], scale=SCALE)
    for array, index, message in (
        (batch.positions, 3, "consecutive"),
        (batch.context, 0, "batch.positions|no room"),
        (batch.query_start, 1, "number of rows"),
        (pages.table, (0, 1), "outside the pool"),
    ):
        kept = array[index]
        array[index] = NEVER
        with pytest.raises(ValueError, match=message):
            ops.paged_attention(qkv, batch, pages, out, scale=SCALE)
        array[index] = kept
    assert np.isnan(out).all()


@pytest.mark.parametrize("element", [np.int8, np.float16, np.float32, np.uint16])
def test_a_pool_of_another_type_is_refused(
    rng: np.random.Generator, element: npt.DTypeLike
) -> None:
    layout = layout_of(64, dtype="int8")
    paged = PagedStories(rng, random_stories(rng, [20], query_heads=4, layout=layout), layout, 0)
    qkv, batch, pages = paged.batch([Part(0, 0, 20)])
    with pytest.raises(TypeError, match="pools must be bfloat16, or uint8 for int8 with scales"):
        NativeOps(threads=1).rope_write_kv(
            qkv, batch, None, replace(pages, pool=pages.pool.view(element))
        )
