"""Readers that stop, and readers that go: what they cost, and that nobody else pays for it."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.serve.oracle import OracleServed, oracle_server
from tests.serve.scripted import Gate, Script, scripted_server

from octavo.core.budget import Limits
from octavo.core.plan import Runner, StepPlan, StepResult
from octavo.engine.wire import Cancel, Command

PATH = "/v1/completions"
SMALL = 4096


@contextmanager
def asked(url: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection over which an answer was asked for; nothing of it is read."""
    content = json.dumps(body).encode()
    address = urlsplit(url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        connection.settimeout(60)
        connection.connect((address.hostname, address.port))
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
        connection.sendall(f"{head}connection: close\r\n\r\n".encode() + content)
        yield connection


def read_all(connection: socket.socket) -> list[dict[str, Any]]:
    """The events of a stream."""
    received = b""
    while piece := connection.recv(1 << 16):
        received += piece
    _, _, body = received.partition(b"\r\n\r\n")
    text = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        text += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    lines = text.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def texts(events: list[dict[str, Any]]) -> dict[int, str]:
    joined: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    return joined


def body_of(number: int, **more: object) -> dict[str, Any]:
    body = {"prompt": f"number {number}", "max_tokens": 300, "n": 2, "seed": number}
    return body | {"ignore_eos": True, "logprobs": 12} | more


def test_B106_readers_that_stop_are_paused_and_lose_nothing() -> None:
    """Six take nothing while five others are answered; then three of them read on, three go."""
    limits = Limits(sequences=32, tokens=512)
    with (
        oracle_server(limits=limits, blocks=800, max_model_len=400, send_buffer=SMALL) as served,
        ThreadPoolExecutor(5) as threads,
    ):
        url = served.url + PATH
        alone = [httpx.post(url, json=body_of(number), timeout=300).json() for number in range(6)]
        stalled = [asked(served.url, body_of(number % 3, stream=True)) for number in range(6)]
        connections = [one.__enter__() for one in stalled]
        others = [
            threads.submit(httpx.post, url, json=body_of(100 + number, max_tokens=100), timeout=300)
            for number in range(5)
        ]
        for number, other in enumerate(others):
            assert other.result().json()["usage"]["completion_tokens"] == 200, number
        wait_for(lambda: served.client.status().running == 0 and served.engine.idle)
        for number in range(3):
            events = read_all(connections[number])
            assert texts(events) == {
                choice["index"]: choice["text"] for choice in alone[number]["choices"]
            }
            assert len(events) < 600, "tokens that waited came in one piece"
        for one in stalled:
            one.__exit__(None, None, None)
        wait_for(lambda: served.client._mailboxes == {})
        state = served.engine.status()
        assert state.blocks_free + state.blocks_cached == state.blocks_total


def wait_for(condition: Any) -> None:
    tick = threading.Event()
    while not condition():
        tick.wait(0.005)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
def test_B106_a_reader_that_stops_for_too_long_is_dropped() -> None:
    with scripted_server(send_buffer=SMALL, unread_s=1) as served:
        gate = Gate()
        served.client.script = Script(text="x" * 500, gate=gate, pause_at=400)
        with asked(served.url, {"prompt": "a", "logprobs": 20, "stream": True, "max_tokens": 500}):
            assert served.client.was_cancelled.wait(60)
        gate.open()
        assert served.client.cancelled == [served.client.tickets[0].request.id]


class Stepwise:
    """A runner that waits before each step until the test lets it go on."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._allowed = threading.Semaphore(0)
        self.entered = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered += 1
        self._allowed.acquire()
        return self._runner.execute(plan)

    def let(self, steps: int = 1) -> None:
        self._allowed.release(steps)


class Watched:
    """A server whose steps the test makes, and which tells when the engine is asked to cancel."""

    def __init__(self, served: OracleServed, runner: Stepwise) -> None:
        self.served, self.runner = served, runner
        self.cancelled = threading.Event()
        send = served.client._link.send

        def noticing(command: Command) -> None:
            send(command)
            if isinstance(command, Cancel):
                self.cancelled.set()

        served.client._link.send = noticing  # type: ignore[method-assign]


@contextmanager
def stepwise(limits: Limits) -> Iterator[Watched]:
    runners: list[Stepwise] = []

    def wrap(oracle: Runner) -> Runner:
        runners.append(Stepwise(oracle))
        return runners[0]

    with oracle_server(limits=limits, wrap=wrap) as served:
        watched = Watched(served, runners[0])
        try:
            yield watched
        finally:
            runners[0].let(10_000)


LONG = "a prompt that takes three steps of sixteen tokens"
CASES = {
    "queued": (Limits(sequences=1, tokens=16), 1, {}),
    "in prefill": (Limits(sequences=4, tokens=16), 2, {}),
    "in decode": (Limits(sequences=4, tokens=16), 9, {}),
    "in decode, four answers": (Limits(sequences=6, tokens=16), 12, {"n": 4}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_B107_who_goes_is_gone_from_the_engine_within_two_steps(case: str, stream: bool) -> None:
    limits, steps, more = CASES[case]
    neighbour = {"prompt": "n", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    with stepwise(limits) as watched, ThreadPoolExecutor(1) as thread:
        served, runner = watched.served, watched.runner
        beside = thread.submit(httpx.post, served.url + PATH, json=neighbour, timeout=300)
        wait_for(lambda: runner.entered == 1)
        body = {"prompt": LONG, "max_tokens": 60, "ignore_eos": True, "stream": stream, **more}
        with asked(served.url, body):
            wait_for(lambda: len(served.client._mailboxes) == 2)
            for step in range(steps):
                runner.let()
                wait_for(lambda done=step: runner.entered == done + 2)
            state = served.engine.status()
            expected = {"queued": (1, 1), "in decode, four answers": (5, 0)}.get(case, (2, 0))
            assert (state.running, state.waiting) == expected
        assert watched.cancelled.wait(60)
        entered = runner.entered
        runner.let()
        wait_for(lambda: runner.entered == entered + 1)
        state = served.engine.status()
        assert (state.running, state.waiting) == (1, 0), "one step was under way, and no more"
        runner.let(1000)
        answer = beside.result().json()
        assert answer["usage"]["completion_tokens"] == 60
        wait_for(lambda: served.engine.idle)
        state = served.engine.status()
        assert state.blocks_free + state.blocks_cached == state.blocks_total
