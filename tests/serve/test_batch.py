"""A batch: the answers are those of the server, and each line is answered for itself."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from tests.serve.scripted import Gate, Script, ScriptedClient, byte_tokenizer

from octavo.config import EngineConfig
from octavo.engine.door import Door
from octavo.errors import EngineError, EngineStopped, InvalidRequest
from octavo.serve.app import create_app
from octavo.serve.batch import Batch, Count, answer_to, post, run_batch
from octavo.serve.batch_files import Intake, Job, Line, Output, parse_line
from octavo.serve.service import ServeSettings

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        {"messages": HELLO},
        {"messages": HELLO, "n": 2, "logprobs": True, "stop": "from"},
        {"messages": HELLO, "temperature": -1},
        {"messages": HELLO, "temprature": 1},
        {"messages": []},
        {},
        [],
        5,
    ],
    "/v1/completions": [
        {"prompt": "Hello", "echo": True, "logprobs": 2},
        {"prompt": ["a", "b"], "max_tokens": 3},
        {"prompt": ""},
        {"prompt": "x" * 5000},
        {"prompt": "x", "model": "another"},
        "text",
    ],
    "/v1/responses": [{"input": "Hello"}, {"input": 5}, {"input": "x", "store": True}],
}


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient(byte_tokenizer())


@pytest.fixture
def app(client: ScriptedClient) -> Starlette:
    tokenizer = byte_tokenizer()
    door = Door(tokenizer, max_model_len=512, vocab_size=tokenizer.vocab_size)
    return create_app(
        client, door, ServeSettings(model_names=("scripted", "org/alias"), version="0")
    )


def job_of(path: str, body: Any, name: str = "a") -> Job:
    line = {"custom_id": name, "method": "POST", "url": path, "body": body}
    return Job(id="batch_req_1", custom_id=name, asked=parse_line(json.dumps(line).encode()))


def without_ids(answer: Any) -> Any:
    """An answer but for what is new in each."""
    if isinstance(answer, list):
        return [without_ids(each) for each in answer]
    if isinstance(answer, dict):
        fresh = ("id", "created", "created_at", "completed_at")
        return {name: without_ids(each) for name, each in answer.items() if name not in fresh}
    return answer


@pytest.mark.parametrize("path", BODIES)
def test_the_answers_are_those_of_the_server(http: httpx.Client, app: Starlette, path: str) -> None:
    for body in BODIES[path]:
        served = http.post(path, json=body)
        answer = asyncio.run(answer_to(app, job_of(path, body)))
        told = json.loads(bytes(answer.response.body))
        assert answer.response.status_code == served.status_code
        assert without_ids(told) == without_ids(served.json()), body
        assert (answer.id, answer.custom_id) == ("batch_req_1", "a")
        if served.status_code == 200:
            assert answer.error is None
            assert answer.response.request_id == told["id"]
        else:
            assert answer.error is not None
            assert answer.error.message == told["error"]["message"]
            assert answer.error.code == told["error"]["code"]


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_is_refused(app: Starlette, client: ScriptedClient, path: str) -> None:
    body = BODIES[path][0]
    answer = asyncio.run(answer_to(app, job_of(path, {**body, "stream": True})))
    assert answer.response.status_code == 400
    assert json.loads(bytes(answer.response.body))["error"]["param"] == "stream"
    assert client.tickets == []
    for harmless in (False, None):
        answer = asyncio.run(answer_to(app, job_of(path, {**body, "stream": harmless})))
        assert answer.response.status_code == 200
    answer = asyncio.run(answer_to(app, job_of(path, {**body, "stream": "yes"})))
    assert json.loads(bytes(answer.response.body))["error"]["param"] == "stream"


def completions(count: int) -> Iterator[Line]:
    for number in range(1, count + 1):
        line = {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"prompt {number}", "max_tokens": 100},
        }
        yield Line(number, json.dumps(line).encode())


class Files:
    """An input whose lines are counted as they are read, and an output."""

    def __init__(self, folder: Path, lines: Iterator[Line]) -> None:
        self.read = 0
        self.path = folder / "out.jsonl"
        self.output = Output(self.path)
        self._lines = lines
        self.count = Count(None)
        self.most_open = 0
        intake = Intake(self._counted(), self.output.answered, self.output.refused)
        self.batch = Batch(intake, self.output, self.count, lambda count: None)

    def _counted(self) -> Iterator[Line]:
        for line in self._lines:
            self.read += 1
            self.most_open = max(self.most_open, self.read - self.count.answers)
            yield line

    def run(self, app: Starlette, in_flight: int) -> list[Any]:
        try:
            asyncio.run(self.batch.run(app, in_flight))
        finally:
            self.output.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def test_no_more_are_under_way_than_may_be(app: Starlette, tmp_path: Path) -> None:
    files = Files(tmp_path, completions(40))
    answers = files.run(app, 3)
    assert files.most_open == 3
    assert {answer["custom_id"] for answer in answers} == {f"c{n}" for n in range(1, 41)}
    assert len(answers) == files.count.answers == 40
    tokens = sum(answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers)
    assert files.count.tokens == tokens > 0


def test_a_slow_answer_does_not_hold_up_the_others(
    app: Starlette, client: ScriptedClient, tmp_path: Path
) -> None:
    gate, done = Gate(), []
    last = "prompt 9"

    def script(prompt: str) -> Script:
        done.append(prompt)
        if prompt == last:
            gate.open()
        return Script(gate=gate) if prompt == "prompt 1" else Script()

    client.script = script
    answers = Files(tmp_path, completions(9)).run(app, 2)
    assert done[-1] == last
    assert {answer["custom_id"] for answer in answers} == {f"c{n}" for n in range(1, 10)}


def test_an_answer_that_fails_is_the_trouble_of_its_line(
    app: Starlette, client: ScriptedClient, tmp_path: Path
) -> None:
    failures = {
        "prompt 2": EngineError("step 7 failed"),
        "prompt 4": ValueError("nobody foresaw it"),
        "prompt 5": InvalidRequest("not so", param="prompt"),
    }
    client.script = lambda prompt: Script(error=failures.get(prompt), fail_at=3)
    files = Files(tmp_path, completions(6))
    status = {
        answer["custom_id"]: (answer["response"]["status_code"], answer["error"])
        for answer in files.run(app, 2)
    }
    assert {name: one for name, (one, _) in status.items()} == {
        "c1": 200,
        "c2": 500,
        "c3": 200,
        "c4": 500,
        "c5": 400,
        "c6": 200,
    }
    assert status["c2"][1] == {"code": None, "message": "step 7 failed"}
    assert status["c4"][1] == {"code": None, "message": "the server failed"}
    assert files.count.errors == 3


def test_without_an_engine_the_rest_is_left_for_another_run(
    app: Starlette, client: ScriptedClient, tmp_path: Path
) -> None:
    stopped = EngineStopped("the engine has ended before the answer was complete")
    client.script = lambda prompt: Script(error=stopped if prompt == "prompt 4" else None)
    with pytest.raises(EngineStopped, match="the engine has ended .*; run it again"):
        Files(tmp_path, completions(9)).run(app, 1)
    written = (tmp_path / "out.jsonl").read_bytes()
    assert written.count(b"\n") == 3
    client.script = Script()
    files = Files(tmp_path, completions(9))
    answers = files.run(app, 1)
    assert (tmp_path / "out.jsonl").read_bytes().startswith(written)
    assert [answer["custom_id"] for answer in answers] == [f"c{n}" for n in range(1, 10)]
    assert (files.count.earlier, files.count.answers) == (3, 6)


def test_an_application_that_says_nothing_is_no_answer() -> None:
    async def silent(*_: object) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(post(silent, "/v1/completions", b"{}"))


def test_input_and_output_are_two_files(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(next(completions(1)).content or b"")
    (tmp_path / "same.jsonl").hardlink_to(file)
    for target in (file, tmp_path / "same.jsonl"):
        with pytest.raises(InvalidRequest, match="both input and output"):
            run_batch(EngineConfig(), {}, file, target)
