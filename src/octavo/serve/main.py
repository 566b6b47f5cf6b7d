"""The front process: an application before an engine process, a socket, and a clean end."""

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette

from octavo import __version__
from octavo.config import EngineConfig, Sources
from octavo.engine.build import Prepared, prepare
from octavo.engine.client import AsyncClient
from octavo.engine.door import Door
from octavo.engine.supervisor import EngineProcess
from octavo.engine.wire import Setup
from octavo.errors import ConfigError
from octavo.models.spec import ModelSpec
from octavo.observe.phases import Phases
from octavo.observe.tracing import Tracing, tracing_to
from octavo.observe.vllm import cache_facts
from octavo.resolve import Resolved, settings_line
from octavo.serve.app import create_app
from octavo.serve.entry import Entry
from octavo.serve.history import remember
from octavo.serve.keys import Keyring
from octavo.serve.protection import Protection
from octavo.serve.reporting import report
from octavo.serve.service import AboutModel, ServeSettings, Service
from octavo.serve.warm import Warming, read_prompts

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""How often a server that drains looks whether it is done."""

FAREWELL_S = 5
"""How long the news that an answer ends early may take to reach its reader."""

UNSUPERVISED_STALL_S = 60.0
"""When an engine without work done counts as stalled, if it is never killed for that."""

UNREAD_S = 60
"""A reader that takes nothing for so long is gone: its answer is cancelled, its memory freed."""


def run_server(config: EngineConfig, sources: Sources) -> int:
    """Serve until SIGINT or SIGTERM; answers under way are finished first. While the model loads
    health is answered, and nothing else.

    Raises   SetupError: the model, the settings or the address cannot be used.
    """
    listener = _bind(config.host, config.port)
    with listener:
        protection, tracing = Protection(config), _tracing(config)
        prepared = prepare(config)
        log_settings(config, sources, prepared)
        try:
            return asyncio.run(_serve(config, prepared, listener, protection, tracing))
        finally:
            if tracing is not None:
                tracing.close()


def _tracing(config: EngineConfig) -> Tracing | None:
    if config.otlp_endpoint is None:
        return None
    return tracing_to(config.otlp_endpoint, config.served_model_name or config.model, __version__)


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket, taken before the model is loaded: a wrong address costs no waiting."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # no such name; not a name at all
        raise _no_address(host, port, error) from error
    listener.setblocking(False)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit these. Without the first the end of a response waits up to 40 ms
    # for the reader to say that it has the beginning.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _no_address(host, port, error) from error
    return listener


def _listen(listener: socket.socket) -> None:
    """Take connections; an address that two servers have bound goes to the first that listens."""
    try:
        listener.listen()
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _no_address(host, port, error) from error


def _no_address(host: str, port: int, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else error
    return ConfigError(
        f"cannot listen on {host!r} port {port}: {reason}; choose another host or port"
    )


async def _serve(
    config: EngineConfig,
    prepared: Prepared,
    listener: socket.socket,
    protection: Protection,
    tracing: Tracing | None,
) -> int:
    """The exit code: 1 when the engine has ended, and will not come again."""
    client = engine_client(config, prepared)
    entry = Entry()
    server = DrainingServer(
        protection.http_config(
            entry,
            access_log=config.log_level == "debug",
            timeout_graceful_shutdown=FAREWELL_S,
        ),
        client,
        drain_s=config.drain_timeout,
    )
    _obey_signals(server, protection)
    _listen(listener)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(_load(config, prepared, client, entry, protection, tracing))
    beside: list[asyncio.Task[None]] = []
    try:
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            app, settings = loading.result()
            _settle()
            entry.open(app)
            _announce(prepared.resolved.served_model_name, app, listener, protection)
            beside += map(asyncio.create_task, _beside(client, server, app, settings))
            await asyncio.wait({serving})
        serving.result()
        return int(client.lost.is_set())
    finally:
        server.should_exit = True
        for task in (loading, *beside):
            task.cancel()
        await asyncio.gather(serving, loading, *beside, return_exceptions=True)
        await client.close()
        gc.unfreeze()  # or nothing that is frozen would be freed as the process ends


def _obey_signals(server: "DrainingServer", protection: Protection) -> None:
    """Before anything is there that would be left behind. uvicorn takes the first two over as it
    starts; when it has put them back it raises the signal that ended it once more."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    if protection.has_files:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, protection.reload)


async def _load(
    config: EngineConfig,
    prepared: Prepared,
    client: AsyncClient,
    entry: Entry,
    protection: Protection,
    tracing: Tracing | None,
) -> tuple[Starlette, ServeSettings]:
    """The application, once its engine is ready.

    Raises   SetupError, EngineError.
    """
    phases = Phases()
    await client.launch()  # it loads the weights while the tokenizer is built here
    door = await asyncio.to_thread(prepared.door, config)
    phases.end("tokenizer loaded")
    settings = settings_of(config, prepared, door, protection.keyring)
    app = create_app(client, door, settings, tracing=tracing)
    client.on_death = app.state.metrics.take
    warming = _warming(config, app.state.service)
    entry.phase = "model"
    await client.start()
    phases.end("engine ready")
    if warming is not None:
        entry.phase = "prompts"
        await warming.run()
        phases.end(f"{warming.prompts} prompts preloaded")
        client.on_ready = warming.again
    return app, settings


