"""EngineThread: an engine in a thread of the front's own process, for tests and for embedding."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

from octavo.engine.client import Front
from octavo.engine.crank import Crank
from octavo.engine.engine import Engine, EngineStatus
from octavo.engine.wire import Command, News, Stop
from octavo.observe.lives import Lives

logger = logging.getLogger(__name__)


class EngineThread:
    """A `Link`. Steps while there is work, sleeps while there is none. When the engine ends, for
    whatever reason, it does not come again."""

    def __init__(self, engine: Engine, lives: Lives | None = None) -> None:
        self._crank = Crank(engine, lives)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._front: Front | None = None
        self.status: EngineStatus = engine.status()

    async def launch(self) -> None:
        """It is there already."""

    async def start(self, front: Front) -> None:
        self._front, self._loop = front, asyncio.get_running_loop()
        self._thread.start()
        front.ready(self.status)

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    async def close(self) -> None:
        self.send(Stop())
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        assert self._front is not None
        front = self._front
        try:
            self._turn(front)
        except Exception:
            logger.exception("the engine has stopped on an internal error")
        finally:
            self._call(lambda: front.ended("the engine has ended"))

    def _turn(self, front: Front) -> None:
        while True:
            commands = self._receive()
            if commands:
                self._tell(front, self._crank.obey(commands))
            if any(isinstance(command, Stop) for command in commands):
                return
            if not self._crank.idle:
                self._tell(front, self._crank.step())

    def _receive(self) -> list[Command]:
        """Everything that has arrived; waits for the first when there is nothing to compute."""
        commands = [self._inbox.get()] if self._crank.idle else []
        while not self._inbox.empty():
            commands.append(self._inbox.get())
        return commands

    def _tell(self, front: Front, news: News) -> None:
        self._call(lambda: front.told(news))

    def _call(self, action: Callable[[], None]) -> None:
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # the loop is closed: nobody listens any more
            logger.info("the front has gone before the engine")
