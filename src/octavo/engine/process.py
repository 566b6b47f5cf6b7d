"""The engine process: builds an engine, then turns the crank for whoever holds the other end.

    python -m octavo.engine.process ENDPOINT BOARD

It lives as long as its standard input is open, so that it cannot outlive the front; signals that
are meant for the front do not end it.
"""

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from octavo.engine.board import Announcing, Board
from octavo.engine.crank import Crank
from octavo.engine.loading import build_engine, grammars_of
from octavo.engine.wire import (
    Command,
    Failed,
    Ready,
    Setup,
    Stop,
    decode,
    decode_commands,
    encode,
    problem_of,
)
from octavo.errors import EngineError, OctavoError
from octavo.models.loader import open_model
from octavo.observe.lives import Lives
from octavo.observe.logs import start_logging

logger = logging.getLogger(__name__)

Builder = Callable[[Setup, Board], Crank]

_OOM_SCORE_ADJ = Path("/proc/self/oom_score_adj")
_MORE_LIKELY = b"300"
"""When memory runs out this process goes, not the front: its requests go on in another one."""


def main(build: Builder | None = None) -> int:
    """Run until told to stop. `build` makes the engine; a double may take its place."""
    endpoint, descriptor = sys.argv[1], int(sys.argv[2])
    _follow_the_front()
    socket = zmq.Context(io_threads=1).socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(endpoint)
    setup = decode(socket.recv(), Setup)
    level = (
        "debug" if os.environ.get("OCTAVO_LOG", "").lower() == "debug" else setup.config.log_level
    )
    start_logging(level, tracebacks=True, form=setup.config.log_format)
    try:
        crank = (build or _build)(setup, Board(descriptor))
    except Exception as error:
        if not isinstance(error, OctavoError):
            logger.exception("the engine cannot be built")
            error = EngineError(f"the engine cannot be built: {error!r}")
        socket.send(encode(Failed(problem_of(error))))
        return 1
    gc.collect()
    gc.freeze()  # what is there now stays: no collection looks at it again
    socket.send(encode(Ready(crank.engine.status())))
    _turn(crank, socket)
    return 0


def _build(setup: Setup, board: Board) -> Crank:
    lives = Lives()
    path = Path(setup.path)
    opened = open_model(path)
    grammars = grammars_of(path, opened)
    engine, _ = build_engine(
        opened,
        setup.config,
        setup.resolved,
        grammars,
        draft=None if setup.draft_path is None else open_model(setup.draft_path),
        observers=[lives],
        watch=lambda runner: Announcing(runner, board),
    )
    return Crank(engine, lives, grammars)


def _follow_the_front() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        _OOM_SCORE_ADJ.write_bytes(_MORE_LIKELY)
    except OSError:
        logger.debug("this system lets no process say how soon it may be killed")
    threading.Thread(target=_end_with_the_front, name="octavo-front", daemon=True).start()


def _end_with_the_front() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)


def _turn(crank: Crank, socket: "zmq.Socket[bytes]") -> None:
    while True:
        commands = _receive(socket, wait=crank.idle)
        if commands:
            socket.send(encode(crank.obey(commands)))
        if any(isinstance(command, Stop) for command in commands):
            return
        if not crank.idle:
            socket.send(encode(crank.step()))


def _receive(socket: "zmq.Socket[bytes]", *, wait: bool) -> list[Command]:
    """Everything that has arrived; waits for the first when there is nothing to compute."""
    commands: list[Command] = []
    if wait:
        commands += decode_commands(socket.recv())
    while socket.poll(0):
        commands += decode_commands(socket.recv())
    return commands


if __name__ == "__main__":
    sys.exit(main())
