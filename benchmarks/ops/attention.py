"""Paged attention beside the machine's read bandwidth, and beside one contiguous slab a sequence.

    python benchmarks/ops/attention.py [--threads 2] [--isa avx2]

Decode reads all keys and values once: GB/s of them, on a pool larger than the caches, layer by
layer as a model does. Prefill: 4 E Hq operations for each row and position it sees, in GFLOP/s.
The slab is the same kernel on blocks as long as the context; only the placement differs. Medians.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from octavo.bench.ops import AttentionCase
from octavo.ops.api import KVLayout
from octavo.ops.ceilings import measure_ceilings
from octavo.ops.native import NativeOps


def median_s(run: Callable[[], object], repeats: int) -> float:
    """The median time of a call, after one that warms up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    ops = NativeOps(threads=asked.threads, isa=asked.isa)
    rng = np.random.default_rng()
    limit = measure_ceilings(ops).read_bytes_per_s / 1e9
    print(f"{ops.name}, {asked.threads} threads; the machine reads {limit:.1f} GB/s")

    def measure(block_size: int, layers: int, **case: int) -> tuple[float, AttentionCase]:
        layout = KVLayout(
            layers=layers,
            kv_heads=case.pop("kv_heads"),
            head_dim=case.pop("head_dim"),
            block_size=block_size,
        )
        made = AttentionCase(rng, layout, **case)
        return median_s(lambda: made.step(ops), asked.repeats), made

    print("\ndecode      blocks of   GB/s   of limit")
    for sequences, context, heads, kv_heads, head_dim in (
        (1, 8192, 9, 3, 64),
        (8, 2048, 9, 3, 64),
        (64, 256, 9, 3, 64),
        (1, 8192, 32, 8, 128),
        (1, 8192, 8, 8, 64),
    ):
        print(f"{sequences} × {context}, heads {heads}/{kv_heads} × {head_dim}")
        for block_size in (16, 64, context):
            taken, case = measure(
                block_size,
                12,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                sequences=sequences,
                context=context,
                rows=1,
            )
            speed = case.cost.size_bytes * case.layout.layers / taken / 1e9
            print(f"{block_size:>21} {speed:>6.1f} {speed / limit:>9.0%}")

    print("\nprefill     blocks of  GFLOP/s a thread")
    for rows, context, heads, kv_heads, head_dim in (
        (4096, 4096, 9, 3, 64),
        (512, 4096, 9, 3, 64),
        (2048, 2048, 32, 8, 128),
        (128, 128, 9, 3, 64),
    ):
        print(f"{rows} of {context}, heads {heads}/{kv_heads} × {head_dim}")
        for block_size in (16, 64, context):
            taken, case = measure(
                block_size,
                1,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                sequences=1,
                context=context,
                rows=rows,
            )
            print(f"{block_size:>21} {case.cost.operations / taken / 1e9 / asked.threads:>8.1f}")
    compare_shared(ops, rng, asked.repeats)


def compare_shared(ops: NativeOps, rng: np.random.Generator, repeats: int) -> None:
    """Sequences that decode after one prefix: in blocks of their own, and in the same blocks."""
    print("\ndecode after one prefix        private ms   shared ms   times as fast")
    for sequences, prefix, own, heads, kv_heads, head_dim in (
        (64, 512, 128, 9, 3, 64),
        (64, 1024, 128, 9, 3, 64),
        (64, 2048, 128, 9, 3, 64),
        (8, 2048, 128, 9, 3, 64),
        (2, 2048, 128, 9, 3, 64),
        (16, 2048, 128, 32, 8, 64),
        (16, 2048, 128, 14, 2, 64),
    ):
        layout = KVLayout(layers=4, kv_heads=kv_heads, head_dim=head_dim, block_size=16)
        sizes = {"heads": heads, "sequences": sequences, "context": prefix + own, "rows": 1}
        cases = [AttentionCase(rng, layout, shared=shared, **sizes) for shared in (0, prefix)]
        times = [
            [median_s(lambda c=case: c.step(ops), 1) for case in cases] for _ in range(repeats)
        ]
        private, shared = np.median(times, axis=0) * 1e3 / layout.layers
        print(
            f"{sequences:>3} × ({prefix} + {own}), {heads}/{kv_heads} × {head_dim}"
            f" {private:>14.2f} {shared:>11.2f} {np.median([a / b for a, b in times]):>11.1f}"
        )


if __name__ == "__main__":
    main()
