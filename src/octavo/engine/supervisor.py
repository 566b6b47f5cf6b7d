"""The supervisor: an engine process that is started again when it dies, as the link of a client.

launch ──▶ Ready ──▶ turns ──▶ dead ──▶ launch …        dead: it has ended, by itself or killed,
   ▲                             │                      or made no step for too long
   └── after a pause that grows ─┘
"""

import asyncio
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from octavo.engine.board import Board
from octavo.engine.client import Front
from octavo.engine.engine import EngineStatus
from octavo.engine.ledger import Key
from octavo.engine.wire import (
    Began,
    Command,
    Failed,
    News,
    Setup,
    Stop,
    decode,
    decode_news,
    encode,
    error_of,
)
from octavo.errors import EngineError, EngineStopped

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "octavo.engine.process")

FAILED_STARTS = 3
"""An engine that could not be started again so often in a row will not be."""
PAUSES_S = (0.0, 0.0, 0.5, 2.0, 5.0)
"""Before each start again, the longer the more engines in a row have died before their first step
was done."""
STOP_S = 10.0
"""How long an engine that is told to stop may take for the step it is in."""
LOADS = 10.0
"""An engine that is started again may take so many times as long as the first one did."""


@dataclass(slots=True)
class Vitals:
    """When an engine that has work was last heard of. Times by one clock, in seconds."""

    heard_s: float
    busy: bool = False
    """It has work by its own word, or was sent some since."""
    stepped: bool = False

    def sent(self, now: float) -> None:
        if not self.busy:
            self.busy, self.heard_s = True, now

    def heard(self, news: News, now: float) -> None:
        self.heard_s = now
        self.stepped = self.stepped or news.status.steps > 0
        self.busy = bool(news.status.running or news.status.waiting)

    def stuck(self, now: float, limit_s: float) -> bool:
        return self.busy and now - self.heard_s > limit_s


