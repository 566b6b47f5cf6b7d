"""`linear` beside the machine's ceilings and, if PyTorch is installed, beside `F.linear`.

    python benchmarks/ops/linear.py [--threads 2] [--isa avx2] [--shapes smol,qwen,llama]

For each matrix of a few models and each number of rows: GFLOP/s, GB/s of weights, and the larger of
the two ratios to what the machine can do (multiply-adds on registers; reading memory), measured
in this run with as many threads. Weights cycle through copies that no cache holds. The best of
several calls: on a shared machine the others measure its other users.
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

import ml_dtypes
import numpy as np

from octavo.ops.api import Activation
from octavo.ops.native import NativeOps

ROWS = (1, 8, 32, 64, 128, 512)
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


def ceilings(threads: int) -> tuple[float, float]:
    """GFLOP/s of multiply-adds and GB/s of reading: the sum over `threads` that run at once.

    In pieces of a fraction of a millisecond, so that some run undisturbed on a busy machine.
    """
    slices, floats, rounds = 64, 2**20, 100_000
    values = np.ones((threads, slices, floats), np.float32)
    with compiled() as loops, ThreadPoolExecutor(threads) as pool:
        loops.multiply_add.restype = ctypes.c_double
        operations: float = loops.multiply_add(ctypes.c_int64(1)) * rounds

        def multiply_rate(_: int) -> float:
            count = ctypes.c_int64(rounds)
            return operations / best_s(lambda: loops.multiply_add(count), 1)

        def read_rate(thread: int) -> float:
            count = ctypes.c_int64(floats)
            parts = cycle([ctypes.c_void_p(part.ctypes.data) for part in values[thread]])
            size_bytes: int = values[thread, 0].nbytes
            return size_bytes / best_s(lambda: loops.read_floats(next(parts), count), 1)

        def total(rate: Callable[[int], float]) -> float:
            return sum(pool.map(rate, range(threads))) / 1e9

        return total(multiply_rate), total(read_rate)


def time_octavo(ops: NativeOps, shape: Shape, rows: int, rng: np.random.Generator) -> float:
    copies = max(1, min(64, COLD_BYTES // (2 * shape.weights)))
    weight = rng.standard_normal((shape.outputs, shape.inputs), np.float32)
    weight = weight.astype(ml_dtypes.bfloat16)
    packed = cycle(
        [ops.pack_gated(weight, weight) if shape.gated else ops.pack(weight) for _ in range(copies)]
    )
    x = rng.standard_normal((rows, shape.inputs), np.float32)
    out = np.empty((rows, shape.outputs), np.float32)
    gated: Activation | None = "silu" if shape.gated else None
    return best_s(lambda: ops.linear(x, next(packed), out, gated=gated))


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
    parser.add_argument("--torch", action="store_true", help="time F.linear too, in both dtypes")
    chosen = parser.parse_args()
    ops = NativeOps(threads=chosen.threads, isa=chosen.isa)
    rng = np.random.default_rng(7)
    peak, bandwidth = ceilings(chosen.threads)
    print(f"{ops.name}, {ops.threads} threads; ceilings {peak:.0f} GFLOP/s, {bandwidth:.1f} GB/s")
    for model in chosen.shapes.split(","):
        for shape in SHAPES[model]:
            for rows in map(int, chosen.rows.split(",")):
                seconds = time_octavo(ops, shape, rows, rng)
                gflops = 2 * rows * shape.weights / seconds / 1e9
                gb = 2 * shape.weights / seconds / 1e9
                line = (
                    f"{model:6} {shape.name:9} M={rows:<4} {seconds * 1e6:9.0f} us"
                    f" {gflops:7.1f} GFLOP/s {gb:6.1f} GB/s"
                    f" {max(gflops / peak, gb / bandwidth):5.0%}"
                )
                for dtype in ("float32", "bfloat16") if chosen.torch else ():
                    other = time_torch(shape, rows, chosen.threads, dtype)
                    line += "" if other is None else f"  {dtype} {other / seconds:5.2f}x"
                print(line, flush=True)


if __name__ == "__main__":
    main()
