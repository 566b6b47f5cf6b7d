"""Which instruction sets this machine runs: those that it lacks are skipped for all to see."""

import ml_dtypes
import numpy as np
import pytest

from octavo.ops.native import NativeOps, available_sets
from octavo.ops.reference import ReferenceOps

SETS = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")


@pytest.mark.parametrize("isa", SETS)
def test_a_set_runs_on_this_machine(isa: str, rng: np.random.Generator) -> None:
    if isa not in available_sets():
        pytest.skip(f"this machine does not run {isa}: only a double of it, if any, was tested")
    x = rng.standard_normal((5, 70), np.float32)
    weight = rng.standard_normal((33, 70), np.float32).astype(ml_dtypes.bfloat16)
    outs = []
    for ops in (NativeOps(threads=1, isa=isa), ReferenceOps()):
        out = np.full((5, 33), np.nan, np.float32)
        ops.linear(x, ops.pack(weight), out)
        outs.append(out)
    np.testing.assert_allclose(outs[0], outs[1], rtol=2e-2, atol=0.15)


def test_no_set_is_missing_from_the_list() -> None:
    real = {name for name in available_sets() if not name.endswith("_emulated")}
    assert real <= {*SETS}