@dataclass(slots=True)
class _Life:
    """One engine process."""

    process: asyncio.subprocess.Process
    socket: zmq.asyncio.Socket
    board: Board
    folder: str
    vitals: Vitals

    async def begin(self, setup: Setup, within_s: float | None) -> EngineStatus:
        """Have it build the engine.

        Raises   the error that the engine was refused with; EngineError when it died over it, or
                 was not ready in time.
        """
        greeting = asyncio.ensure_future(self._greet(setup))
        ending = asyncio.ensure_future(self.process.wait())
        try:
            done, _ = await asyncio.wait(
                {greeting, ending}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise EngineError(f"the engine process was not ready within {within_s:.1f} s")
            if not greeting.done():  # its last word may be on the way
                await asyncio.wait({greeting}, timeout=1)
            if not greeting.done():
                code = self.process.returncode
                raise EngineError(f"the engine process ended ({_said(code)}) before it was ready")
            began = greeting.result()
        finally:
            greeting.cancel()
            ending.cancel()
            shutil.rmtree(self.folder, ignore_errors=True)  # nobody else is to connect
        if isinstance(began, Failed):
            raise error_of(began.problem)
        return began.status

    async def _greet(self, setup: Setup) -> Began:
        await self.socket.send(encode(setup))
        return decode(await self.socket.recv(), Began)  # type: ignore[arg-type]

    async def last_words(self) -> tuple[Key, ...]:
        """Have it dead, and let go of it; what it was computing."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        computing = self.board.read()
        await self.end()
        return computing

    async def end(self) -> None:
        """Kill what is left of it, and let go of all that it had."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.socket.close(linger=0)
        self.board.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class EngineProcess:
    """A `Link` to an engine in a process of its own.

    An engine that has work and was not heard of for `stall_s` is killed, and so dead (0: never).
    One that is started again has so long to be ready, or `LOADS` times as long as the first took.
    """

    def __init__(
        self, setup: Setup, *, stall_s: float = 0.0, command: Sequence[str] = COMMAND
    ) -> None:
        self._setup = setup
        self._stall_s = stall_s
        self._command = tuple(command)
        self._context = zmq.asyncio.Context(io_threads=1)
        self._life: _Life | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._ready = False
        self._first_load_s: float | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the engine process, if there is one now."""
        return None if self._life is None else self._life.process.pid

    async def launch(self) -> None:
        """Let the process begin, so that it loads while the front does other things."""
        with ExitStack() as undo:
            folder = tempfile.mkdtemp(prefix="octavo-")
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            socket = self._context.socket(zmq.PAIR)
            undo.callback(socket.close, linger=0)
            socket.set_hwm(0)
            endpoint = f"ipc://{folder}/engine"
            socket.bind(endpoint)
            board = Board.of(self._setup.resolved.ceilings.sequences)
            undo.callback(board.close)
            process = await asyncio.create_subprocess_exec(
                *self._command,
                endpoint,
                str(board.descriptor),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(board.descriptor,),
                start_new_session=True,  # Ctrl-C is for the front
            )
            self._life = _Life(process, socket, board, folder, Vitals(time.monotonic()))
            undo.pop_all()

    async def start(self, front: Front) -> None:
        status = await self._begin()
        self._ready = True
        front.ready(status)
        self._keeping = asyncio.create_task(self._keep(front))

    def send(self, command: Command) -> None:
        message = encode((command,))
        if self._life is not None and self._ready:
            self._life.vitals.sent(time.monotonic())
            self._life.socket.send(message)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._keeping is not None:
            if self._ready:
                self.send(Stop())
                await asyncio.wait({self._keeping}, timeout=STOP_S)
            self._kill()
            await asyncio.wait({self._keeping})
        if self._life is not None:
            await self._life.end()
        self._context.destroy(linger=0)

    # --- one life after the other

    async def _begin(self) -> EngineStatus:
        """An engine that takes commands: the one launched last, or a new one."""
        if self._life is None:
            await self.launch()
        life = self._life
        assert life is not None
        try:
            if self._closing is not None:
                raise EngineStopped("the server is stopping")
            began_s = time.monotonic()
            status = await life.begin(self._setup, self._within_s())
            if self._first_load_s is None:
                self._first_load_s = time.monotonic() - began_s
            return status
        except BaseException:
            self._life = None
            await life.end()
            raise

    def _within_s(self) -> float | None:
        """How long an engine may take to be ready; the first one is in nobody's way."""
        if self._first_load_s is None or not self._stall_s:
            return None
        return max(self._stall_s, LOADS * self._first_load_s)

    async def _keep(self, front: Front) -> None:
        try:
            await self._serve(front)
        except Exception:
            logger.exception("the engine is not watched any more")
        finally:
            self._ready = False
            front.ended("the engine has ended")

    async def _serve(self, front: Front) -> None:
        """One engine after the other, until there will be no other."""
        useless = 0
        while True:
            why, killed = await self._live(front)
            self._ready = False
            if self._closing is not None:
                break
            life, self._life = self._life, None
            assert life is not None
            computing = await life.last_words()
            logger.error("%s, computing %d answers; all go on in another", why, len(computing))
            front.died(computing, killed=killed)
            useless = 0 if life.vitals.stepped else useless + 1
            status = await self._begin_again(useless)
            if status is None or self._closing is not None:
                break
            self._ready = True
            front.ready(status)

    async def _begin_again(self, useless: int) -> EngineStatus | None:
        """The status of another engine, None when there will be none; so many before it did
        nothing."""
        started_s = time.monotonic()
        for attempt in range(FAILED_STARTS):
            await asyncio.sleep(PAUSES_S[min(useless + attempt, len(PAUSES_S) - 1)])
            if self._closing is not None:
                return None
            self._setup = msgspec.structs.replace(self._setup, restarts=self._setup.restarts + 1)
            try:
                status = await self._begin()
            except Exception as error:  # no memory, no descriptor: there may be some later
                logger.error("the engine did not start again: %s", error)
                continue
            logger.info("another engine is ready after %.2f s", time.monotonic() - started_s)
            return status
        return None

    async def _live(self, front: Front) -> tuple[str, bool]:
        """Pass on what the engine says until it is dead; what it died of, and whether somebody else
        has killed it."""
        life = self._life
        assert life is not None
        ending = asyncio.ensure_future(life.process.wait())
        pumping = asyncio.ensure_future(self._pump(life, front))
        watching = asyncio.ensure_future(self._watch(life))
        try:
            done, _ = await asyncio.wait(
                {ending, pumping, watching}, return_when=asyncio.FIRST_COMPLETED
            )
            if watching in done:
                return f"the engine made no step for {self._stall_s:g} s", False
            if pumping in done:
                logger.error("what the engine said was of no use", exc_info=pumping.exception())
            code = life.process.returncode
            return f"the engine ended ({_said(code)})", code == -signal.SIGKILL
        finally:
            for task in (ending, pumping, watching):
                task.cancel()
            await asyncio.gather(ending, pumping, watching, return_exceptions=True)

    async def _pump(self, life: _Life, front: Front) -> None:
        while True:
            news = decode_news(await life.socket.recv())
            life.vitals.heard(news, time.monotonic())
            _tell(front, news)
            await asyncio.sleep(0)  # others may go on, however much has come

    async def _watch(self, life: _Life) -> None:
        """Returns when the engine is stuck."""
        while not self._stall_s or not life.vitals.stuck(time.monotonic(), self._stall_s):
            await asyncio.sleep(min(1.0, self._stall_s / 4) or 60.0)

    def _kill(self) -> None:
        if self._life is not None:
            with suppress(ProcessLookupError):
                self._life.process.kill()


def _tell(front: Front, news: News) -> None:
    """What a front makes of the news is no fault of the engine."""
    try:
        front.told(news)
    except Exception:
        logger.exception("the front failed on what the engine said; both go on")


def _said(code: int | None) -> str:
    """
    >>> _said(-9), _said(1)
    ('by SIGKILL', 'exit code 1')
    """
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"exit code {code}"
