"""The same inputs give the same plans, decisions and events, byte for byte, in any process."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from random import Random

from tests.core.serving import Serving, random_request, random_setup

ROOT = Path(__file__).parent.parent.parent


def journal(seed: int, runs: int = 20) -> str:
    """A digest of every plan and ending of some random runs."""
    digest = hashlib.sha256()
    for run in range(runs):
        random = Random(f"{seed} {run}")
        serving = Serving(random_setup(random))
        for number in range(random.randint(1, 10)):
            serving.submit(random_request(random, f"r{number}"))
            for _ in range(random.randint(0, 5)):
                serving.step()
        serving.finish()
        for said in (serving.plans, serving.endings, serving.scheduler.counters):
            digest.update(repr(said).encode())
    return digest.hexdigest()


def journal_elsewhere(seed: int, hash_seed: str) -> str:
    code = f"from tests.core.test_replay import journal; print(journal({seed}))"
    paths = [str(ROOT), *sys.path]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_two_processes_decide_the_same(seed: int) -> None:
    here = journal(seed)
    assert here == journal_elsewhere(seed, "1") == journal_elsewhere(seed, "2")


def test_other_inputs_give_other_plans(seed: int) -> None:
    assert journal(seed) != journal(seed + 1)
