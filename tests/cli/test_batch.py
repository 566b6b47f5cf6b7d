"""`octavo batch` on the demo model: a run that is killed, and the one that goes on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main

LINES = 60


def line(number: int) -> dict[str, Any]:
    talk = [{"role": "user", "content": f"Name {number + 2} animals."}]
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {"messages": talk, "max_tokens": 12}),
        "text": ("/v1/completions", {"prompt": f"{number} and", "max_tokens": 12}),
        "bad": ("/v1/completions", {"prompt": "x", "top_p": 7}),
    }
    url, body = asked["bad" if number % 10 == 9 else ("chat", "text")[number % 2]]
    return {
        "custom_id": f"line {number}",
        "method": "POST",
        "url": url,
        "body": {**body, "temperature": 0.8, "seed": number},
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("batch") / "in.jsonl"
    lines = [json.dumps(line(number)) for number in range(LINES)]
    file.write_text("\n".join([*lines[:30], "{not JSON", *lines[30:]]))
    return file


def command(source: Path, target: Path, *flags: str) -> list[str]:
    small = ("--max-model-len", "256", "--kv-cache-memory", "64MiB")
    return [
        *(sys.executable, "-m", "octavo.cli.main", "batch", str(source), str(target)),
        *small,
        *flags,
    ]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def answers_in(file: Path) -> dict[str | None, Any]:
    """What was answered, by custom ids, without what is new in each run."""
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    found = {}
    for answer in answers:
        body = answer["response"]["body"]
        choices = body.get("choices", [body.get("error")])
        found[answer["custom_id"]] = (answer["id"], answer["response"]["status_code"], choices)
    assert len(found) == len(answers), "a line was answered twice"
    return found


def test_a_batch_that_was_killed_goes_on(
    demo_model_path: Path, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    killed = subprocess.Popen(
        command(source, target, "--in-flight", "2"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not target.exists() or target.read_bytes().count(b"\n") < 12:
        assert killed.poll() is None
        time.sleep(0.01)  # the batch needs the core
    killed.kill()
    killed.wait()
    before = target.read_bytes()
    whole, torn = before[: before.rindex(b"\n") + 1], before + b'{"id":"batch_req_7_'
    target.write_bytes(torn)
    earlier = whole.count(b"\n")
    assert 12 <= earlier < LINES

    done = run(*command(source, target))
    assert done.returncode == 0, done.stderr
    assert f"; {earlier} were there before; " in done.stderr
    assert target.read_bytes().startswith(whole)
    found = answers_in(target)
    assert found.keys() == {None, *(f"line {number}" for number in range(LINES))}

    again = tmp_path / "again.jsonl"
    done = run(*command(source, again, "--max-num-seqs", "3"))
    assert done.returncode == 0, done.stderr
    summary = done.stderr.splitlines()[-1]
    assert summary.startswith(f"{LINES + 1} answers, {LINES // 10 + 1} of them errors; ")
    assert done.stdout == ""
    assert answers_in(again) == found


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("none.jsonl", "out.jsonl"), "cannot read none.jsonl: No such file or directory"),
        ((".", "out.jsonl"), "cannot read .: Is a directory"),
        (("in.jsonl", "in.jsonl"), "in.jsonl is both input and output; give another output"),
        (("in.jsonl", "."), "cannot write to .: Is a directory"),
        (("in.jsonl", "text"), "text holds something else than answers of a batch, in line 1"),
        (("in.jsonl", "out.jsonl", "--in-flight", "0"), "--in-flight must be at least 1, not 0"),
        (("in.jsonl", "out.jsonl", "--port", "1"), "unrecognized arguments: --port 1"),
        (("in.jsonl",), "the following arguments are required: OUTPUT"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: tuple[str, ...],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text("{}\n")
    (tmp_path / "text").write_text("a poem\n")
    try:
        code = main(["batch", *arguments])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"octavo: error: {complaint}")
    assert (tmp_path / "text").read_text() == "a poem\n"
    assert (tmp_path / "in.jsonl").read_text() == "{}\n"


def test_a_terminal_has_a_bar(demo_model_path: Path, source: Path, tmp_path: Path) -> None:
    lines = source.read_text().splitlines()[:3]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    leader, follower = os.openpty()
    with subprocess.Popen(
        command(tmp_path / "in.jsonl", tmp_path / "out.jsonl"),
        stdout=subprocess.PIPE,
        stderr=follower,
    ) as process:
        os.close(follower)
        shown = b""
        try:
            while chunk := os.read(leader, 4096):
                shown += chunk
        except OSError:  # the other end is closed
            pass
        os.close(leader)
    assert process.returncode == 0
    assert "█" * 30 + " 3/3 answers, " in shown.decode()
    assert shown.decode().splitlines()[-1].startswith("3 answers, 0 of them errors; ")
