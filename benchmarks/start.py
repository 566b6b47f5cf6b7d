"""What a start costs: processor time of its parts, and the most memory it took.

    python benchmarks/start.py demo
    python benchmarks/start.py FOLDER --quantization none int8 --runs 5

Each figure is the median of several fresh processes. Processor time counts all threads, so that a
busy machine changes it little; on a quiet one a start takes less, since two threads load.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import get_args

from octavo.config import Quantization

PARTS = ("imports", "headers", "weights", "tokenizer")


def measure(model: str, quantization: Quantization) -> dict[str, float]:
    """Seconds of processor time of each part in this process, and MiB."""
    marks = [time.process_time()]
    from octavo.engine.build import tokenizer_of
    from octavo.models.loader import load_model, open_model
    from octavo.models.reference import resolve_reference
    from octavo.ops.native import NativeOps

    path = resolve_reference(model, progress=False)
    ops = NativeOps(threads=2)
    marks.append(time.process_time())
    opened = open_model(path)
    marks.append(time.process_time())
    loaded = load_model(opened, ops, 512, quantization=quantization)
    marks.append(time.process_time())
    tokenizer_of(path, opened)
    marks.append(time.process_time())
    spent = dict(zip(PARTS, (b - a for a, b in pairwise(marks)), strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**spent, "weights MiB": loaded.weight_bytes / 2**20, "peak MiB": peak}


def in_fresh_process(model: str, quantization: str) -> dict[str, float]:
    command = [sys.executable, __file__, model, "--quantization", quantization, "--inside"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--quantization", nargs="+", default=get_args(Quantization))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(measure(arguments.model, arguments.quantization[0])))
        return
    for quantization in arguments.quantization:
        runs = [in_fresh_process(arguments.model, quantization) for _ in range(arguments.runs)]
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        seconds = ", ".join(f"{name} {medians[name]:.2f} s" for name in PARTS)
        weights, peak = medians["weights MiB"], medians["peak MiB"]
        print(f"{quantization}: {seconds}; weights {weights:.0f} MiB, peak {peak:.0f} MiB")


if __name__ == "__main__":
    main()