def _beside(
    client: AsyncClient, server: uvicorn.Server, app: Starlette, settings: ServeSettings
) -> tuple[Coroutine[Any, Any, None], ...]:
    """What goes on while the server serves."""
    return (
        _end_without_engine(client, server),
        remember(app.state.history, client.status),
        _end_when_asked(settings.stop_asked, server),
        report(app.state.metrics, client.status),
    )


def _warming(config: EngineConfig, service: Service) -> Warming | None:
    """Raises  ConfigError."""
    return None if config.warm is None else Warming(service, read_prompts(Path(config.warm)))


def log_settings(config: EngineConfig, sources: Sources, prepared: Prepared) -> None:
    logger.info("%s", settings_line(config, sources, prepared.resolved))


def engine_client(config: EngineConfig, prepared: Prepared) -> AsyncClient:
    """The client of an engine of this model, in a process of its own that is not started yet."""
    known = replace(config, api_key=(), admin_api_key=())  # what an engine needs of it
    setup = Setup(
        config=known,
        resolved=prepared.resolved,
        path=str(prepared.path),
        draft_path=None if prepared.draft is None else str(prepared.draft.path),
    )
    return AsyncClient(EngineProcess(setup, stall_s=prepared.resolved.stall_s))


def settings_of(
    config: EngineConfig, prepared: Prepared, door: Door, keyring: Keyring | None = None
) -> ServeSettings:
    """What an application in front of this model is told."""
    resolved = prepared.resolved
    return ServeSettings(
        model_names=(resolved.served_model_name,),
        version=__version__,
        about=about(prepared.opened.spec, resolved),
        defaults=door.defaults,
        cache_facts=cache_facts(config, resolved),
        web=config.web,
        stall_s=resolved.stall_s / 2 or UNSUPERVISED_STALL_S,
        keyring=keyring,
        allowed_origins=config.allowed_origins,
        max_body_bytes=config.max_body_size,
        trust_templates=config.trust_request_chat_template,
        request_timeout_s=config.request_timeout,
    )


def about(spec: ModelSpec, resolved: Resolved) -> AboutModel:
    """What clients are told about the model."""
    return AboutModel(
        reference=resolved.model,
        architecture=spec.architecture,
        parameters=spec.parameters,
        stored_as=spec.stored_as,
        weights_bytes=resolved.weights_bytes,
        fingerprint=spec.fingerprint,
    )


async def _end_without_engine(client: AsyncClient, server: uvicorn.Server) -> None:
    """When the engine does not come again, whoever started the server is to start another."""
    await client.lost.wait()
    logger.error("the server ends: its engine has ended and could not be started again")
    server.should_exit = True


async def _end_when_asked(asked: asyncio.Event, server: uvicorn.Server) -> None:
    await asked.wait()
    logger.info("the server ends: it was asked to, over HTTP")
    server.should_exit = True


def _settle() -> None:
    """What is there when a server starts stays: no collection of garbage, which holds up a step,
    looks at it again. That of all objects takes 20 to 30 ms otherwise."""
    gc.collect()
    gc.freeze()


class Drains(Protocol):
    """What answers: it can stop taking requests, and end those that it has."""

    def drain(self, on: bool = True) -> None: ...

    async def close(self) -> None: ...


class DrainingServer(uvicorn.Server):
    """Told to stop, it takes no new requests, says so to whoever asks, and lets answers under way
    finish for `drain_s`. Then it listens no more.

    Every answer gets its end: those that are not complete by then, or when a second signal will
    not wait so long, an error that says why.
    """

    def __init__(self, config: uvicorn.Config, client: Drains, *, drain_s: float) -> None:
        super().__init__(config)
        self._client = client
        self._drain_s = drain_s
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets answers finish, whatever has asked for the end before."""
        self._signals += 1
        self.should_exit = False
        super().handle_exit(sig, frame)
        self.force_exit = self._signals > 1

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._client.drain()
        await self._finish_answers()
        if self.server_state.tasks:
            await self._client.close()
            # Answers that were told their end may say so: else they are torn out, with a traceback.
            await asyncio.wait(self.server_state.tasks, timeout=FAREWELL_S)
        await super().shutdown(sockets)

    async def _finish_answers(self) -> None:
        deadline_s = time.monotonic() + self._drain_s
        while self.server_state.tasks and not self.force_exit and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)


def _announce(model: str, app: Starlette, listener: socket.socket, protection: Protection) -> None:
    """Say where the server is, and a line to try it with."""
    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    url = f"{protection.scheme}://{reachable}:{port}"
    keyed = protection.keyring is not None
    chat = app.state.service.door.has_chat_template
    sys.stdout.write(f"Octavo serves {model} at {url}\n")
    sys.stdout.write(f"Try it:\n\n{curl_line(url, chat=chat, keyed=keyed)}\n\n")
    sys.stdout.flush()


def curl_line(url: str, *, chat: bool, keyed: bool = False) -> str:
    """A command that streams an answer: a short one, the likeliest, so that small models shine."""
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if keyed else ""
    if chat:
        path = "/v1/chat/completions"
        asked = '"messages": [{"role": "user", "content": "Write one sentence about the sea."}]'
    else:
        path = "/v1/completions"
        asked = '"prompt": "The capital of France is"'
    body = f'{{{asked}, "max_tokens": 64, "temperature": 0, "stream": true}}'
    return f"curl -N {url}{path}{key} -H 'Content-Type: application/json' -d '{body}'"
