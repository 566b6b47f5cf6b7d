"""The journal: nothing is lost on the way to the file and back, and trouble stays in it."""

import dataclasses
import json
import logging
import stat
from pathlib import Path
from random import Random

import pytest
from tests.core.serving import Setup
from tests.observe.recording import Kept, core_setup, random_run, small_setup, watched

from octavo.core.calls import Cancel, Commit, CoreSetup, Plan
from octavo.core.events import Finished, PromptScored, Receipt, Token
from octavo.core.plan import Sampled, Span, StepPlan, StepResult
from octavo.errors import JournalError
from octavo.observe import journal as journal_module
from octavo.observe.journal import Entry, Header, Journal, Torn, encode, read_journal


def open_journal(path: Path, setup: CoreSetup) -> Journal:
    return Journal(path, setup, octavo="1.2.3", started_at=1234.5)


def recorded(path: Path, random: Random) -> tuple[CoreSetup, Kept]:
    """A file with one random run, and what was put in."""
    setup, kept = small_setup(random), Kept()
    journal = open_journal(path, core_setup(setup))
    random_run(random, watched(setup, journal, kept))
    journal.close()
    return core_setup(setup), kept


def without_tokens(call: object, answer: object) -> tuple[object, object]:
    """What the journal keeps of a call and its answer."""
    if isinstance(answer, tuple):
        answer = tuple(one for one in answer if not isinstance(one, Token | PromptScored))
    if isinstance(call, Commit):
        call = dataclasses.replace(call, result=dataclasses.replace(call.result, scores=()))
    return call, answer


def test_what_is_read_is_what_was_told(tmp_path: Path, seed: int) -> None:
    for number in range(20):
        path = tmp_path / f"{number}.journal"
        setup, kept = recorded(path, Random(f"{seed} {number}"))
        header, *entries = read_journal(path)
        assert header == Header(octavo_journal=1, octavo="1.2.3", started_at=1234.5, setup=setup)
        assert len(entries) == len(kept.told) >= 3
        for line, (entry, told) in enumerate(zip(entries, kept.told, strict=True), 2):
            assert isinstance(entry, Entry)
            assert entry.line == line
            assert (entry.call, entry.answer) == without_tokens(*told)


def test_every_field_of_a_plan_has_its_place() -> None:
    """A field that is added to a plan must be added here and in the journal."""
    names = {field.name for field in dataclasses.fields(StepPlan)}
    fields = {"id", "binds", "writes", "copies", "moves", "spans", "decisions", "returned"}
    assert names == fields
    assert Span._fields == ("row", "start", "stop", "tokens", "samples", "drafts")


def test_a_line_can_be_read_without_octavo() -> None:
    line = encode(Commit(2.5, StepResult(7, (Sampled(3, 42, -0.5),))), (Token("a", 0, 42, -0.5),))
    assert json.loads(line) == {
        "call": "commit",
        "now": 2.5,
        "plan": 7,
        "outcomes": [[3, 42]],
        "said": [],
    }
    assert json.loads(encode(Plan(1.0), None)) == {"call": "plan", "now": 1.0, "plan": None}


def test_a_second_run_goes_behind_the_first(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "journal"
    random = Random(seed)
    recorded(path, random)
    first = path.read_bytes()
    recorded(path, random)
    assert path.read_bytes().startswith(first)
    assert sum(isinstance(line, Header) for line in read_journal(path)) == 2


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    open_journal(path, core_setup(Setup())).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_torn_last_line_is_told_and_ended_by_the_next_run(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "journal"
    recorded(path, Random(seed))
    whole = path.read_bytes()
    lines = whole.count(b"\n")
    for cut in range(1, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-cut])
        *_, last = read_journal(path)
        assert last == Torn(lines)
    open_journal(path, core_setup(Setup())).close()
    *_, torn, header = read_journal(path)
    assert torn == Torn(lines)
    assert isinstance(header, Header)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"# a text\n", "is no journal of Octavo"),
        (b"\x00\xff\x80" * 100, "is no journal of Octavo"),
        (b'{"a": 1}\n', "is no journal of Octavo"),
        (b"[1]\n", "is no journal of Octavo"),
        (b'{"octavo_journal":2,"new":[]}\n', "format 2; this version reads format 1"),
        (b'{"octavo_journal":1}\n', "line 1 is damaged"),
        (
            b'{"octavo_journal":1,"octavo":"","started_at":0,"setup":'
            b'{"blocks":1,"block_size":1,"limits":{"sequences":0,"tokens":1}}}\n',
            "line 1 is damaged: sequences is 0",
        ),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=says) as caught:
        list(read_journal(path))
    assert str(path) in str(caught.value)
    if content and b'"octavo_journal":1' not in content:
        with pytest.raises(JournalError, match="name another file"):
            open_journal(path, core_setup(Setup()))
        assert path.read_bytes() == content


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot open the journal"):
        open_journal(tmp_path / "no" / "folder", core_setup(Setup()))
    with pytest.raises(JournalError, match="cannot read the journal"):
        list(read_journal(tmp_path / "missing"))


def test_two_engines_cannot_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = open_journal(path, core_setup(Setup()))
    with pytest.raises(JournalError, match="another engine"):
        open_journal(path, core_setup(Setup()))
    first.close()
    open_journal(path, core_setup(Setup())).close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda line: line[: len(line) // 2],
        lambda line: line.replace(b'"call"', b'"fall"'),
        lambda line: line.replace(b'"now":', b'"now":"x",'),
        lambda line: b'{"call":"plan","now":1.0,"plan":{"id":0,"spans":[],"binds":[[0,"?"]]}}',
        lambda line: b'{"call":"cancel","now":1.0,"request_id":"a","said":[["Token",{}]]}',
        lambda line: (
            b'{"call":"set_limits","now":1.0,"limits":{"sequences":1,"tokens":1},'
            b'"before":{"sequences":1,"tokens":0}}'
        ),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, seed: int, spoil) -> None:
    path = tmp_path / "journal"
    recorded(path, Random(seed))
    lines = path.read_bytes().splitlines()
    lines[2] = spoil(lines[2])
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(JournalError, match="line 3 is damaged"):
        list(read_journal(path))


def test_a_full_disk_ends_the_journal_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    journal = open_journal(path, core_setup(Setup()))
    before = path.read_bytes()
    monkeypatch.setattr(journal_module.os, "write", lambda descriptor, line: len(line) - 1)
    for _ in range(3):
        journal.observe(Cancel(1.0, "a"), ())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "the disk is full" in caplog.text
    assert path.read_bytes() == before


def test_a_journal_that_was_closed_stays_silent(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = open_journal(path, core_setup(Setup()))
    journal.close()
    before = path.read_bytes()
    journal.observe(Cancel(1.0, "a"), ())
    assert path.read_bytes() == before


def test_receipts_come_back_whole(tmp_path: Path) -> None:
    receipt = Receipt(
        prompt_tokens=1,
        completion_tokens=2,
        cached_tokens=3,
        recomputed_tokens=4,
        preemptions=5,
        arrival_s=0.1 + 0.2,
        admitted_s=None,
        first_token_s=1e-9,
        finished_s=1e9,
        peak_blocks=6,
    )
    journal = open_journal(tmp_path / "journal", core_setup(Setup()))
    ended = Finished("a", "error", None, 'ein "Wort"\n', receipt)
    journal.observe(Cancel(1.0, "a"), (ended,))
    _, entry = read_journal(tmp_path / "journal")
    assert entry == Entry(2, Cancel(1.0, "a"), (ended,))
