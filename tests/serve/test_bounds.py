"""Small bodies that ask for much: refused before any work that grows with what they ask."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.serve.oracle import oracle_server
from tests.serve.scripted import Gate, Script, Served, scripted_server

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
MANY = 10**6
FIELDS: dict[str, Any] = {
    "n": 10**9,
    "top_k": 2**80,
    "logprobs": MANY,
    "max_tokens": 10**12,
    "min_tokens": 10**12,
    "priority": 10**12,
    "stop": ["a"] * MANY,
    "stop_token_ids": [1] * MANY,
    "allowed_token_ids": [-1] * MANY,
    "bad_words": ["a"] * MANY,
    "logit_bias": {str(number): 1 for number in range(200_000)},
    "timeout_s": 1e300,
    "tenant": "a" * MANY,
    "cache_salt": "a" * MANY,
    "user": ["a"] * MANY,
    "nothing_like_it": [[1]] * 100_000,
}


@pytest.fixture(scope="module")
def large() -> Iterator[Served]:
    with scripted_server() as served:
        yield served


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", FIELDS)
def test_B124_every_field_at_a_million(large: Served, path: str, field: str) -> None:
    large.client.tickets.clear()
    body = {**PATHS[path], field: FIELDS[field]}
    response = httpx.post(large.url + path, json=body, timeout=60)
    assert response.status_code == 400, response.text[:200]
    assert len(response.content) < 2000
    assert large.client.tickets == []


def test_B124_many_messages(large: Served) -> None:
    body = {"messages": [{"role": "user", "content": "x"}] * 100_000}
    response = httpx.post(f"{large.url}/v1/chat/completions", json=body, timeout=60)
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_B124_answers_and_prompts_multiply(large: Served) -> None:
    path = f"{large.url}/v1/completions"
    body = {"prompt": ["a"] * 16, "n": 64, "max_tokens": 1, "temperature": 1}
    assert httpx.post(path, json=body, timeout=60).status_code == 200
    error = httpx.post(path, json=body | {"n": 65}, timeout=60).json()["error"]
    assert error["param"] == "n"
    assert "1024" in error["message"]


def test_B124_a_body_without_a_length_and_without_an_end(large: Served) -> None:
    address = urlsplit(large.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        connection.sendall(b"transfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"

        def send_for_ever() -> None:
            while True:
                connection.sendall(chunk)

        with pytest.raises(ConnectionError):
            send_for_ever()


def test_B124_nobody_waits_while_large_bodies_are_refused(large: Served) -> None:
    """A stream under way and health go on while eight clients send the worst that they can."""
    gate = Gate()
    large.client.script = Script(gate=gate, pause_at=3)
    bodies = [json.dumps({"prompt": "x", field: FIELDS[field]}) for field in FIELDS]
    with ThreadPoolExecutor(9) as threads:
        stream = threads.submit(
            httpx.post, f"{large.url}/v1/completions", json={"prompt": "s"}, timeout=60
        )
        assert gate.reached.wait(60)
        refused = [
            threads.submit(httpx.post, f"{large.url}/v1/completions", content=body, timeout=60)
            for body in bodies
        ]
        while not all(each.done() for each in refused):
            assert httpx.get(f"{large.url}/version", timeout=60).status_code == 200
        assert {each.result().status_code for each in refused} == {400}
        gate.open()
        assert stream.result().status_code == 200
    large.client.script = Script()


# --- templates of clients


TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_template_of_a_client_is_refused_unless_trusted(large: Served, path: str) -> None:
    body = PATHS["/v1/chat/completions"] | {"chat_template": TEMPLATE}
    error = httpx.post(large.url + path, json=body).json()["error"]
    assert error["param"] == "chat_template"
    assert "--trust-request-chat-template" in error["message"]
    nothing = body | {"chat_template": None}
    assert httpx.post(large.url + path, json=nothing).status_code == 200


def test_a_trusted_template_is_used() -> None:
    with scripted_server(trust_templates=True) as served:
        body = PATHS["/v1/chat/completions"] | {"chat_template": TEMPLATE}
        response = httpx.post(f"{served.url}/v1/chat/completions", json=body)
        assert response.status_code == 200
        asked = served.client.tickets[-1].request
        assert served.door.decode(asked.prompt) == "[x]"
        tokens = httpx.post(f"{served.url}/tokenize", json=body).json()["tokens"]
        assert tokens == list(asked.prompt)
        broken = body | {"chat_template": "{% for %}"}
        for path in ("/v1/chat/completions", "/tokenize"):
            error = httpx.post(served.url + path, json=broken).json()["error"]
            assert error["param"] == "chat_template"
            assert "does not compile" in error["message"]
        httpx.post(f"{served.url}/v1/chat/completions", json=PATHS["/v1/chat/completions"])
        assert "<|start|>" in served.door.decode(served.client.tickets[-1].request.prompt)


# --- the longest a request may take


def test_the_server_has_the_last_word_on_how_long(large: Served) -> None:
    with scripted_server(request_timeout_s=60.0) as served:
        for path, body in PATHS.items():
            assert httpx.post(served.url + path, json=body).status_code == 200
            assert served.client.tickets[-1].request.timeout_s == 60
            less = body | {"timeout_s": 5}
            assert httpx.post(served.url + path, json=less).status_code == 200
            assert served.client.tickets[-1].request.timeout_s == 5
            error = httpx.post(served.url + path, json=body | {"timeout_s": 61}).json()["error"]
            assert error["param"] == "timeout_s"
    httpx.post(f"{large.url}/v1/completions", json={"prompt": "x"})
    assert large.client.tickets[-1].request.timeout_s is None


def test_B112_a_request_that_takes_too_long_ends() -> None:
    """Streamed or not, with a status or an event that says so."""
    from tests.serve.test_slow_readers import Stepwise

    runners: list[Stepwise] = []

    def wrap(oracle: Any) -> Any:
        runners.append(Stepwise(oracle))
        return runners[0]

    with oracle_server(wrap=wrap, request_timeout_s=0.05) as served:
        stop = threading.Event()

        def slowly() -> None:
            while not stop.wait(0.02):
                runners[0].let()

        with ThreadPoolExecutor(1) as thread:
            thread.submit(slowly)
            began = time.monotonic()
            body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
            whole = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
            assert whole.status_code == 504
            assert whole.json()["error"]["code"] == "deadline_exceeded"
            streamed = httpx.post(
                f"{served.url}/v1/completions", json=body | {"stream": True}, timeout=60
            )
            assert "deadline_exceeded" in streamed.text
            assert time.monotonic() - began > 0.1
            stop.set()
        runners[0].let(10_000)
