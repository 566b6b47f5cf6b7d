"""Random weights, poisoned outputs, and what an instruction set makes of its inputs."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo.ops.api import BF16, F32, Norm


def random_weight(rng: np.random.Generator, rows: int, columns: int) -> BF16:
    """Of a size that keeps products near 1."""
    weight = rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
    return weight.astype(ml_dtypes.bfloat16)


def random_norm(rng: np.random.Generator, width: int) -> Norm:
    return Norm(weight=rng.uniform(0.5, 2, width).astype(np.float32), eps=1e-5)


def guarded(rows: int, columns: int) -> tuple[F32, F32]:
    """An output full of NaN, and the larger array it lies in, whose margin is 77."""
    around = np.full((rows + 2, columns), 77, np.float32)
    out = around[1:-1]
    out[...] = np.nan
    return out, around


def margin_is_kept(around: F32) -> bool:
    return bool((around[0] == 77).all() and (around[-1] == 77).all())


def as_multiplied(isa: str, x: F32) -> npt.NDArray[Any]:
    """The activations that `isa` multiplies: sets with bfloat16 units round them."""
    return x.astype(ml_dtypes.bfloat16) if isa.startswith(("avx512_bf16", "amx")) else x


def expands(isa: str) -> bool:
    """Does `isa` multiply quantised weights as bfloat16? Other sets multiply integers."""
    return isa.startswith("amx")
