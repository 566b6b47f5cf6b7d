"""octavo replay and octavo explain, over journals written here."""

import json
from pathlib import Path
from random import Random

import pytest
from tests.core.serving import Setup, prompt
from tests.observe.recording import core_setup, random_run, watched

from octavo.cli.main import main
from octavo.core import policy
from octavo.core.request import Request
from octavo.observe.journal import Journal

SETUP = Setup(blocks=8, block_size=2, sequences=2, tokens=8)


def write(path: Path, random: Random, *names: str) -> Path:
    """A run of requests that need more blocks together than there are."""
    journal = Journal(path, core_setup(SETUP), octavo="1.2.3", started_at=0.0)
    serving = watched(SETUP, journal)
    for name in names:
        serving.submit(Request(id=name, prompt=prompt(random, 4), max_tokens=9))
    serving.finish()
    journal.close()
    return path


@pytest.fixture
def journal(tmp_path: Path, seed: int) -> Path:
    return write(tmp_path / "journal", Random(seed), "elder", "younger", "third")


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def put(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_replay_of_what_was_recorded(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(journal)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("equal: runs 1, requests 3, steps ")


def test_replay_of_random_runs_one_after_the_other(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path, random = tmp_path / "journal", Random(seed)
    for _ in range(5):
        recorder = Journal(path, core_setup(SETUP), octavo="1.2.3", started_at=0.0)
        random_run(random, watched(SETUP, recorder))
        recorder.close()
    assert main(["replay", str(path)]) == 0
    assert "runs 5" in capsys.readouterr().out


def test_replay_finds_a_changed_decision(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(journal)
    index = next(i for i, line in enumerate(lines) if '"Preempted"' in line)
    changed = json.loads(lines[index])
    (decision,) = [d for d in changed["plan"]["decisions"] if d[0] == "Preempted"]
    decision[1]["tokens_to_recompute"] += 77
    lines[index] = json.dumps(changed)
    assert main(["replay", put(journal, lines)]) == 1
    out = capsys.readouterr().out
    first, was, now = out.splitlines()
    assert first == f"different at step {changed['plan']['id']} of run 1, line {index + 1}"
    assert was.startswith("  journal: ")
    assert now.startswith("  replay:  ")
    assert was.partition(":")[2] != now.partition(":")[2]


def test_replay_names_the_file_whose_setup_cannot_be(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(journal)
    head = json.loads(lines[0])
    head["setup"]["ceilings"] = {"sequences": 1, "tokens": 1, "watermark_blocks": 1}
    assert main(["replay", put(journal, [json.dumps(head, separators=(",", ":"))])]) != 0
    assert str(journal) in capsys.readouterr().err


def test_replay_finds_a_changed_input(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(journal)
    index = next(i for i, line in enumerate(lines) if '"submit"' in line)
    changed = json.loads(lines[index])
    changed["request"]["prompt"].append(5)
    lines[index] = json.dumps(changed)
    assert main(["replay", put(journal, lines)]) == 1
    assert "different at step 0 " in capsys.readouterr().out


def test_replay_finds_a_line_that_is_gone(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(journal)
    del lines[next(i for i, line in enumerate(lines) if '"commit"' in line)]
    assert main(["replay", put(journal, lines)]) == 1
    assert "different at" in capsys.readouterr().out


def test_replay_finds_another_scheduler(
    journal: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(policy, "victim_for", lambda sequence, running: None)
    assert main(["replay", str(journal)]) == 1
    assert "Preempted" in capsys.readouterr().out


def test_a_torn_end_is_told_and_no_error(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal.write_bytes(journal.read_bytes()[:-20])
    count = len(lines_of(journal))
    assert main(["replay", str(journal)]) == 0
    assert f"line {count} was not written to its end" in capsys.readouterr().out
    assert main(["explain", str(journal)]) == 0


@pytest.mark.parametrize("command", ["replay", "explain"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a text\n", "no journal of Octavo"),
        ('{"octavo_journal":99}\n', "format 99"),
        ("", "is empty"),
        (None, "cannot read"),
    ],
)
def test_other_files_are_one_line_and_code_2(
    command: str,
    content: str | None,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "other"
    if content is not None:
        path.write_text(content)
    assert main([command, str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_explain_lists_all_requests(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(journal)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["request", "elder", "younger", "third"]


@pytest.mark.parametrize("name", ["younger", "you", "chatcmpl-younger", "cmpl-younger"])
def test_explain_tells_one_life(
    name: str, journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(journal), name]) == 0
    out = capsys.readouterr().out
    assert out.startswith("request younger: length\n")
    assert "preempted (recompute) for elder" in out
    assert "first token" in out


def test_explain_takes_the_last_run_that_knows_the_request(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path, random = tmp_path / "journal", Random(seed)
    write(path, random, "a", "b", "c")
    write(path, random, "c")
    assert main(["explain", str(path), "c"]) == 0
    assert "waited" not in capsys.readouterr().out
    assert main(["explain", str(path), "b"]) == 0
    assert "preempted" in capsys.readouterr().out
    assert main(["explain", str(path)]) == 0
    assert capsys.readouterr().out.count("\n\nrequest ") == 1  # a table for each run


def test_names_that_are_unknown_or_not_clear(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "journal", Random(seed), "abc", "abd")
    assert main(["explain", str(path), "xyz"]) == 2
    assert "knows no request 'xyz'" in capsys.readouterr().err
    assert main(["explain", str(path), "ab"]) == 2
    assert "2 requests begin with 'ab'" in capsys.readouterr().err


def test_explain_of_a_journal_that_contradicts_itself(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(journal)
    index = next(i for i, line in enumerate(lines) if '"Preempted"' in line)
    lines[index] = lines[index].replace('"beneficiary":"elder"', '"beneficiary":"nobody"')
    assert main(["explain", put(journal, lines), "younger"]) == 2
    assert f"line {index + 1} contradicts" in capsys.readouterr().err


def test_a_run_of_the_demo_model_replays(
    tmp_path: Path, demo_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal"
    flags = ("--ignore-eos", "--max-tokens", "3", "--max-model-len", "256", "--journal", str(path))
    assert main(["generate", "hi", *flags]) == 0
    assert main(["replay", str(path)]) == 0
    assert main(["explain", str(path)]) == 0
    out = capsys.readouterr().out
    assert "equal: runs 1, requests 1, steps 3" in out
    assert out.rstrip().endswith("length")


def test_a_journal_that_cannot_be_written_is_told_before_the_weights_are_read(
    tmp_path: Path, demo_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["generate", "hi", "--journal", str(tmp_path / "notes.txt")]) == 2
    assert "name another file" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"
