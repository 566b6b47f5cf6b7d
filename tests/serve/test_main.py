"""The socket of the server, and its end: every answer under way gets one too."""

import asyncio
import gc
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from tests.serve.scripted import IDLE, byte_tokenizer

from octavo.core.events import Token
from octavo.engine.door import Door, Ticket
from octavo.engine.engine import EngineStatus
from octavo.errors import ConfigError, EngineStopped
from octavo.serve import main
from octavo.serve.app import create_app
from octavo.serve.service import ServeSettings
from octavo.text.assembler import Delta, Ended


class EndlessClient:
    """Says one letter and nothing more, until it is closed."""

    def __init__(self) -> None:
        self.alive = True
        self.draining = False
        self.started = threading.Semaphore(0)
        self._closed = asyncio.Event()

    def status(self) -> EngineStatus:
        return IDLE

    async def close(self) -> None:
        self._closed.set()

    async def stream(self, ticket: Ticket) -> AsyncGenerator[Delta | Ended, None]:
        token = Token(ticket.request.id, 0, 100, -0.25)
        for item in ticket.assembler_of(token).take(token):
            yield item
        self.started.release()
        await self._closed.wait()
        raise EngineStopped("the engine stopped before the answer was complete")


@contextmanager
def draining_server(drain_s: float) -> Iterator[tuple[str, EndlessClient, main.DrainingServer]]:
    tokenizer, client = byte_tokenizer(), EndlessClient()
    door = Door(tokenizer, max_model_len=64, vocab_size=tokenizer.vocab_size)
    app = create_app(client, door, ServeSettings(model_names=("endless",), version="0"))
    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=60)
    server = main.DrainingServer(config, client.close, drain_s=drain_s)
    listener = main._bind("127.0.0.1", 0)
    main._listen(listener)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", client, server
    thread.join(60)
    assert not thread.is_alive()
    listener.close()


def test_B112_answers_that_outlast_the_drain_end_with_an_error_that_says_why() -> None:
    with draining_server(drain_s=0) as (url, client, server), ThreadPoolExecutor(2) as threads:
        whole, streamed = (
            threads.submit(
                httpx.post,
                f"{url}/v1/completions",
                json={"prompt": "a", "stream": stream},
                timeout=60,
            )
            for stream in (False, True)
        )
        assert all(client.started.acquire(timeout=60) for _ in range(2))
        server.should_exit = True
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "engine_stopped"
        events = streamed.result().text.strip().split("\n\n")
        assert "engine_stopped" in events[-2]
        assert events[-1] == "data: [DONE]"


def test_a_second_ctrl_c_ends_answers_at_once_and_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with draining_server(drain_s=600) as (url, client, server), ThreadPoolExecutor(1) as threads:
        answer = threads.submit(
            httpx.post,
            f"{url}/v1/completions",
            json={"prompt": "a", "stream": True},
            timeout=60,
        )
        assert client.started.acquire(timeout=60)
        for _ in range(2):
            server.handle_exit(signal.SIGINT, None)
        assert "engine_stopped" in answer.result().text
        assert answer.result().text.endswith("data: [DONE]\n\n")
    assert "Traceback" not in caplog.text


def test_an_address_goes_to_the_first_server_that_is_ready() -> None:
    first = main._bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = main._bind("127.0.0.1", port)
    main._listen(second)
    with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
        main._listen(first)
    with pytest.raises(ConfigError, match="already in use"):
        main._bind("127.0.0.1", port)
    first.close()
    second.close()


@pytest.mark.parametrize("host", ["x" * 64 + ".test", "a\0b", "\udc80"])
def test_a_host_that_is_no_name(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on") as caught:
        main._bind(host, 8000)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
def test_B106_a_reader_that_takes_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "UNREAD_S", 1)
    listener = main._bind("127.0.0.1", 0)
    main._listen(listener)
    listener.setblocking(True)
    with listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        connection.settimeout(60)
        with connection, pytest.raises(OSError, match="timed out") as caught:
            connection.sendall(b"x" * 2**26)
        assert caught.value.errno is not None, "the machine dropped it, not this test"


def test_what_a_server_starts_with_is_kept_from_the_collector() -> None:
    assert not gc.get_freeze_count()
    kept = [[number] for number in range(1000)]
    try:
        main._settle()
        assert gc.get_freeze_count() > len(kept)
        assert not any(one is kept[0] for one in gc.get_objects())
    finally:
        gc.unfreeze()


def test_a_server_told_to_stop_ends_without_a_word(demo_model_path: Path) -> None:
    """Not of answers cut, and not of memory that was left behind: bindings would tell."""
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--model", str(demo_model_path)]
    command += ["--port", "0", "--kv-cache-memory", "64MiB", "--log-level", "warning"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert "serves" in server.stdout.readline()
        server.terminate()
        _, complaints = server.communicate(timeout=300)
    assert (server.returncode, complaints) == (0, "")
