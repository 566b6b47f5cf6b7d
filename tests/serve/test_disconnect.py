"""A client that goes away frees its request; an error after the start ends the stream in order."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.serve.scripted import Gate, Script, Served

from octavo.errors import EngineError

CASES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, CASES[request.param]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_at", [0, 5])
def test_a_client_that_goes_cancels_its_request(
    served: Served, case: tuple[str, dict[str, Any]], stream: bool, pause_at: int
) -> None:
    """Before the first token and in the middle, streamed or not."""
    path, body = case
    gate = Gate()
    served.client.script = Script(gate=gate, pause_at=pause_at)
    content = json.dumps(body | {"stream": stream}).encode()
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        assert gate.reached.wait(60)
        assert not served.client.was_cancelled.is_set()
    assert served.client.was_cancelled.wait(60)
    gate.open()
    assert served.client.cancelled == [served.client.tickets[0].request.id]


def test_one_of_several_prompts_cannot_outlive_the_others(served: Served) -> None:
    gate = Gate()
    served.client.script = lambda prompt: (
        Script(error=EngineError("no")) if prompt == "bad" else Script(gate=gate)
    )
    response = httpx.post(
        f"{served.url}/v1/completions", json={"prompt": ["good", "bad"]}, timeout=60
    )
    gate.open()
    assert response.status_code == 500
    assert len(served.client.cancelled) == 2


def test_an_error_after_the_start_is_one_event_and_then_done(
    served: Served, case: tuple[str, dict[str, Any]]
) -> None:
    path, body = case
    served.client.script = Script(error=EngineError("step 9 failed"), fail_at=6)
    response = httpx.post(served.url + path, json=body | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["message"] == "step 9 failed"
    assert all("error" not in json.loads(event) for event in events[:-2])
    assert len(events) == 2 + 6 + ("chat" in path)


def test_an_error_nobody_foresaw_ends_the_stream_too(served: Served) -> None:
    served.client.script = Script(error=ZeroDivisionError("secret"), fail_at=3)
    response = httpx.post(f"{served.url}/v1/completions", json={"prompt": "x", "stream": True})
    assert response.text.endswith("data: [DONE]\n\n")
    assert "the server failed" in response.text
    assert "secret" not in response.text
