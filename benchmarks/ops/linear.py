"""`linear` beside the machine's ceilings and, if PyTorch is installed, beside `F.linear`.

    python benchmarks/ops/linear.py [--threads 2] [--isa avx2] [--shapes smol,qwen,llama]
        [--weights bf16,int8,int4]

For each matrix of a few models, each number of rows and each form of the weights: GFLOP/s (of
integers: GOP/s), GB/s of weights, and the larger of the two ratios to what the machine can do
(products and sums on registers; reading memory), measured in this run with as many threads; beside
it how much quicker than bfloat16. The forms take turns, so that they meet the same machine. Weights
cycle through copies that no cache holds. The best of several calls: on a shared machine the
others measure its other users.
"""

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal

import numpy as np
from ml_dtypes import bfloat16

from octavo.ops.api import GROUP, Activation, Quantised, Weight
from octavo.ops.native import NativeOps

ROWS = (1, 8, 32, 64, 128, 512)
LOOPS = {"bf16": "multiply_add", "int8": "multiply_bytes", "int4": "multiply_nibbles"}
"""Forms of the weights, and the loop that says what registers allow."""
COLD_BYTES = 128 * 2**20
FEWEST_CALLS, BUDGET_S = 5, 0.3


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    outputs: int
    inputs: int
    gated: bool = False

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs * (2 if self.gated else 1)


SHAPES = {
    "smol": (
        Shape("qkv", 960, 576),
        Shape("o", 576, 576),
        Shape("gate, up", 1536, 576, gated=True),
        Shape("down", 576, 1536),
        Shape("logits", 49152, 576),
    ),
    "qwen": (
        Shape("qkv", 1152, 896),
        Shape("gate, up", 4864, 896, gated=True),
        Shape("down", 896, 4864),
        Shape("logits", 151936, 896),
    ),
    "llama": (
        Shape("qkv", 3072, 2048),
        Shape("gate, up", 8192, 2048, gated=True),
        Shape("down", 2048, 8192),
        Shape("logits", 128256, 2048),
    ),
}


def best_s(run: Callable[[], object], budget_s: float = BUDGET_S) -> float:
    """The shortest of the calls that fit into the budget, after one that warms up."""
    run()
    times: list[float] = []
    while len(times) < FEWEST_CALLS or sum(times) < budget_s:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@contextmanager
def compiled() -> Iterator[ctypes.CDLL]:
    """The loops of ceilings.cc, built for this machine."""
    source = Path(__file__).with_name("ceilings.cc")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "ceilings.so"
        options = ["-O3", "-march=native", "-shared", "-fPIC", "-o", str(library)]
        subprocess.run(["c++", *options, str(source)], check=True)
        yield ctypes.CDLL(str(library))


def ceilings(threads: int) -> tuple[dict[str, float], float]:
    """GFLOP/s or GOP/s on registers for each form of the weights, and GB/s of reading: the sums
    over `threads` that run at once.

    In pieces of a fraction of a millisecond, so that some run undisturbed on a busy machine.
    """
    slices, floats, rounds = 64, 2**20, 100_000
    values = np.ones((threads, slices, floats), np.float32)
    with compiled() as loops, ThreadPoolExecutor(threads) as pool:

        def total(rate: Callable[[int], float]) -> float:
            return sum(pool.map(rate, range(threads))) / 1e9

        def on_registers(name: str) -> float:
            loop = getattr(loops, name)
            loop.restype = ctypes.c_double
            operations: float = loop(ctypes.c_int64(1)) * rounds
            count = ctypes.c_int64(rounds)
            return total(lambda _: operations / best_s(lambda: loop(count), 1))

        def read_rate(thread: int) -> float:
            count = ctypes.c_int64(floats)
            parts = cycle([ctypes.c_void_p(part.ctypes.data) for part in values[thread]])
            size_bytes: int = values[thread, 0].nbytes
            return size_bytes / best_s(lambda: loops.read_floats(next(parts), count), 1)

        rates = {form: on_registers(name) for form, name in LOOPS.items()}
        return rates, total(read_rate)


