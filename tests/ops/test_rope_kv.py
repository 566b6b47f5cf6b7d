"""Native rotary embedding, KV write and block copies against the reference."""

import ml_dtypes
import numpy as np
import pytest
from tests.ops.paging import PagedStories, Part, random_rope, random_stories

from octavo.ops.api import KVLayout
from octavo.ops.native import NativeOps, available_sets
from octavo.ops.reference import ReferenceOps, scaled_page


@pytest.fixture(params=available_sets())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_pools_agree(pool: np.ndarray, truth: np.ndarray) -> None:
    """The same slots are written, with the same values but for one step of bfloat16."""
    ours, theirs = pool.astype(np.float32), truth.astype(np.float32)
    assert (np.isnan(ours) == np.isnan(theirs)).all()
    np.testing.assert_allclose(ours, theirs, rtol=2**-7, atol=1e-6)
    assert np.mean(ours[~np.isnan(ours)] == theirs[~np.isnan(theirs)]) > 0.99


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(64, 64), (128, 64), (80, 32), (96, 96), (256, 256), (6, 4), (300, 100), (64, 0)],
)
def test_agrees_with_the_reference(
    isa: str, rng: np.random.Generator, head_dim: int, rotary_dim: int, block_size: int
) -> None:
    layout = KVLayout(layers=3, kv_heads=2, head_dim=head_dim, block_size=block_size)
    stories = random_stories(rng, [90, 33], query_heads=4, layout=layout)
    rope = random_rope(rng, 90, rotary_dim) if rotary_dim else None
    paged = PagedStories(rng, stories, layout, layer=1)
    qkv, batch, pages = paged.batch([Part(0, 40, 90), Part(1, 0, 33)])
    truth = qkv.copy()
    ReferenceOps().rope_write_kv(truth, batch, rope, pages)
    expected = paged.pool.copy()
    paged.poison()
    NativeOps(threads=2, isa=isa).rope_write_kv(qkv, batch, rope, pages)
    np.testing.assert_allclose(qkv, truth, rtol=1e-6, atol=1e-6)
    assert_pools_agree(paged.pool, expected)
    written = paged.pool[:, 1, 1].astype(np.float32)
    assert np.array_equal(written, expected[:, 1, 1].astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("head_dim", [64, 80, 6, 300])
def test_eight_bits_are_those_of_the_reference(
    isa: str, rng: np.random.Generator, head_dim: int
) -> None:
    layout = KVLayout(3, kv_heads=2, head_dim=head_dim, block_size=32, dtype="int8")
    stories = random_stories(rng, [90, 33], query_heads=4, layout=layout)
    keys_and_values = stories[0].qkv.reshape(90, -1, head_dim)[:, 4:]
    keys_and_values[50] = 0
    keys_and_values[51, :, 1:] = 0  # one element alone is the greatest
    keys_and_values[52] *= np.float32(2.0**-90)
    keys_and_values[53] *= np.float32(2.0**-110)  # below what is kept
    for row, broken in enumerate([np.nan, np.inf, -np.inf], start=54):
        keys_and_values[row, 1, head_dim // 2] = broken
    paged = PagedStories(rng, stories, layout, layer=1)
    qkv, batch, pages = paged.batch([Part(0, 40, 90), Part(1, 0, 33)])
    ReferenceOps().rope_write_kv(qkv.copy(), batch, None, pages)
    expected = paged.pool.copy()
    paged.poison()
    NativeOps(threads=2, isa=isa).rope_write_kv(qkv, batch, None, pages)
    for part in (0, 1):
        for block in range(len(paged.pool)):
            ours = scaled_page(paged.pool, layout, block, 1, part)
            theirs = scaled_page(expected, layout, block, 1, part)
            assert np.array_equal(ours[0], theirs[0], equal_nan=True)
            assert (ours[1] == theirs[1]).all()


def test_same_bits_for_every_cut_and_thread_count(isa: str, rng: np.random.Generator) -> None:
    layout = KVLayout(layers=1, kv_heads=3, head_dim=80, block_size=32)
    stories = random_stories(rng, [200], query_heads=9, layout=layout)
    rope = random_rope(rng, 200, 56)
    paged = PagedStories(rng, stories, layout, layer=0)
    whole, batch, pages = paged.batch([Part(0, 0, 200)])
    NativeOps(threads=1, isa=isa).rope_write_kv(whole, batch, rope, pages)
    expected = paged.pool.copy()
    paged.poison()
    ops = NativeOps(threads=2, isa=isa)
    for start, stop in ((0, 1), (1, 18), (18, 150), (150, 200)):
        qkv, batch, pages = paged.batch([Part(0, start, stop)])
        ops.rope_write_kv(qkv, batch, rope, pages)
        assert (qkv == whole[start:stop]).all()
    assert (paged.pool.view(np.uint16) == expected.view(np.uint16)).all()


def test_rounds_to_nearest_even_and_keeps_what_is_not_finite(
    isa: str, rng: np.random.Generator
) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=32)
    stories = random_stories(rng, [16], query_heads=1, layout=layout)
    bits = rng.integers(0, 2**32, (16, 64), dtype=np.uint32)
    bits[:, ::3] = bits[:, ::3] & 0xFFFF0000 | 0x8000  # ties
    bits[0, :4] = [0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFF800001]  # ±inf, NaN that rounding ends
    stories[0].qkv[:, 32:] = bits.view(np.float32)
    paged = PagedStories(rng, stories, layout, layer=0)
    qkv, batch, pages = paged.batch([Part(0, 0, 16)])
    NativeOps(threads=1, isa=isa).rope_write_kv(qkv, batch, None, pages)
    ours = paged.pool[paged.tables[0, 0], 0, 0, 0, 0].reshape(16, 16, 2)
    keys = ours.transpose(1, 0, 2).reshape(16, 32).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = qkv[:, 32:64].astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(keys, expected, equal_nan=True)


def test_a_position_beyond_the_rotary_tables_is_refused(rng: np.random.Generator) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=32)
    stories = random_stories(rng, [20], query_heads=1, layout=layout)
    paged = PagedStories(rng, stories, layout, layer=0)
    qkv, batch, pages = paged.batch([Part(0, 0, 20)])
    with pytest.raises(ValueError, match="19 positions, not for 20"):
        NativeOps(threads=1).rope_write_kv(qkv, batch, random_rope(rng, 19, 32), pages)
    assert np.isnan(paged.pool.astype(np.float32)).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_copies_go_in_order(rng: np.random.Generator, threads: int) -> None:
    layout = KVLayout(layers=5, kv_heads=3, head_dim=64, block_size=64)
    pool = rng.standard_normal((9, *layout.shape), np.float32).astype(ml_dtypes.bfloat16)
    expected = pool.copy()
    sources, targets = (np.array(ids, np.int32) for ids in ((0, 1, 1, 3, 8), (1, 2, 7, 3, 0)))
    ReferenceOps().copy_blocks(expected, sources, targets)
    ops = NativeOps(threads=threads)
    ops.copy_blocks(pool, sources, targets)
    assert (pool == expected).all()
    with pytest.raises(ValueError, match="outside the pool"):
        ops.copy_blocks(pool, sources, targets + np.int32(2))
    assert (pool == expected).all()
