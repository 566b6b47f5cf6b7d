"""The files of a batch: every line gets one answer, however often the run before was killed."""

import json
import os
import random
from itertools import count, islice
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError, InvalidRequest, RequestError
from octavo.serve.batch_files import (
    DUPLICATE,
    PATHS,
    BatchAnswer,
    BatchError,
    BatchRequest,
    BatchResponse,
    Intake,
    Job,
    Line,
    Output,
    count_lines,
    parse_line,
    read_lines,
)

GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "x"},
}
BAD: dict[str, tuple[Any, ...]] = {
    "custom_id": (5, None, "", "x" * 513, ["a"]),
    "method": ("GET", "post", 5, None),
    "url": ("/v1/embeddings", "/v1/messages", "", 5, "http://host/v1/completions"),
}


def encoded(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode() + b"\n"


def lines_of(*contents: bytes) -> list[Line]:
    return [Line(number, content) for number, content in enumerate(contents, 1)]


def answer_of(job: Job) -> BatchAnswer:
    """As a run would write it."""
    error = None
    if isinstance(job.asked, RequestError):
        error = BatchError(code=job.asked.code, message=job.asked.message)
    response = BatchResponse(
        status_code=400 if error else 200, request_id="r", body=msgspec.Raw(b"{}")
    )
    return BatchAnswer(id=job.id, custom_id=job.custom_id, response=response, error=error)


@pytest.mark.parametrize("url", PATHS)
def test_a_line_is_taken_apart(url: str) -> None:
    asked = parse_line(encoded(url=url, body={"a": [1.50, "é"]}))
    assert (asked.custom_id, asked.url) == ("a", url)
    assert bytes(asked.body) == b'{"a": [1.5, "\\u00e9"]}'


@pytest.mark.parametrize("field", BAD)
def test_what_is_wrong_is_named(field: str) -> None:
    for value in BAD[field]:
        with pytest.raises(InvalidRequest) as caught:
            parse_line(encoded(**{field: value}))
        assert caught.value.param == field
        assert field in caught.value.message
    missing = {name: value for name, value in GOOD.items() if name != field}
    with pytest.raises(InvalidRequest) as caught:
        parse_line(json.dumps(missing).encode())
    assert caught.value.param == field


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"5", b"null", b'"a"', b"\xff\xfe", b'{"custom_id": "\xff"}', b"[" * 10**5],
    ids=repr,
)
def test_a_line_that_is_no_request(content: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_line(content)
    (job,) = jobs_of(content)
    assert isinstance(job.asked, InvalidRequest)
    assert job.custom_id is None


def test_a_field_too_many_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_line(encoded(metod="POST"))
    assert caught.value.param == "metod"
    assert "did you mean method?" in caught.value.message


def test_lines_are_read_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"a\n\n  \nbb\r\n" + b"c" * 50 + b"\nddd\n" + b"e" * 30)
    assert list(read_lines(file, 20)) == [
        Line(1, b"a\n"),
        Line(4, b"bb\r\n"),
        Line(5, None),
        Line(6, b"ddd\n"),
        Line(7, None),
    ]
    assert count_lines(file) == 7
    with pytest.raises(ConfigError, match="No such file"):
        list(read_lines(tmp_path / "none", 20))


def jobs_of(*contents: bytes) -> list[Job]:
    return list(Intake(lines_of(*contents), set(), set()))


def test_nothing_is_read_ahead() -> None:
    """An input without an end."""
    endless = (Line(number, encoded(custom_id=str(number))) for number in count(1))
    first, second = islice(Intake(endless, set(), set()), 2)
    assert (first.custom_id, second.custom_id) == ("1", "2")


def test_a_custom_id_is_the_first_lines_that_has_it() -> None:
    first, second, third = jobs_of(encoded(method="GET"), encoded(), encoded(custom_id="b"))
    assert isinstance(first.asked, InvalidRequest)
    assert isinstance(second.asked, InvalidRequest)
    assert (second.asked.code, second.custom_id) == (DUPLICATE, "a")
    assert isinstance(third.asked, BatchRequest)


def test_lines_have_ids_that_stay() -> None:
    contents = [encoded(), encoded(), b"{", b"{"]
    ids = [job.id for job in jobs_of(*contents)]
    assert len(set(ids)) == 4
    assert ids == [job.id for job in jobs_of(*contents)]


LINES = st.lists(
    st.one_of(
        st.sampled_from("abcd").map(lambda name: encoded(custom_id=name)),
        st.sampled_from("abcd").map(lambda name: encoded(custom_id=name, url="/")),
        st.sampled_from([b"{", b"[]", encoded(custom_id=5)]),
    ),
    max_size=8,
)
RUNS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 400)), max_size=4)
"""Of each run that is killed: the answers written before, and the bytes of the one under way."""


@given(LINES, RUNS, st.randoms(use_true_random=False))
def test_every_line_gets_one_answer_however_often_it_is_killed(
    contents: list[bytes], runs: list[tuple[int, int]], chance: random.Random
) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "out.jsonl"
        for survived, torn in [*runs, (len(contents) + 1, 0)]:
            output = Output(file)
            jobs = list(Intake(lines_of(*contents), output.answered, output.refused))
            chance.shuffle(jobs)
            for job in jobs[:survived]:
                output.write(answer_of(job))
            if len(jobs) > survived:
                half = msgspec.json.encode(answer_of(jobs[survived]))[:torn]
                file.write_bytes(file.read_bytes() + half)
            output.close()
        answers = [json.loads(line) for line in file.read_text().splitlines()]
    wanted = [json.loads(msgspec.json.encode(answer_of(job))) for job in jobs_of(*contents)]
    assert sorted(answers, key=itemgetter("id")) == sorted(wanted, key=itemgetter("id"))


def test_what_is_answered_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    one, two = jobs_of(encoded(), encoded(custom_id="b"))
    before = msgspec.json.encode(answer_of(one)) + b"\n"
    file.write_bytes(before + msgspec.json.encode(answer_of(two)))  # without its line end
    output = Output(file)
    assert (output.answered, output.refused) == ({"a"}, set())
    output.write(answer_of(two))
    output.close()
    assert file.read_bytes() == before + msgspec.json.encode(answer_of(two)) + b"\n"


@pytest.mark.parametrize(
    "content",
    [b"hello", b"hello\n", encoded(), b'{"id": 5, "custom_id": "a"}\n', b"\n", b"{}\n", b"\xff\n"],
    ids=repr,
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "out.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="something else than answers of a batch, in line 1"):
        Output(file)
    assert file.read_bytes() == content


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    first = Output(tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="another batch writes to"):
        Output(tmp_path / "out.jsonl")
    first.close()
    Output(tmp_path / "out.jsonl").close()


def test_an_output_that_cannot_be_is_said_so(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none" / "out.jsonl"):
        with pytest.raises(ConfigError, match="cannot write to"):
            Output(place)
    full = Output.__new__(Output)
    full.path, full._file = Path("/dev/full"), os.open("/dev/full", os.O_WRONLY)
    (job,) = jobs_of(encoded())
    with pytest.raises(ConfigError, match="No space left"):
        full.write(answer_of(job))
    full.close()
