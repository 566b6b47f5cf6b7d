"""The pool of threads: every piece is done once, whoever is there to do it."""

import os
import subprocess
import sys
from contextlib import suppress

import numpy as np
from tests.ops.arrays import guarded, random_weight

from octavo.ops.native import NativeOps

FORK = """
import os
import numpy as np
from octavo.ops.native import NativeOps

ops = NativeOps(threads=2)
weight = ops.pack(np.ones((640, 64), "bfloat16"))
x = np.random.default_rng().standard_normal((40, 64), np.float32)
before, after = (np.full((40, 640), np.nan, np.float32) for _ in range(2))
ops.linear(x, weight, before)
child = os.fork()
ops.linear(x, weight, after)
same = (before == after).all()
if child == 0:
    del ops
    os._exit(0 if same else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not same)
"""


def test_a_forked_child_computes_alone() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True)


def test_more_threads_than_cores_or_pieces(rng: np.random.Generator, isa: str) -> None:
    weight = random_weight(rng, 300, 96)
    x = rng.standard_normal((50, 96), np.float32)
    results = []
    for threads in (1, 3, 7):
        ops = NativeOps(threads=threads, isa=isa)
        packed = ops.pack(weight)
        for _ in range(20):
            out, _ = guarded(50, 300)
            ops.linear(x, packed, out)
            results.append(out)
    assert all((result == results[0]).all() for result in results)


def test_weights_that_were_read_next_may_be_gone(rng: np.random.Generator) -> None:
    """Idle threads fetch what followed the last time, if it is there no more too."""
    ops = NativeOps(threads=2)
    x = rng.standard_normal((1, 96), np.float32)
    kept = ops.pack(random_weight(rng, 3000, 96))
    expected, out = np.empty((1, 3000), np.float32), np.empty((1, 3000), np.float32)
    ops.linear(x, kept, expected)
    for rows in rng.integers(1000, 20_000, 30).tolist():
        passing = ops.pack(random_weight(rng, rows, 96))
        ops.linear(x, passing, np.empty((1, rows), np.float32))
        ops.linear(x, kept, out)
        del passing
        ops.linear(x, kept, out)
        assert (out == expected).all()


def test_pools_come_and_go(rng: np.random.Generator) -> None:
    weight, x = random_weight(rng, 300, 96), rng.standard_normal((50, 96), np.float32)
    expected, _ = guarded(50, 300)
    first = NativeOps(threads=2)
    packed = first.pack(weight)
    first.linear(x, packed, expected)
    for _ in range(30):
        out, _ = guarded(50, 300)
        NativeOps(threads=2).linear(x, packed, out)
        assert (out == expected).all()


def test_threads_that_were_helped_may_run_where_they_could_before(
    rng: np.random.Generator,
) -> None:
    """Busy neighbours on every core take it from threads in the middle of a piece."""
    cores = os.sched_getaffinity(0)
    ops = NativeOps(threads=len(cores) + 1)
    weight = ops.pack(random_weight(rng, 3072, 576))
    x = rng.standard_normal((64, 576), np.float32)
    expected, found = (np.full((64, 3072), np.nan, np.float32) for _ in range(2))
    ops.linear(x, weight, expected)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cores]
    try:
        for _ in range(100):
            found.fill(np.nan)
            ops.linear(x, weight, found)
            np.testing.assert_array_equal(found, expected)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            assert os.sched_getaffinity(int(thread)) == cores
