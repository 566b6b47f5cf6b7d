"""Paged attention beside the machine's read bandwidth, and beside one contiguous slab a sequence.

    python benchmarks/ops/attention.py [--threads 2] [--isa avx2]

Decode reads all keys and values once: GB/s of them, on a pool larger than the caches, layer by
layer as a model does. Prefill: 4 E Hq operations for each row and position it sees, in GFLOP/s.
The slab is the same kernel on blocks as long as the context; only the placement differs. Medians.
"""

import argparse
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np

from octavo.ops.api import F32, Batch, KVLayout, KVPages
from octavo.ops.native import NativeOps
from octavo.units import ceil_div


def median_s(run: Callable[[], object], repeats: int) -> float:
    """The median time of a call, after one that warms up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def read_gb_s() -> float:
    """The speed at which BLAS, with all its threads, reads an array that no cache holds."""
    values = np.ones(64 * 2**20, np.float32)
    return values.nbytes / median_s(lambda: values.dot(values), 7) / 1e9


class Case:
    """Sequences of one context length in a filled pool, their last `rows` positions to compute; the
    first `shared` positions are in the same blocks."""

    def __init__(
        self,
        rng: np.random.Generator,
        layout: KVLayout,
        *,
        heads: int,
        sequences: int,
        context: int,
        rows: int,
        shared: int = 0,
    ) -> None:
        count = ceil_div(context, layout.block_size)
        blocks = sequences * count
        filling = rng.standard_normal(2**16, np.float32).astype(ml_dtypes.bfloat16)
        self.pool = np.resize(filling, (blocks, *layout.shape))
        self.table = rng.permutation(blocks).astype(np.int32).reshape(sequences, count)
        self.table[:, : shared // layout.block_size] = self.table[0, : shared // layout.block_size]
        width = (heads + 2 * layout.kv_heads) * layout.head_dim
        self.qkv: F32 = rng.standard_normal((sequences * rows, width), np.float32)
        self.out = np.empty((sequences * rows, heads * layout.head_dim), np.float32)
        self.layout = layout
        self.batch = Batch(
            tokens=np.zeros(sequences * rows, np.int32),
            positions=np.tile(np.arange(context - rows, context, dtype=np.int32), sequences),
            query_start=np.arange(0, sequences * rows + 1, rows, dtype=np.int32),
            context=np.full(sequences, context, np.int32),
            tables=(self.table,),
            logit_rows=np.zeros(0, np.int32),
        )
        positions = self.batch.positions.astype(np.int64) + 1
        self.kv_bytes = 4 * layout.head_dim * layout.kv_heads * sequences * context
        self.operations = int(4 * layout.head_dim * heads * positions.sum())

    def step(self, ops: NativeOps) -> None:
        """One call for each layer."""
        for layer in range(self.layout.layers):
            pages = KVPages(pool=self.pool, layout=self.layout, layer=layer, table=self.table)
            ops.paged_attention(
                self.qkv, self.batch, pages, self.out, scale=self.layout.head_dim**-0.5
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    ops = NativeOps(threads=asked.threads, isa=asked.isa)
    rng = np.random.default_rng()
    limit = read_gb_s()
    print(f"{ops.name}, {asked.threads} threads; BLAS dot reads {limit:.1f} GB/s")

    def measure(block_size: int, layers: int, **case: int) -> tuple[float, Case]:
        layout = KVLayout(
            layers=layers,
            kv_heads=case.pop("kv_heads"),
            head_dim=case.pop("head_dim"),
            block_size=block_size,
        )
        made = Case(rng, layout, **case)
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
            speed = case.kv_bytes * case.layout.layers / taken / 1e9
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
            print(f"{block_size:>21} {case.operations / taken / 1e9 / asked.threads:>8.1f}")
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
        cases = [Case(rng, layout, shared=shared, **sizes) for shared in (0, prefix)]
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