def weight_of(form: str, rng: np.random.Generator, shape: Shape) -> Weight:
    """Random weights: speed does not depend on them."""
    if form == "bf16":
        return rng.standard_normal((shape.outputs, shape.inputs), np.float32).astype(bfloat16)
    bits: Literal[8, 4] = 8 if form == "int8" else 4
    groups = shape.inputs // GROUP
    values = rng.integers(0, 256, (shape.outputs, groups * GROUP * bits // 8), np.uint8)
    return Quantised(bits, shape.inputs, values, np.ones((shape.outputs, groups), np.float16))


class Timed:
    """`linear` with one matrix in one form."""

    def __init__(self, ops: NativeOps, shape: Shape, form: str, rng: np.random.Generator) -> None:
        copies = max(1, min(64, COLD_BYTES // (2 * shape.weights)))
        weight = weight_of(form, rng, shape)
        packed = [
            ops.pack_gated(weight, weight) if shape.gated else ops.pack(weight)
            for _ in range(copies)
        ]
        self._ops, self._shape, self._rng, self._packed = ops, shape, rng, cycle(packed)
        self.nbytes = packed[0].nbytes

    def seconds(self, rows: int) -> float:
        x = self._rng.standard_normal((rows, self._shape.inputs), np.float32)
        out = np.empty((rows, self._shape.outputs), np.float32)
        gated: Activation | None = "silu" if self._shape.gated else None
        return best_s(lambda: self._ops.linear(x, next(self._packed), out, gated=gated))


def time_torch(shape: Shape, rows: int, threads: int, dtype: str) -> float | None:
    """`F.linear` alone, without the activation; None if PyTorch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    copies = max(1, min(64, COLD_BYTES // (kind.itemsize * shape.weights)))
    outputs = shape.weights // shape.inputs
    weights = cycle([torch.randn(outputs, shape.inputs).to(kind) for _ in range(copies)])
    x = torch.randn(rows, shape.inputs).to(kind)
    with torch.no_grad():
        linear = torch.nn.functional.linear
        return best_s(lambda: linear(x, next(weights)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--shapes", default="smol")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--weights", default=",".join(LOOPS))
    parser.add_argument("--torch", action="store_true", help="time F.linear too, in both dtypes")
    chosen = parser.parse_args()
    ops = NativeOps(threads=chosen.threads, isa=chosen.isa)
    rng = np.random.default_rng(7)
    peaks, bandwidth = ceilings(chosen.threads)
    limits = ", ".join(f"{form} {peak:.0f}" for form, peak in peaks.items())
    print(f"{ops.name}, {ops.threads} threads; ceilings in G/s: {limits}; {bandwidth:.1f} GB/s")
    for model in chosen.shapes.split(","):
        for shape in SHAPES[model]:
            timed = {form: Timed(ops, shape, form, rng) for form in chosen.weights.split(",")}
            for rows in map(int, chosen.rows.split(",")):
                seconds = {form: matrix.seconds(rows) for form, matrix in timed.items()}
                first = next(iter(seconds.values()))
                for form, own in seconds.items():
                    rate = 2 * rows * shape.weights / own / 1e9
                    gb = timed[form].nbytes / own / 1e9
                    share = max(rate / peaks[form] if peaks[form] else 0, gb / bandwidth)
                    print(
                        f"{model:6} {shape.name:9} M={rows:<4} {form:5} {own * 1e6:9.0f} us"
                        f" {rate:7.1f} G/s {gb:6.1f} GB/s {share:5.0%} {first / own:5.2f}x"
                    )
                for dtype in ("float32", "bfloat16") if chosen.torch else ():
                    other = time_torch(shape, rows, chosen.threads, dtype)
                    print("" if other is None else f"{'':24} torch {dtype} {other * 1e6:9.0f} us")


if __name__ == "__main__":
    main()
