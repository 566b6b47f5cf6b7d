"""Too many requests, or too slow an engine: what clients are told, in each dialect."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.serve.oracle import oracle_server
from tests.serve.scripted import IDLE, Gate, Script, Served

from octavo.core.budget import Limits
from octavo.core.plan import Runner, StepPlan, StepResult
from octavo.engine.wire import Command
from octavo.errors import Overloaded
from octavo.serve.departures import REMEMBERED, Departures

HELLO = [{"role": "user", "content": "Hello"}]
CASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 99},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "Hello"},
}


def message_of(response: httpx.Response) -> str:
    error = response.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("path", CASES)
@pytest.mark.parametrize("stream", [False, True])
def test_who_is_turned_away_is_told_the_place_in_the_queue(
    http: httpx.Client, served: Served, path: str, stream: bool
) -> None:
    served.client.state = replace(IDLE, waiting=7)
    served.client.script = Script(error=Overloaded("the queue is full"))
    response = http.post(path, json=CASES[path] | {"stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert message_of(response) == "the queue is full; it would be number 8 to wait"
    if path.startswith("/v1/c"):
        error = response.json()["error"]
        assert (error["code"], error["queue_position"]) == ("queue_full", 8)
        assert "predicted_queue_s" not in error


def test_the_wait_is_predicted_from_the_answers_that_ended(
    http: httpx.Client, served: Served
) -> None:
    gate = Gate()

    def script(prompt: str) -> Script:
        if prompt == "full":
            return Script(error=Overloaded("the queue is full"))
        return Script(gate=gate if prompt == "long" else None)

    served.client.state = replace(IDLE, waiting=99_999)
    served.client.script = script
    with ThreadPoolExecutor() as threads:
        long = threads.submit(
            httpx.post, f"{served.url}/v1/completions", json={"prompt": "long"}, timeout=60
        )
        assert gate.reached.wait(60)
        assert http.post("/v1/completions", json={"prompt": "short"}).status_code == 200
        response = http.post("/v1/completions", json={"prompt": "full"})
        gate.open()
        assert long.result().status_code == 200
    error = response.json()["error"]
    assert error["queue_position"] == 100_000
    predicted_s = error["predicted_queue_s"]
    retry_s = int(response.headers["retry-after"])
    assert retry_s >= predicted_s > retry_s - 1
    assert f"for about {retry_s} s" in error["message"]


def test_the_prediction() -> None:
    departures = Departures()
    departures.enter(100.0)
    departures.enter(105.0)
    assert departures.predicted_s(5, 110.0) is None
    departures.ended(110.0)
    assert departures.predicted_s(5, 110.0) == 50.0
    departures.ended(112.0)
    assert departures.predicted_s(5, 112.0) == 30.0
    assert departures.predicted_s(5, 120.0) == 50.0, "nothing has ended for a while"
    for number in range(REMEMBERED):
        departures.ended(200.0 + number)
    assert departures.predicted_s(1, 200.0 + REMEMBERED) == 1.0, "the last ones count"
    departures.leave()
    departures.leave()
    departures.enter(1000.0)
    assert departures.predicted_s(5, 1001.0) is None


@pytest.mark.parametrize("path", CASES)
@pytest.mark.parametrize("timeout_s", [None, 1.5])
def test_a_request_whose_time_is_over(
    http: httpx.Client, served: Served, path: str, timeout_s: float | None
) -> None:
    """Nothing of its answer had come."""
    served.client.script = Script(text="", reason="timeout")
    more: dict[str, Any] = {}
    if timeout_s is not None and not path.startswith("/api/"):
        more = {"timeout_s": timeout_s}
    response = http.post(path, json=CASES[path] | {"stream": True} | more)
    if more:
        assert response.status_code == 504
        assert "retry-after" not in response.headers
        assert "its timeout_s of 1.5 s" in message_of(response)
    else:
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "has waited 2.0 s to be started" in message_of(response)
    if path.startswith("/v1/c"):
        error = response.json()["error"]
        code, kind = (
            ("deadline_exceeded", "timeout_error")
            if more
            else (
                "queue_timeout",
                "overloaded_error",
            )
        )
        assert (error["code"], error["type"]) == (code, kind)


@pytest.mark.parametrize("path", CASES)
def test_time_that_is_over_in_the_middle_of_a_stream(
    http: httpx.Client, served: Served, path: str
) -> None:
    """One error, then the end of that API."""
    served.client.script = Script(reason="timeout")
    response = http.post(path, json=CASES[path] | {"stream": True})
    assert response.status_code == 200
    parts = response.text.strip().split("\n" if path.startswith("/api/") else "\n\n")
    told = "has waited 2.0 s to be started"
    if path.startswith("/v1/c"):
        assert parts.pop() == "data: [DONE]"
        assert told in json.loads(parts.pop().removeprefix("data: "))["error"]["message"]
    elif path == "/v1/responses":
        assert parts.pop().startswith("event: response.failed")
        assert parts[-1].startswith("event: error")
        assert told in parts.pop()
    elif path == "/v1/messages":
        assert parts[-1].startswith("event: error")
        assert told in parts.pop()
    else:
        assert told in json.loads(parts.pop())["error"]
    assert told not in "".join(parts)


def test_what_is_over_time_is_counted(http: httpx.Client, served: Served) -> None:
    def ended() -> float:
        name = 'octavo_requests_total{finish_reason="timeout"} '
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    served.client.script = Script(reason="timeout")
    before = ended()
    http.post("/v1/completions", json={"prompt": "x", "n": 3})
    assert ended() == before + 3


class Gated:
    """An oracle that waits, in its third step, until the gate is opened. A step takes a second."""

    def __init__(self, oracle: Runner, gate: threading.Event) -> None:
        self._oracle = oracle
        self._gate = gate
        self.reached = threading.Event()
        self.steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if self.steps == 3:
            self.reached.set()
            assert self._gate.wait(60)
        return self._oracle.execute(plan)


def test_B179_overload_from_end_to_end() -> None:
    """One runs, five may wait: of two that ask for four answers one is turned away at once. Nobody
    waits for longer than fifty seconds, and whoever did never starts."""
    gate, runners, submitted = threading.Event(), list[Gated](), threading.Semaphore(0)

    def gated(oracle: Runner) -> Runner:
        runners.append(Gated(oracle, gate))
        return runners[0]

    def clock() -> float:
        return float(runners[0].steps if runners else 0)

    limits = Limits(sequences=1, tokens=64, waiting=5, waiting_s=50.0)
    with (
        oracle_server(limits=limits, wrap=gated, clock=clock) as served,
        ThreadPoolExecutor() as threads,
    ):
        link = served.client._link
        send = link.send

        def counted(command: Command) -> None:
            send(command)
            submitted.release()

        link.send = counted  # type: ignore[method-assign]

        def ask(prompt: str, answers: int) -> httpx.Response:
            body = {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "n": answers}
            return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)

        first = threads.submit(ask, "a", 1)
        assert runners[0].reached.wait(60)
        others = [threads.submit(ask, prompt, 4) for prompt in "bc"]
        for _ in range(3):
            assert submitted.acquire(timeout=60)
        gate.set()
        assert first.result().status_code == 200
        answers = [other.result().json()["error"] for other in others]
        assert sorted(answer["code"] for answer in answers) == ["queue_full", "queue_timeout"]
        (full,) = (answer for answer in answers if answer["code"] == "queue_full")
        assert "4 answers wait already and 4 come; at most 5 may wait" in full["message"]
        status = served.client.status()
        assert (status.running, status.waiting, status.blocks_owned) == (0, 0, 0)
        assert status.tokens_sampled == 200
