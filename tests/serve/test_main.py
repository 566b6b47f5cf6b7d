"""The socket of the server, and its end: every answer under way gets one too."""

import asyncio
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import uvicorn
from tests.serve.scripted import IDLE, Gate, Script, ScriptedClient, byte_tokenizer

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
        self.draining = self.restarting = False
        self.busy_since_s = None
        self.started = threading.Semaphore(0)
        self._closed = asyncio.Event()

    def status(self) -> EngineStatus:
        return IDLE

    def drain(self, on: bool = True) -> None:
        self.draining = on

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
def draining_server(
    client: EndlessClient | ScriptedClient, drain_s: float
) -> Iterator[tuple[str, main.DrainingServer]]:
    tokenizer = byte_tokenizer()
    door = Door(tokenizer, max_model_len=64, vocab_size=tokenizer.vocab_size)
    app = create_app(client, door, ServeSettings(model_names=("endless",), version="0"))
    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=60)
    server = main.DrainingServer(config, client, drain_s=drain_s)
    listener = main._bind("127.0.0.1", 0)
    main._listen(listener)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
        thread.join(60)
        assert not thread.is_alive()
    finally:
        server.should_exit = server.force_exit = True
        listener.close()


def stream_from(url: str) -> str:
    body = {"prompt": "a", "stream": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).text


def test_B112_answers_that_outlast_the_drain_end_with_an_error_that_says_why() -> None:
    client = EndlessClient()
    with draining_server(client, 0) as (url, server), ThreadPoolExecutor(2) as threads:
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("asked_before", [False, True])
def test_a_second_signal_ends_answers_at_once_and_without_a_traceback(
    caplog: pytest.LogCaptureFixture, number: signal.Signals, asked_before: bool
) -> None:
    """Also when somebody had asked for the end in another way: that is no signal."""
    client = EndlessClient()
    with draining_server(client, 600) as (url, server), ThreadPoolExecutor(1) as threads:
        answer = threads.submit(stream_from, url)
        assert client.started.acquire(timeout=60)
        server.should_exit = asked_before
        server.handle_exit(number, None)
        assert server.should_exit
        assert not server.force_exit
        assert httpx.get(f"{url}/health/live", timeout=60).status_code == 200
        server.handle_exit(number, None)
        assert "engine_stopped" in answer.result()
        assert answer.result().endswith("data: [DONE]\n\n")
    assert "Traceback" not in caplog.text


def test_B114_a_drain_lets_streams_go_on_and_says_that_it_drains() -> None:
    client = ScriptedClient(byte_tokenizer())
    gate = Gate()
    client.script = Script(text="to the very end", gate=gate, pause_at=3)
    with draining_server(client, 600) as (url, server), ThreadPoolExecutor(1) as threads:
        answer = threads.submit(stream_from, url)
        assert gate.reached.wait(60)
        server.handle_exit(signal.SIGTERM, None)
        while httpx.get(f"{url}/health", timeout=60).status_code == 200:
            pass
        assert httpx.get(f"{url}/health", timeout=60).json()["status"] == "draining"
        assert httpx.get(f"{url}/health/ready", timeout=60).status_code == 503
        assert httpx.get(f"{url}/health/live", timeout=60).status_code == 200
        gate.open()
        pieces = re.findall(r'"text":"(.*?)"', answer.result())
        assert "".join(pieces) == "to the very end"
        assert answer.result().endswith("data: [DONE]\n\n")


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


def test_no_piece_of_an_answer_waits_for_the_one_before() -> None:
    listener = main._bind("127.0.0.1", 0)
    main._listen(listener)
    listener.setblocking(True)
    with listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


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


NEVER_READY = (
    "import sys\n"
    "from octavo.cli.main import main\n"
    "from octavo.engine.supervisor import EngineProcess\n"
    "asleep = (sys.executable, '-c', 'import time; time.sleep(3600)')\n"
    "EngineProcess.__init__.__kwdefaults__['command'] = asleep\n"
    "sys.exit(main())\n"
)
"""A server whose engine loads for ever."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def get_from_the_start(url: str, server: "subprocess.Popen[str]") -> httpx.Response:
    """As soon as anybody answers."""
    while server.poll() is None:
        with suppress(httpx.TransportError):
            return httpx.get(url, timeout=60)
    raise AssertionError(server.communicate())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_loads_says_so_and_leaves_nothing_behind_when_it_is_stopped(
    demo_model_path: Path, tmp_path: Path, number: signal.Signals
) -> None:
    port = free_port()
    command = [sys.executable, "-c", NEVER_READY, "serve", "--model", str(demo_model_path)]
    command += ["--port", str(port), "--kv-cache-memory", "64MiB", "--log-level", "warning"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as server:
        url = f"http://127.0.0.1:{port}"
        first = get_from_the_start(f"{url}/health", server)
        assert (first.status_code, first.json()["status"]) == (503, "loading")
        while httpx.get(f"{url}/health/ready", timeout=60).json()["phase"] != "model":
            pass
        assert httpx.get(f"{url}/health/live", timeout=60).status_code == 200
        refused = httpx.post(f"{url}/v1/messages", json={}, timeout=60)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["details"]["error_code"] == "model_loading"
        assert list(tmp_path.iterdir())
        server.send_signal(number)
        output, complaints = server.communicate(timeout=300)
    assert (server.returncode, output, complaints) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_loaded_ends_the_server_that_listens_already(
    demo_model_path: Path,
) -> None:
    program = NEVER_READY.replace("import time; time.sleep(3600)", "raise SystemExit(7)")
    command = [sys.executable, "-c", program, "serve", "--model", str(demo_model_path)]
    command += ["--port", "0", "--kv-cache-memory", "64MiB", "--log-level", "warning"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode != 0
    assert "the engine process ended (exit code 7) before it was ready" in ended.stderr
    assert "Traceback" not in ended.stderr
