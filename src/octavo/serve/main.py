"""The server process: an engine, an application in front of it, a socket, and a clean end."""

import asyncio
import logging
import signal
import socket
import sys
from types import FrameType

import uvicorn

from octavo import __version__
from octavo.config import EngineConfig, Sources
from octavo.engine.build import Built, build
from octavo.engine.client import AsyncClient
from octavo.errors import ConfigError
from octavo.observe.lives import Lives
from octavo.resolve import settings_line
from octavo.serve.app import create_app
from octavo.serve.service import ServeSettings

logger = logging.getLogger(__name__)

DRAIN_S = 30
"""How long answers under way may take to finish once the server is told to stop."""


def run_server(config: EngineConfig, sources: Sources) -> int:
    """Serve until SIGINT or SIGTERM; answers under way are finished first.

    Raises   SetupError: the model, the settings or the address cannot be used.
    """
    listener = _listen(config.host, config.port)
    with listener:
        lives = Lives()
        built = build(config, observers=[lives])
        logger.info("%s", settings_line(config, sources, built.resolved))
        asyncio.run(_serve(config, built, lives, listener))
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket, taken before the model is loaded: a wrong address costs no waiting."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another host or port"
        ) from error
    listener.setblocking(False)
    return listener


async def _serve(config: EngineConfig, built: Built, lives: Lives, listener: socket.socket) -> None:
    client = AsyncClient(built.engine)
    settings = ServeSettings(model_names=(built.resolved.served_model_name,), version=__version__)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(client, built.door, settings, lives),
            access_log=config.log_level == "debug",
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=DRAIN_S,
        )
    )
    await client.start()
    # The server raises the signal that ended it once more, when it has put back these handlers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _do_nothing)
    try:
        _announce(built, listener)
        await server.serve(sockets=[listener])
    finally:
        await client.close()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The server has shut down already."""


def _announce(built: Built, listener: socket.socket) -> None:
    """Say where the server is, and a line to try it with."""
    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    url = f"http://{reachable}:{port}"
    sys.stdout.write(f"Octavo serves {built.resolved.served_model_name} at {url}\n")
    sys.stdout.write(f"Try it:\n\n{curl_line(url, chat=built.door.has_chat_template)}\n\n")
    sys.stdout.flush()


def curl_line(url: str, *, chat: bool) -> str:
    """A command that streams an answer."""
    if chat:
        path = "/v1/chat/completions"
        body = '{"messages": [{"role": "user", "content": "What is a KV cache?"}], "stream": true}'
    else:
        path = "/v1/completions"
        body = '{"prompt": "The printer folds a sheet", "max_tokens": 64, "stream": true}'
    return f"curl -N {url}{path} -H 'Content-Type: application/json' -d '{body}'"
