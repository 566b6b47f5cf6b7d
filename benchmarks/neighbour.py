"""What a neighbour costs: products while another process takes half a core, beside its share.

    python benchmarks/neighbour.py [--threads 2] [--turns 7]

The matrices of SmolLM2's layers, one after the other, for one row (memory limits) and for 64 (units
do). Alone and with the neighbour, in turns. All cores are used, so the neighbour leaves 1 - its
processor time / (cores · time) of them; what is lost beyond that is waiting. Medians.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

import numpy as np
from ml_dtypes import bfloat16

from octavo.ops.native import NativeOps

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS = 30
SECONDS = 2.0
"""Of one turn."""

HALF_A_CORE = """
import time
while True:
    start = time.perf_counter()
    while time.perf_counter() - start < 0.005:
        pass
    time.sleep(0.005)
"""


class Products:
    """The products of one step, for so many rows."""

    def __init__(self, ops: NativeOps, rows: int) -> None:
        rng = np.random.default_rng()
        self._ops = ops
        self._calls = []
        for _ in range(LAYERS):
            for outputs, inputs in SHAPES:
                weight = ops.pack(
                    rng.standard_normal((outputs, inputs), np.float32).astype(bfloat16)
                )
                x = rng.standard_normal((rows, inputs), np.float32)
                self._calls.append((x, weight, np.empty((rows, outputs), np.float32)))

    def steps_per_s(self) -> float:
        """Over `SECONDS`."""
        start, steps = time.perf_counter(), 0
        while (taken := time.perf_counter() - start) < SECONDS:
            for x, weight, out in self._calls:
                self._ops.linear(x, weight, out)
            steps += 1
        return steps / taken


def processor_s(process: int) -> float:
    """What a process has used so far."""
    with open(f"/proc/{process}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def beside(products: Products, cores: int) -> tuple[float, float]:
    """Steps a second with the neighbour there, and the share of the cores that it left."""
    neighbour = subprocess.Popen([sys.executable, "-c", HALF_A_CORE])
    try:
        time.sleep(0.3)  # until it has started
        used, start = processor_s(neighbour.pid), time.perf_counter()
        speed = products.steps_per_s()
        taken = time.perf_counter() - start
        return speed, 1 - (processor_s(neighbour.pid) - used) / (cores * taken)
    finally:
        neighbour.kill()
        neighbour.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--turns", type=int, default=7)
    asked = parser.parse_args()
    ops = NativeOps(threads=asked.threads)
    print(f"{ops.name}, {asked.threads} threads on {cores} cores")
    for rows in (1, 64):
        products = Products(ops, rows)
        products.steps_per_s()
        turns = [(products.steps_per_s(), *beside(products, cores)) for _ in range(asked.turns)]
        alone, together, left = (statistics.median(column) for column in zip(*turns, strict=True))
        kept = statistics.median(both / alone for alone, both, _ in turns)
        print(
            f"{rows:>2} rows: {alone:.1f} steps/s alone, {together:.1f} beside it: {kept:.0%} kept,"
            f" {left:.0%} of the cores left, {kept / left:.2f} of that"
        )


if __name__ == "__main__":
    main()
