"""The seam between a front and the engine: requests go in, events come out.

`EngineThread` turns the crank in a thread of its own; `AsyncClient` speaks to it from an asyncio
loop. Only frozen values cross, so a process border can take the thread's place.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.budget import Limits
from octavo.core.events import CancelReason, Event, Explanation, Refused, Token
from octavo.core.request import Request
from octavo.engine.door import Ticket
from octavo.engine.engine import Engine, EngineStatus
from octavo.errors import EngineStopped, InvalidRequest, OctavoError, Overloaded, RequestError
from octavo.text.assembler import Delta, Ended

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """One branch of a request, or all; "stop" says that a stop string has ended the answer."""

    request_id: str
    branch: int | None = None
    reason: CancelReason = "abort"


@dataclass(frozen=True, slots=True)
class ChangeLimits:
    """Answered by the limits that hold then. Pairs of a limit and its new value."""

    changes: tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Flush:
    """Empty the prefix cache. Answered by how many blocks it held."""


@dataclass(frozen=True, slots=True)
class Explain:
    """Answered by what the prefix cache has of this prompt."""

    request: Request


Question = ChangeLimits | Flush | Explain
"""What the engine is asked about itself, not for a request."""
Answer = Limits | int | Explanation


@dataclass(frozen=True, slots=True)
class Ask:
    """A question, with a number to know its reply by."""

    number: int
    question: Question


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a question, or why there is none."""

    number: int
    answer: Answer | OctavoError


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread after the current step."""


Command = Submit | Cancel | Ask | Stop
Told = Event | Reply
Deliver = Callable[[tuple[Told, ...]], None]


class EngineThread:
    """Steps while there is work, sleeps while there is none.

    `deliver` gets what commands and steps lead to, at once, in the engine's thread, and `ended` is
    called there when the thread ends, for whatever reason; neither may block or raise. `status` may
    be read from any thread.
    """

    def __init__(self, engine: Engine, deliver: Deliver, ended: Callable[[], None]) -> None:
        self._engine = engine
        self._deliver = deliver
        self._ended = ended
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self.status: EngineStatus = engine.status()

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def stop(self, timeout_s: float | None = None) -> None:
        """Ask the thread to end, and wait for it."""
        self.send(Stop())
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._turn()
        except Exception:
            logger.exception("the engine has stopped on an internal error")
        finally:
            self._ended()

    def _turn(self) -> None:
        while True:
            commands = self._receive()
            told = [each for command in commands for each in self._obey(command)]
            if any(isinstance(command, Stop) for command in commands):
                return
            if told:
                self._tell(told)
            self._tell(self._engine.step())

    def _tell(self, told: Sequence[Told]) -> None:
        """Whoever is told finds it in the status."""
        self.status = self._engine.status()
        if told:
            self._deliver(tuple(told))

    def _receive(self) -> list[Command]:
        """Everything that has arrived; waits for the first when there is nothing to compute."""
        commands = [self._inbox.get()] if self._engine.idle else []
        while not self._inbox.empty():
            commands.append(self._inbox.get())
        return commands

    def _obey(self, command: Command) -> tuple[Told, ...]:
        match command:
            case Submit(request):
                return self._engine.submit(request)
            case Cancel(request_id, branch, reason):
                return self._engine.cancel(request_id, branch, reason)
            case Ask(number, question):
                return (Reply(number, self._answer(question)),)
            case Stop():
                return ()

    def _answer(self, question: Question) -> Answer | OctavoError:
        try:
            match question:
                case ChangeLimits(changes):
                    return self._engine.change_limits(dict(changes))
                case Flush():
                    return self._engine.flush()
                case Explain(request):
                    return self._engine.explain(request)
        except OctavoError as error:
            return error


class AsyncClient:
    """Answers as async streams. Bound to the event loop in which `start` is called."""

    def __init__(self, engine: Engine) -> None:
        self._thread = EngineThread(engine, self._deliver, self._engine_ended)
        self._listeners: dict[str, asyncio.Queue[Event | None]] = {}
        """None in a queue says that the engine has ended."""
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._questions = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.draining = False
        self.alive = True
        """False once the engine has ended. Changed in the loop only, so that no stream is opened
        after the streams have been told."""

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Stop the engine; answers that are under way end with an error."""
        self.draining = True
        await asyncio.to_thread(self._thread.stop)

    def status(self) -> EngineStatus:
        return self._thread.status

    async def stream(self, ticket: Ticket) -> AsyncGenerator[Delta | Ended]:
        """The answer as it comes; `Ended` is the last item of each branch. Closing the iterator
        cancels.

        Raises   Overloaded or InvalidRequest when the engine refuses; EngineStopped.
        """
        if self.draining or not self.alive:
            raise EngineStopped("the engine is not taking requests; try again later")
        request_id = ticket.request.id
        unfinished = ticket.request.branches
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._listeners[request_id] = events
        self._thread.send(Submit(ticket.request))
        try:
            while True:
                event = await events.get()
                if event is None:
                    raise EngineStopped("the engine stopped before the answer was complete")
                if isinstance(event, Refused):
                    raise _refusal(event)
                assembler = ticket.assembler_of(event)
                for item in assembler.take(event):
                    unfinished -= isinstance(item, Ended)
                    if not unfinished:
                        del self._listeners[request_id]
                        yield item
                        return
                    yield item
                if assembler.ended and isinstance(event, Token):
                    self._thread.send(Cancel(request_id, event.branch, "stop"))
        finally:
            if self._listeners.pop(request_id, None) is not None:
                self._thread.send(Cancel(request_id))

    async def change_limits(self, changes: Mapping[str, object]) -> Limits:
        """Let other limits hold; returns all that hold now.

        Raises   InvalidRequest: nothing has changed. EngineStopped.
        """
        limits: Limits = await self._ask(ChangeLimits(tuple(changes.items())))
        return limits

    async def flush(self) -> int:
        """Empty the prefix cache: later requests find nothing of before. How many blocks it held.

        Raises   EngineStopped.
        """
        blocks: int = await self._ask(Flush())
        return blocks

    async def explain(self, request: Request) -> Explanation:
        """What the prefix cache has of this prompt now, and why not the rest; it is not served.

        Raises   EngineStopped.
        """
        explanation: Explanation = await self._ask(Explain(request))
        return explanation

    async def _ask(self, question: Question) -> Any:
        if not self.alive:
            raise EngineStopped("the engine has ended")
        self._questions += 1
        number = self._questions
        self._asked[number] = asyncio.get_running_loop().create_future()
        self._thread.send(Ask(number, question))
        try:
            return await self._asked[number]
        finally:
            del self._asked[number]

    def _deliver(self, told: tuple[Told, ...]) -> None:
        self._call(lambda: self._dispatch(told))

    def _engine_ended(self) -> None:
        self._call(self._end_all)

    def _call(self, action: Callable[[], None]) -> None:
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # the loop is closed: nobody listens any more
            logger.info("the front has gone before the engine")

    def _dispatch(self, told: tuple[Told, ...]) -> None:
        for each in told:
            if isinstance(each, Reply):
                self._settle(each.number, each.answer)
                continue
            listener = self._listeners.get(each.request_id)
            if listener is not None:
                listener.put_nowait(each)

    def _settle(self, number: int, answer: Answer | OctavoError) -> None:
        """Give who asked the answer, if they still wait for it."""
        asked = self._asked.get(number)
        if asked is None or asked.done():
            return
        if isinstance(answer, OctavoError):
            asked.set_exception(answer)
        else:
            asked.set_result(answer)

    def _end_all(self) -> None:
        self.alive = False
        for listener in self._listeners.values():
            listener.put_nowait(None)
        for number in self._asked:
            self._settle(number, EngineStopped("the engine stopped before it answered"))


def _refusal(refused: Refused) -> RequestError:
    if refused.limit == "blocks":
        error = RequestError(refused.message)
        error.code = "context_length_exceeded"
        return error
    message = f"the request was refused: {refused.message}"
    if refused.limit.startswith("waiting"):
        return Overloaded(message)
    return InvalidRequest(message, param="cache_control" if refused.limit == "pin" else None)
