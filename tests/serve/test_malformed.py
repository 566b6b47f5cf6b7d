"""Two thousand malformed requests: each gets a 4xx that says what is wrong, by the field if there
is one; the engine never hears of them."""

import gzip
import json
import socket
from collections.abc import Iterator
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.serve.scripted import Served

from octavo.serve.app import ENDPOINTS
from octavo.serve.requests import Body

HELLO = [{"role": "user", "content": "Hello"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [100]},
}
READ: dict[str, Body[Any]] = {
    one.path: one.reads[0] for one in ENDPOINTS if one.path in VALID and one.method == "POST"
}
OBJECTS = {
    "chat_template_kwargs",
    "cache_control",
    "format",
    "guided_json",
    "logit_bias",
    "metadata",
    "options",
    "stream_options",
}
HUGE: dict[str, tuple[Any, ...]] = {
    "temperature": (1e300, -1e300, 10**40),
    "top_p": (1e9, -1.0),
    "top_k": (-(10**30), -2),
    "min_p": (2.0, 1e300),
    "seed": (10**40, -(10**40)),
    "n": (10**9, 0, -(10**18)),
    "max_tokens": (10**18, 10**9, 0),
    "min_tokens": (10**18, -1),
    "priority": (2**63, -(2**63)),
    "stop": (["x"] * 10_000, ["x" * 50_000], [""]),
    "stop_sequences": (["x"] * 10_000, ["x" * 50_000]),
    "stop_token_ids": ([0] * 10_000, [2**31], [-1]),
    "allowed_token_ids": ([2**31], [-1]),
    "bad_words": (["x"] * 10_000, [""]),
    "logit_bias": ({str(token): 1 for token in range(5_000)}, {"-1": 0}, {"a": 0}, {"5": 1e9}),
    "cache_salt": ("x" * 50_000, ""),
    "tenant": ("x" * 50_000,),
    "timeout_s": (0, 1e300),
    "messages": ([], [[]] * 5_000, [{"role": "x" * 50_000, "content": ""}]),
    "prompt": ([[]], [], [1.5], [2**31], ["a"] * 5_000),
    "tokens": ([2**31], [[]], ["a"] * 5_000),
    "input": ([], [[]] * 5_000, [{"role": "user", "content": [{"type": "x" * 50_000}]}]),
    "metadata": ({str(n): "" for n in range(5_000)},),
}
"""Of the right type, and too large or too small."""


def wrong_type(random: Random, field: str) -> Any:
    """A value that no field of this kind takes."""
    scalars = [[[{"a": 1}]], [[["x"]]]] if field not in ("prompt", "input") else [{"a": 1}]
    nested: Any = {"no": {"such": ["thing"]}}
    if field in OBJECTS:
        return random.choice([[1], "text", 5, [[]], True])
    return random.choice([nested, *scalars])


def wrong_values(random: Random) -> Iterator[tuple[str, bytes, str]]:
    """Paths, bodies, and the field that is wrong in them."""
    while True:
        path = random.choice(list(VALID))
        body = READ[path]
        known = sorted({*body.shape.__struct_fields__, *body.names, *body.neutral})
        large = [name for name in known if name in HUGE and path != "/tokenize"]
        match random.randrange(4):
            case 0 if large:
                field = random.choice(large)
                value = random.choice(HUGE[field])
                if (path, value) == ("/api/chat", []):  # asks for the model only
                    continue
                if (path, field) == ("/v1/messages", "max_tokens") and value:  # is a cap
                    continue
            case 1:
                field = "".join(random.choices("abcxyz_é ", k=random.randint(1, 40)))
                if field in known:
                    continue
                value = random.choice([True, 1, "x", [], {}, [None], 0.0])
            case _:
                field = random.choice(known)
                value = wrong_type(random, field)
        valid = {} if (path, field) == ("/tokenize", "messages") else VALID[path]
        fields = list((valid | {field: value}).items())
        random.shuffle(fields)
        yield path, json.dumps(dict(fields)).encode(), field


def broken_bodies(random: Random) -> Iterator[tuple[str, bytes, str]]:
    """Paths, and bodies that are no JSON objects."""
    while True:
        path = random.choice(list(VALID))
        text = json.dumps(VALID[path])
        cut = random.randrange(len(text))
        yield (
            path,
            random.choice(
                [
                    text[:cut].encode(),
                    text.encode("utf-16"),
                    b"\xff" + text.encode(),
                    text[:cut].encode() + bytes([random.randrange(128, 256)]) + text[cut:].encode(),
                    gzip.compress(text.encode()),
                    random.randbytes(random.randint(0, 300)),
                    b"[" * random.randint(1, 90_000),
                    b'{"a":' * random.randint(1, 18_000),
                    text.replace("Hello", "\\ud800").encode() if "Hello" in text else b"{",
                    text.encode() + b"}",
                    random.choice(
                        [b"null", b"5", b"[]", b'"x"', b"true", b"{,}", b"{'a': 1}", b""]
                    ),
                ]
            ),
            "",
        )


def message_of(response: httpx.Response) -> tuple[str, str | None]:
    error = response.json()["error"]
    if isinstance(error, str):
        return error, None
    return error["message"], error.get("details", error)["param"]


@pytest.mark.parametrize("kind", [wrong_values, broken_bodies])
def test_every_malformed_request_is_told_what_is_wrong(
    http: httpx.Client, served: Served, seed: int, kind: Any
) -> None:
    cases = kind(Random(seed))
    headers = [{}, {"content-type": "text/plain"}, {"content-type": "application/xml"}, {"a": "é"}]
    for number in range(950):
        path, body, field = next(cases)
        more = {name: value.encode() for name, value in headers[number % len(headers)].items()}
        response = http.post(path, content=body, headers=more)
        told = (path, body[:300], response.text)
        assert 400 <= response.status_code < 500, told
        assert len(response.content) < 3_000, told
        if response.status_code == 413:
            continue
        message, param = message_of(response)
        if not field:
            assert "body" in message or "lone surrogate" in message, told
            continue
        assert field[:40] in message, told
        if not path.startswith("/api/"):
            assert param is not None, told
            assert param.startswith(field), told
    assert served.client.tickets == []
    assert http.post("/v1/completions", json=VALID["/v1/completions"]).status_code == 200


def test_broken_heads_end_with_an_error_and_leave_the_others_alone(
    http: httpx.Client, served: Served, seed: int
) -> None:
    random = Random(seed)
    address = urlsplit(served.url)
    lengths = [b"-1", b"x", b"1e3", b"99999999999999999999", b"5, 6", b"", b"+5", b"0x10"]
    for _ in range(100):
        head = random.choice(
            [
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: "
                + random.choice(lengths),
                b"POST /v1/completions HTTP/9.9\r\nhost: x",
                b"PO\x00ST /v1/completions HTTP/1.1\r\nhost: x",
                b"GET  HTTP/1.1\r\nhost: x",
                b"POST /v1/completions HTTP/1.1\r\nhost x",
                b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}",
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
                b"content-length: 6",
                random.randbytes(random.randint(1, 200)),
            ]
        )
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            connection.sendall(head + b"\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        assert not answer or answer.split(b" ")[1][:1] == b"4", (head, answer)
    assert served.client.tickets == []
    assert http.get("/health").status_code == 200
