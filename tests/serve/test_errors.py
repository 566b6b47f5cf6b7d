"""What goes wrong before a request is one: the error shape is always the same."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.serve.scripted import Served, scripted_server

API = ("/v1/chat/completions", "/v1/completions")


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("path", API)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": }',
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'{"prompt": ' + b"[" * 50_000,
        b"{}",
    ],
)
def test_broken_bodies(http: httpx.Client, served: Served, path: str, body: bytes) -> None:
    error = error_of(http.post(path, content=body), 400)
    assert error["type"] == "invalid_request_error"
    assert served.client.tickets == []


@pytest.mark.parametrize("path", API)
def test_large_bodies(http: httpx.Client, path: str) -> None:
    assert error_of(http.post(path, content=b" " * 100_001), 413)["code"] == "payload_too_large"
    chunks = iter([b" " * 60_000, b" " * 60_000])
    assert error_of(http.post(path, content=chunks), 413)["code"] == "payload_too_large"
    error_of(http.post(path, content=b" " * 100_000), 400)


def test_a_declared_length_is_enough(served: Served) -> None:
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("path", ["/v1", "/v1/complete", "/v2/completions", "/v1/models/x"])
def test_unknown_paths(http: httpx.Client, path: str) -> None:
    code = "model_not_found" if path.endswith("/x") else "not_found"
    assert error_of(http.get(path), 404)["code"] == code


@pytest.mark.parametrize("path", [*API, "/v1/models", "/health", "/metrics", "/version"])
def test_wrong_methods(http: httpx.Client, path: str) -> None:
    response = http.get(path) if path in API else http.post(path)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert ("POST" if path in API else "GET") in response.headers["allow"]


def test_nobody_learns_what_broke_inside() -> None:
    with scripted_server() as served:
        served.client.status = None  # type: ignore[method-assign,assignment]
        error = error_of(httpx.get(f"{served.url}/health"), 500)
        assert error["message"] == "the server failed"


def test_a_large_body_within_the_limit(served: Served) -> None:
    body = {"prompt": "x" * 90_000}
    error = error_of(httpx.post(f"{served.url}/v1/completions", json=body), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        {"model": "LONG"},
        {"LONG": 1},
        {"stop": {"LONG": 1}},
        {"stream": True, "stream_options": {"LONG": True}},
        {"messages": [{"role": "LONG", "content": ""}]},
        {"messages": [{"role": "user", "LONG": 1}]},
        {"messages": [{"role": "user", "content": [{"type": "LONG"}]}]},
    ],
)
def test_B125_an_error_does_not_grow_with_the_body(
    http: httpx.Client, body: dict[str, Any]
) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]} | body
    content = json.dumps(chat).replace("LONG", "x" * 50_000)
    response = http.post(API[0], content=content)
    assert response.status_code in (400, 404)
    assert len(response.content) < 2_000
    for method, path in (("GET", "/v1/models/"), ("GET", "/"), ("POST", "/v1/models/")):
        assert len(http.request(method, path + "x" * 20_000).content) < 2_000


CHUNKED = b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "an address": b"GET /",
    "a header": b"GET /health HTTP/1.1\r\nhost: x\r\nx: ",
    "the length of a chunk": CHUNKED + b"1;",
    "a trailer": CHUNKED + b"0\r\nx: ",
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_head_cannot_grow_for_ever(served: Served, what: str) -> None:
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(ENDLESS[what])
        with pytest.raises(ConnectionError):  # the server hangs up long before
            connection.sendall(b"a" * 2**26)


def test_many_headers_cannot_grow_for_ever(served: Served) -> None:
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        with pytest.raises(ConnectionError):
            connection.sendall(b"x: y\r\n" * 10**7)


def test_a_head_of_a_sensible_size_passes(http: httpx.Client) -> None:
    assert http.get("/health", headers={"x": "a" * 60_000}).status_code == 200


def test_paths_are_served_without_their_v1_too(http: httpx.Client) -> None:
    for path, body in (
        ("/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/completions", {"prompt": "a"}),
        ("/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
    ):
        with_it, without = http.post(f"/v1{path}", json=body), http.post(path, json=body)
        assert with_it.status_code == without.status_code == 200
        assert with_it.json().keys() == without.json().keys()
        assert http.post(f"/v1{path}").json() == http.post(path).json()
    assert http.get("/models").json() == http.get("/v1/models").json()
    assert http.get("/models/scripted").json()["id"] == "scripted"
