"""What README and docs tell people to type works: code runs, commands parse, links lead on."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.cli.main import build_parser
from octavo.config import RULES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SERVER = "http://127.0.0.1:8000"


def blocks(language: str) -> list[tuple[str, str]]:
    """Every fenced block of a language, with the page it is on."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        (page.name, match[1])
        for page in PAGES
        for match in pattern.finditer(page.read_text(encoding="utf-8"))
    ]


def commands() -> list[str]:
    lines = [line for _, block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def server(demo_model_path: Path) -> Iterator[str]:
    """The address of a running server."""
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.cli.main", "serve", "--port", "0", "--max-model-len", "512"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if match := re.search(r"http://\S+", line):
                yield match[0]
                break
        else:
            pytest.fail(f"the server ended with {process.wait()}")
        process.terminate()
        process.stdout.read()
    # The front ends by the signal it was told to end with, once all answers are out.
    assert process.wait() == 0


def test_there_are_blocks() -> None:
    assert len(blocks("python")) >= 2
    assert len(commands()) >= 10


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_blocks_run(page: str, code: str, request: pytest.FixtureRequest) -> None:
    if SERVER in code:
        code = code.replace(SERVER, request.getfixturevalue("server"))
    else:
        request.getfixturevalue("demo_model_path")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("octavo ")])
def test_commands_parse(line: str) -> None:
    build_parser().parse_args(shlex.split(line)[1:])


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    target = line.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("curl ")])
def test_curl_lines_are_answered(line: str, server: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    words = shlex.split(line.replace(SERVER, server))
    done = subprocess.run(
        [words[0], "--fail", "--silent", "--show-error", *words[1:]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if '"stream": true' in line:
        assert done.stdout.rstrip().endswith("data: [DONE]")


def test_commands_are_all_of_a_kind_that_is_tested() -> None:
    known = ("octavo ", "make ", "curl ")
    assert [line for line in commands() if not line.startswith(known)] == []


def test_settings_in_the_readme_exist() -> None:
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    settings = [name for name in table if name != "demo"]
    assert len(settings) >= 5
    assert set(settings) <= set(RULES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    for target in targets:
        if not target.startswith("https://"):
            assert os.path.exists(page.parent / target), target
