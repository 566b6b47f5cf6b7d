"""What this machine can do at most, measured: products and sums on registers, reading memory.

A kernel is judged by its share of these, measured in the same run with the same threads and
instruction set: figures of a shared machine drift by more than most changes are worth.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import numpy.typing as npt

from octavo.ops.costs import Cost, Products
from octavo.ops.native import PRODUCTS, NativeOps

FEWEST_CALLS = 5
TURNS = 4
"""They are measured in turn, so that a neighbour's burst of work spoils a part of each."""
BUDGET_S = 1.0
"""For each of the ceilings."""
COLD_BYTES = 256 * 2**20
"""More than caches hold."""
SLICE_BYTES = 16 * 2**20
"""Read by one call: short enough that some run undisturbed on a busy machine."""
LINE_BYTES = 64
OPERAND_BYTES = 64 * 1024
"""More than the first-level cache holds: matrix tiles are loaded from the second."""
PIECES, ROUNDS = 16, 20_000
"""Each thread takes several pieces, so that none waits long for the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """All threads together. Units: bytes a second; for each form of the weights operations a
    second, 0 where the instruction set has no such products."""

    read_bytes_per_s: float
    operations_per_s: Mapping[Products, float]

    def floor_s(self, cost: Cost, form: Products = "bf16") -> float:
        """The least that work of this cost takes: its bytes are read while it is computed."""
        rate = self.operations_per_s.get(form, 0.0)
        return max(cost.size_bytes / self.read_bytes_per_s, cost.operations / rate if rate else 0.0)


def best_s(run: Callable[[], object], budget_s: float) -> float:
    """The shortest of the calls that fit into the budget, after one that warms up.

    On a shared machine the others measure its other users.
    """
    run()
    times: list[float] = []
    while len(times) < FEWEST_CALLS or sum(times) < budget_s:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    """Zeros from the start of a cache line on: rows of matrix tiles that cross lines load at a
    third of the speed."""
    room = np.zeros(size + LINE_BYTES, np.uint8)
    start = -room.ctypes.data % LINE_BYTES
    return room[start : start + size]


def measure_ceilings(ops: NativeOps, *, budget_s: float = BUDGET_S) -> Ceilings:
    """Measure them with the threads and the instruction set of `ops`.

    Cost     four times the budget, and 256 MiB while it runs.
    """
    operands = _aligned(OPERAND_BYTES)
    values = _aligned(COLD_BYTES).reshape(COLD_BYTES // SLICE_BYTES, SLICE_BYTES)
    values += 1  # pages that nobody has written are one and the same
    slices = cycle(values)
    out = np.empty(PIECES * ops.threads, np.float32)

    def multiply(products: Products) -> float:
        """Operations a second of the best call."""
        done = ops.multiply(products, operands, ROUNDS, out)
        seconds = best_s(lambda: ops.multiply(products, operands, ROUNDS, out), budget_s / TURNS)
        return done / seconds

    def read() -> float:
        return SLICE_BYTES / best_s(lambda: ops.read(next(slices), out), budget_s / TURNS)

    turns = [(read(), {form: multiply(form) for form in PRODUCTS}) for _ in range(TURNS)]
    return Ceilings(
        read_bytes_per_s=max(rate for rate, _ in turns),
        operations_per_s={form: max(rates[form] for _, rates in turns) for form in PRODUCTS},
    )
