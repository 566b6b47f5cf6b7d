"""Blocks leave and come back as they were."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from octavo.core.plan import Move
from octavo.ops.api import KVLayout, KVType
from octavo.runtime.movers import Mover, measured_bytes_per_s
from octavo.runtime.storage import KVStorage

LAYOUT = KVLayout(layers=2, kv_heads=3, head_dim=4, block_size=32)


@pytest.mark.parametrize("dtype", get_args(KVType))
def test_every_bit_comes_back(dtype: KVType, rng: np.random.Generator) -> None:
    """NaNs of any kind too."""
    layout = replace(LAYOUT, dtype=dtype)
    pool, arena = KVStorage(layout, 5), KVStorage(layout, 3)
    bits = pool.pool.view(np.uint8)
    bits[...] = rng.integers(0, 1 << 8, bits.shape, np.uint8)
    before = bits.copy()
    mover = Mover(pool, arena)
    moves = [Move("out", 4, 0), Move("out", 1, 2), Move("in", 0, 2)]
    assert mover.move_out(moves) == 2
    np.testing.assert_array_equal(bits, before)
    bits[[1, 4]] = 0
    assert mover.move_in(moves) == 1
    assert mover.move_in([Move("in", 1, 0), Move("in", 4, 2)]) == 2
    np.testing.assert_array_equal(bits[0], before[1])
    np.testing.assert_array_equal(bits[1], before[4])
    np.testing.assert_array_equal(bits[4], before[1])
    np.testing.assert_array_equal(bits[[2, 3]], before[[2, 3]])


@pytest.mark.parametrize("other", [{"layers": 1}, {"dtype": "int8"}])
def test_a_block_must_fit_a_slot(other: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="fit"):
        Mover(KVStorage(LAYOUT, 2), KVStorage(replace(LAYOUT, **other), 2))


def test_the_bandwidth_is_that_of_the_best_copy() -> None:
    times = iter([0.0, 1.0, 10.0, 10.5, 20.0, 22.0])
    assert measured_bytes_per_s(lambda: next(times)) == 16 * 2**20 / 0.5


def test_the_bandwidth_of_this_machine_is_one() -> None:
    assert 1e8 < measured_bytes_per_s() < 1e13
