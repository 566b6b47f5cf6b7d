"""Connections: how many there may be, and how long one may take to say what it wants."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import httpx
import pytest
from tests.serve.scripted import Gate, Script, Served, scripted_server

from octavo.serve.protocol import Bounds


@contextmanager
def connected(served: Served) -> Iterator[socket.socket]:
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        yield connection


def everything(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(1 << 16):
        received += piece
    return received


GET = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


def answer(connection: socket.socket) -> bytes:
    """One answer, whole, in however many pieces it comes."""
    head, body = b"", b""
    while b"\r\n\r\n" not in head:
        piece = connection.recv(1 << 16)
        if not piece:
            return head
        head += piece
    head, _, body = head.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length, head
    while len(body) < int(length[1]):
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


def answered(connection: socket.socket) -> bool:
    connection.sendall(GET)
    return answer(connection).startswith(b"HTTP/1.1 200")


def test_one_connection_too_many_is_told_so_at_once() -> None:
    """Also before it says anything. Those that are there go on; a place that is left is free."""
    with scripted_server(bounds=Bounds(connections=3)) as served, ExitStack() as stack:
        there = [stack.enter_context(connected(served)) for _ in range(3)]
        assert all(map(answered, there))
        with connected(served) as late:
            head, _, body = everything(late).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"retry-after: 1" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        with connected(served) as eager:
            eager.sendall(GET * 1000)
            assert everything(eager).startswith(b"HTTP/1.1 503")
        assert all(map(answered, there))
        there[0].close()
        tick = threading.Event()
        for _ in range(2000):
            with connected(served) as again:
                try:
                    if answered(again):
                        break
                except ConnectionError:
                    pass
            tick.wait(0.005)
        else:
            pytest.fail("the place was not free again")


def test_the_usual_client_is_told_it_is_one_too_many() -> None:
    with scripted_server(bounds=Bounds(connections=1)) as served, connected(served) as only:
        assert answered(only)
        response = httpx.post(f"{served.url}/v1/completions", json={"prompt": "x" * 50_000})
        assert response.status_code == 503


SLOW = {
    "nothing": b"",
    "half a head": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx: ",
    "half a body": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{",
    "a second request": GET + b"GET /version HTTP/1.1\r\nho",
}


@pytest.mark.parametrize("what", SLOW)
def test_who_takes_too_long_is_told_so_and_let_go(what: str) -> None:
    with scripted_server(bounds=Bounds(receive_s=0.2)) as served, connected(served) as slow:
        slow.sendall(SLOW[what])
        received = everything(slow)
        if what == "a second request":
            assert received.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408 Request Timeout\r\n" in received
        assert b"did not arrive within 0.2 s" in received
        assert served.client.tickets == []


def test_a_byte_now_and_then_is_still_too_slow() -> None:
    with scripted_server(bounds=Bounds(receive_s=0.3)) as served, connected(served) as slow:
        slow.settimeout(0.02)
        received = b""
        for byte in b"GET /version HTTP/1.1\r\n" + b"x: y\r\n" * 1000:
            try:
                slow.sendall(bytes([byte]))
                received += slow.recv(1 << 16)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if received:
                break
        assert received.startswith(b"HTTP/1.1 408")


def test_an_answer_may_take_longer_than_its_request() -> None:
    gate = Gate()
    with scripted_server(bounds=Bounds(receive_s=0.2)) as served, ThreadPoolExecutor(1) as thread:
        served.client.script = Script(text="late", gate=gate, pause_at=2)
        answer = thread.submit(
            httpx.post, f"{served.url}/v1/completions", json={"prompt": "x"}, timeout=60
        )
        assert gate.reached.wait(60)
        with connected(served) as slow:  # is let go after the time that the other has had
            assert b" 408 " in everything(slow)
        gate.open()
        assert answer.result().json()["choices"][0]["text"] == "late"


def test_a_connection_that_is_kept_waits_for_the_keep_alive_alone() -> None:
    with (
        scripted_server(bounds=Bounds(receive_s=0.2)) as served,
        connected(served) as kept,
        connected(served) as slow,
    ):
        assert answered(kept)
        assert b" 408 " in everything(slow)
        assert answered(kept)


def test_a_request_whose_answer_came_early_may_still_end() -> None:
    """Refused by its head: the rest is read for nothing, and the connection stays."""
    with scripted_server() as served, connected(served) as kept:
        kept.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
        assert answer(kept).startswith(b"HTTP/1.1 404")
        kept.sendall(b"body")
        assert answered(kept)


def test_a_request_whose_answer_came_early_may_not_go_on_for_ever() -> None:
    with scripted_server() as served, connected(served) as endless:
        endless.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 999999\r\n\r\n")
        assert b" 404 " in answer(endless)
        with suppress(ConnectionError):
            assert endless.recv(1) == b""


def test_empty_lines_between_requests_are_no_request() -> None:
    with scripted_server(bounds=Bounds(receive_s=0.2)) as served, connected(served) as idle:
        assert answered(idle)
        idle.sendall(b"\r\n\r\n")
        assert b" 408 " in everything(idle)
