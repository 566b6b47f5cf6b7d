"""A run can be repeated from the seed it prints, whatever its number of workers."""

import os
import re
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).with_name("conftest.py")
DRAWS = """
import os

import pytest
from hypothesis import given, settings, strategies as st

@pytest.mark.parametrize("number", range(4))
def test_draws(number, seed, run_seed):
    drawn = []

    @settings(max_examples=3)
    @given(st.integers())
    def draw(integer):
        drawn.append(integer)

    draw()
    with open(f"{os.environ['DRAWN']}.{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}", "a") as f:
        print(number, run_seed, seed, *drawn, file=f)
"""


def run(folder: Path, name: str, *arguments: str, seed: str = "") -> tuple[str, dict[str, str]]:
    """The seed in the header, and what each worker's tests have drawn."""
    environment = {**os.environ, "OCTAVO_TEST_SEED": seed, "DRAWN": str(folder / name)}
    for variable in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        environment.pop(variable, None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"--rootdir={folder}", *arguments, str(folder)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    header = re.search(r"OCTAVO_TEST_SEED=(\d+)", done.stdout)
    assert header is not None
    return header[1], {
        path.suffix[1:]: path.read_text(encoding="utf-8") for path in folder.glob(f"{name}.*")
    }


def test_all_workers_draw_from_the_seed_that_is_printed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "test_draws.py").write_text(DRAWS, encoding="utf-8")
    seed, drawn = run(tmp_path, "parallel", "-n2")
    assert drawn.keys() == {"gw0", "gw1"}
    lines = sorted(line for lines in drawn.values() for line in lines.splitlines())
    assert {line.split()[1] for line in lines} == {seed}
    assert len({line.split()[2] for line in lines}) == len(lines) == 4
    again, alone = run(tmp_path, "serial", "-n0", seed=seed)
    assert again == seed
    assert alone["alone"].splitlines() == lines
