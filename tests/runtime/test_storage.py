"""The memory of the pool: what lies there before anything is written."""

import itertools
from typing import get_args

import numpy as np
import pytest

from octavo.ops.api import F32, KVLayout, KVType
from octavo.ops.reference import read_token, scaled_page, write_token
from octavo.runtime.storage import KVStorage

BLOCKS = 3


def storage(dtype: KVType) -> KVStorage:
    return KVStorage(KVLayout(layers=2, kv_heads=3, head_dim=6, block_size=32, dtype=dtype), BLOCKS)


@pytest.mark.parametrize("dtype", get_args(KVType))
def test_a_pool_is_its_blocks(dtype: KVType) -> None:
    kept = storage(dtype)
    assert kept.pool.shape == (BLOCKS, *kept.layout.shape)
    assert kept.nbytes == BLOCKS * kept.layout.block_bytes
    assert kept.pool[0].nbytes == kept.layout.block_bytes
    assert kept.pool.flags.c_contiguous


@pytest.mark.parametrize(("dtype", "head_bytes"), [("bfloat16", 12), ("int8", 4 + 6)])
def test_what_a_token_costs(dtype: KVType, head_bytes: int) -> None:
    assert storage(dtype).layout.block_bytes == 32 * 2 * 2 * 3 * head_bytes


@pytest.mark.parametrize("dtype", get_args(KVType))
def test_what_is_poisoned_shows(dtype: KVType, rng: np.random.Generator) -> None:
    """All that is read of a token is NaN, until that token is written."""
    kept = storage(dtype)
    kept.poison()
    places = list(itertools.product(range(BLOCKS), range(2), (0, 31)))
    assert all(np.isnan(read(kept, place)).all() for place in places)
    key, value = rng.standard_normal((2, 3, 6))
    write_token(kept.pool, kept.layout, *places[-1], key, value)
    assert np.isfinite(read(kept, places.pop())).all()
    assert all(np.isnan(read(kept, place)).all() for place in places)


def read(kept: KVStorage, place: tuple[int, int, int]) -> F32:
    return np.array(read_token(kept.pool, kept.layout, *place), np.float32)


def test_the_scales_of_int8_are_poisoned() -> None:
    """Integers can say nothing of themselves."""
    kept = storage("int8")
    kept.poison()
    for part in (0, 1):
        scales, integers = scaled_page(kept.pool, kept.layout, 2, 1, part)
        assert np.isnan(scales).all()
        assert (integers == -1).all()
