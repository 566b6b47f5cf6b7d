"""Fixtures that every test may use: fresh random numbers from a printed seed, the demo model."""

import hashlib
import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

SEED = int(os.environ.get("OCTAVO_TEST_SEED") or random.SystemRandom().randrange(2**32))
os.environ["OCTAVO_TEST_SEED"] = str(SEED)  # so that all workers of a parallel run draw from it

WORKER_BYTES = 3 * 2**30

settings.register_profile("octavo", deadline=None, print_blob=True)
settings.load_profile("octavo")


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws from the same seed, unless it is given one."""
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = SEED


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One for each core that may be used; each has memory for PyTorch and the demo model."""
    from octavo.resolve import read_machine

    machine = read_machine()
    return max(1, min(machine.cores, machine.free_bytes // WORKER_BYTES))


def pytest_report_header() -> str:
    return f"octavo: inputs drawn from OCTAVO_TEST_SEED={SEED}"


@pytest.fixture(scope="session")
def run_seed() -> int:
    """The seed of the whole run, for what several tests share."""
    return SEED


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own: other tests, and their order, do not change it."""
    digest = hashlib.sha256(f"{SEED}:{request.node.nodeid}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The GGUF of the demo model, from Octavo's cache; the first run fetches it."""
    from octavo.models.reference import resolve_reference

    return resolve_reference("demo", progress=False)
