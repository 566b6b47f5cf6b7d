"""`linear` at the shapes of several models beside the machine's limits and, with PyTorch, beside
oneDNN with weights that it has packed.

    python benchmarks/ops/linear.py [--threads 2] [--isa avx2] [--shapes smol,qwen,llama]
        [--weights bf16,int8,int4] [--rows 1-16,32] [--cached] [--turns 3] [--torch]

What `octavo bench ops` prints of one model, with one more column: how much quicker a form of the
weights is than the first. Forms and rows take turns, so that they meet the same machine, and the
best counts. With `--cached` all calls read the same weights, and only products limit them.
"""

import argparse
from itertools import cycle

import numpy as np

from octavo.bench.ops import COLD_BYTES, LinearCase, Shape
from octavo.ops.ceilings import best_s, measure_ceilings
from octavo.ops.native import PRODUCTS, NativeOps

ROWS = (1, 8, 32, 64, 128, 512)
BUDGET_S = 0.3
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


def time_onednn(shape: Shape, rows: int, threads: int, dtype: str) -> float | None:
    """oneDNN through PyTorch, weights packed beforehand, without the activation; None if PyTorch is
    not installed, or has no such product for this machine."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    copies = max(1, min(64, COLD_BYTES // (kind.itemsize * shape.weights)))
    outputs = shape.weights // shape.inputs
    pack, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    x = torch.randn(rows, shape.inputs).to(kind)
    try:
        packed = [pack(torch.randn(outputs, shape.inputs).to(kind), rows) for _ in range(copies)]
        weights = cycle(packed)
        with torch.no_grad():
            return best_s(lambda: linear(x, next(weights), None, "none", [], ""), BUDGET_S)
    except RuntimeError:
        return None


def row_counts(text: str) -> list[int]:
    """`1-3,8` is 1, 2, 3, 8."""
    spans = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [rows for span in spans for rows in range(span[0], span[-1] + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--shapes", default="smol")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--weights", default=",".join(PRODUCTS))
    parser.add_argument("--cached", action="store_true", help="the same weights in each call")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--torch", action="store_true", help="time oneDNN too, in both dtypes")
    chosen = parser.parse_args()
    ops = NativeOps(threads=chosen.threads, isa=chosen.isa)
    rng = np.random.default_rng(7)
    ceilings = measure_ceilings(ops)
    limits = ", ".join(f"{f} {rate / 1e9:.0f}" for f, rate in ceilings.operations_per_s.items())
    reads = ceilings.read_bytes_per_s / 1e9
    print(f"{ops.name}, {ops.threads} threads; limits in G/s: {limits}; {reads:.1f} GB/s")
    for model in chosen.shapes.split(","):
        for shape in SHAPES[model]:
            cases = [
                LinearCase(ops, shape, form, rng, cached=chosen.cached)
                for form in chosen.weights.split(",")
            ]
            counts = row_counts(chosen.rows)
            turns = [
                [[case.time(rows, BUDGET_S / chosen.turns) for case in cases] for rows in counts]
                for _ in range(chosen.turns)
            ]
            for rows, *timed in zip(counts, *turns, strict=True):
                best = [min(times) for times in zip(*timed, strict=True)]
                first, _ = best[0]
                for case, (own, cost) in zip(cases, best, strict=True):
                    bound = cost._replace(size_bytes=0) if chosen.cached else cost
                    print(
                        f"{model:6} {shape.name:9} M={rows:<4} {case.form:5} {own * 1e6:9.0f} us"
                        f" {cost.operations / own / 1e9:7.1f} G/s"
                        f" {cost.size_bytes / own / 1e9:6.1f} GB/s"
                        f" {ceilings.floor_s(bound, case.form) / own:5.0%} {first / own:5.2f}x"
                    )
                for dtype in ("float32", "bfloat16") if chosen.torch else ():
                    other = time_onednn(shape, rows, chosen.threads, dtype)
                    if other is not None:
                        ratio = other / best[0][0]
                        print(f"{'':24} oneDNN {dtype} {other * 1e6:9.0f} us {ratio:5.2f}x")


if __name__ == "__main__":
    main()
