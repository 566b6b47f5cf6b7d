"""What the machine can do: the loops count what they do, and no kernel is quicker."""

import numpy as np
import pytest

from octavo.ops.ceilings import Ceilings, best_s, measure_ceilings
from octavo.ops.costs import Cost
from octavo.ops.native import PRODUCTS, NativeOps


def test_a_floor_is_the_longer_of_reading_and_multiplying() -> None:
    ceilings = Ceilings(read_bytes_per_s=100.0, operations_per_s={"bf16": 1000.0, "int8": 0.0})
    assert ceilings.floor_s(Cost(50, 100)) == 0.5
    assert ceilings.floor_s(Cost(50, 900)) == 0.9
    # No such products: only reading is known.
    assert ceilings.floor_s(Cost(50, 900), "int8") == 0.5
    assert ceilings.floor_s(Cost(50, 900), "int4") == 0.5


def test_operations_grow_with_rounds_and_pieces(ops: NativeOps) -> None:
    operands = np.zeros(4096, np.uint8)
    for form in PRODUCTS:
        one = ops.multiply(form, operands, 3, np.zeros(1, np.float32))
        assert ops.multiply(form, operands, 6, np.zeros(1, np.float32)) == 2 * one
        assert ops.multiply(form, operands, 3, np.zeros(4, np.float32)) == 4 * one
    assert ops.multiply("bf16", operands, 1, np.zeros(1, np.float32)) > 0


def test_weights_that_are_expanded_have_the_limit_of_bfloat16(expanding: str) -> None:
    ops, operands = NativeOps(threads=1, isa=expanding), np.zeros(4096, np.uint8)
    counts = {form: ops.multiply(form, operands, 3, np.zeros(1, np.float32)) for form in PRODUCTS}
    assert len(set(counts.values())) == 1


def test_reading_reads_all_of_it_once(ops: NativeOps) -> None:
    values = np.arange(4096, dtype=np.float32)
    out = np.empty(5, np.float32)
    ops.read(values.view(np.uint8), out)
    assert out.sum() == values.sum()
    assert len(np.unique(out)) == 5


def test_operands_are_checked(ops: NativeOps) -> None:
    out = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="at least 4,096 bytes"):
        ops.multiply("bf16", np.zeros(64, np.uint8), 1, out)
    with pytest.raises(TypeError, match="operands must be uint8"):
        ops.read(np.zeros(4096, np.float32), out)


def test_ceilings_of_this_machine(isa: str) -> None:
    ceilings = measure_ceilings(NativeOps(threads=1, isa=isa), budget_s=0.0)
    assert ceilings.read_bytes_per_s > 1e7
    assert ceilings.operations_per_s["bf16"] > 0
    assert set(ceilings.operations_per_s) == {"bf16", "int8", "int6", "int4"}


def test_the_shortest_call_counts() -> None:
    calls: list[int] = []
    assert 0 <= best_s(lambda: calls.append(1), 0.0) < 1
    assert len(calls) == 6  # one of them to warm up
