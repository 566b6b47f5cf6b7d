"""Every test of a native op runs in each instruction set that this machine has, and in the doubles
of the others if the build brought them."""

import pytest
from tests.ops.arrays import expands

from octavo.ops.native import NativeOps, available_sets


@pytest.fixture(params=available_sets())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[isa for isa in available_sets() if expands(isa)] or [None])
def expanding(request: pytest.FixtureRequest) -> str:
    """Those that multiply quantised weights as bfloat16."""
    if request.param is None:
        pytest.skip("this machine has no set that expands weights, and this build no double of one")
    return str(request.param)


@pytest.fixture
def ops(isa: str) -> NativeOps:
    """Two threads: that one gives the same bits has its own tests."""
    return NativeOps(threads=2, isa=isa)
