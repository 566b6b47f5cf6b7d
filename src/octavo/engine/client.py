"""The client: answers as async streams, whatever carries the engine and however often it dies."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Literal, Protocol

from octavo.core.budget import Limits
from octavo.core.events import Explanation, Finished, PromptScored, Refused, Token
from octavo.core.request import Request
from octavo.engine.door import Ticket
from octavo.engine.engine import EngineStatus
from octavo.engine.ledger import DIED, KILLED, Key, Ledger
from octavo.engine.limits import named
from octavo.engine.mailbox import Mailbox
from octavo.engine.showing import BlockShown, PoolShown
from octavo.engine.wire import (
    ANSWERS,
    Ask,
    ChangeLimits,
    Command,
    Explain,
    FindAccount,
    Flush,
    ListAccounts,
    News,
    Question,
    Reply,
    ShowBlock,
    ShowPool,
    decode,
    error_of,
)
from octavo.errors import (
    EngineError,
    EngineStopped,
    InvalidRequest,
    OctavoError,
    Overloaded,
    RequestError,
)
from octavo.observe.explain import Account
from octavo.text.assembler import Delta, Ended

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
_Event = PromptScored | Token | Finished | Refused
State = Literal["starting", "ready", "restarting", "ended"]

RETRY_MESSAGE = "the engine is not taking requests; try again later"
GIVEN_UP = (
    "the engine ended more than once while it computed this request, the last time when it computed"
    " nothing else; it is not tried again"
)


class Front(Protocol):
    """What a link tells, in the event loop it was started in."""

    def ready(self, status: EngineStatus) -> None:
        """An engine takes commands from now on. It knows nothing of what was sent before."""

    def told(self, news: News) -> None: ...

    def died(self, computing: Collection[Key], *, killed: bool = False) -> None:
        """The engine died, or was killed from outside, while it computed these answers; another
        will be ready."""

    def ended(self, why: str) -> None:
        """There will be no other engine."""


class Link(Protocol):
    """The way to an engine."""

    async def launch(self) -> None:
        """Let it begin; `start` does too."""

    async def start(self, front: Front) -> None:
        """Returns once an engine was ready.

        Raises   SetupError, or whatever kept it from starting.
        """

    def send(self, command: Command) -> None:
        """To the engine that is ready; lost if it dies."""

    async def close(self) -> None:
        """End the engine; `ended` has been told then."""


class AsyncClient:
    """Answers as async streams, and the `Front` of a link. For one event loop.

    What the engine has not finished when it dies goes on with the next: the streams only wait.
    """

    def __init__(self, link: Link, *, clock: Clock = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._ledger = Ledger()
        self._mailboxes: dict[str, Mailbox] = {}
        self._asked: dict[int, tuple[Question, asyncio.Future[Any]]] = {}
        self._questions = 0
        self._status: EngineStatus | None = None
        self._limits: Limits | None = None
        """Those that were asked for, if any: the next engine starts with others."""
        self.state: State = "starting"
        self.restarts = 0
        self.on_death: Callable[[EngineStatus], None] = lambda last: None
        """Is told the last that an engine said before it died; its counts are lost else."""
        self.on_ready: Callable[[], None] = lambda: None
        """Is called when another engine has taken the place of one that died."""
        self.draining = False
        """No new request is taken; those under way go on."""
        self._closing = False
        self.lost = asyncio.Event()
        """Set when the engine has ended for good and nobody had asked it to."""

    async def launch(self) -> None:
        """Let the engine begin to load; `start` waits for it."""
        await self._link.launch()

    async def start(self) -> None:
        """Returns once the engine is ready.

        Raises   SetupError, EngineError: it cannot be started.
        """
        await self._link.start(self)

    async def close(self) -> None:
        """Stop the engine; answers that are under way end with an error."""
        self.draining = self._closing = True
        await self._link.close()

    def drain(self, on: bool = True) -> None:
        """Take no new requests from now on, or take them again."""
        self.draining = on or self._closing

    @property
    def alive(self) -> bool:
        """False once the engine has ended for good."""
        return self.state != "ended"

    @property
    def restarting(self) -> bool:
        """The engine has died and the next is not ready yet."""
        return self.state == "restarting"

    @property
    def busy_since_s(self) -> float | None:
        """Since when the engine has had an answer to compute, on the clock; None if it has none.
        One that is there and was not read yet is no work of its."""
        return self._ledger.since_s

    def status(self) -> EngineStatus:
        """As of the last step."""
        assert self._status is not None, "start() comes first"
        return self._status

    async def stream(self, ticket: Ticket) -> AsyncGenerator[Delta | Ended]:
        """The answer as it comes; `Ended` is the last item of each branch. Closing the iterator
        cancels.

        Raises   Overloaded or InvalidRequest when the engine refuses; EngineStopped; EngineError.
        """
        if self.draining or not self.alive:
            raise EngineStopped(RETRY_MESSAGE)
        self._check_queue(ticket.request)
        request_id = ticket.request.id
        mailbox = self._mailboxes[request_id] = Mailbox(ticket)
        unread = mailbox.unfinished
        try:
            self._send(self._ledger.open(ticket.request, self._clock()))
            while unread:
                for item in await mailbox.take():
                    unread -= isinstance(item, Ended)
                    yield item
        finally:
            del self._mailboxes[request_id]
            if mailbox.unfinished:
                self._send(self._ledger.close(request_id))

    def _check_queue(self, request: Request) -> None:
        """What no engine gets at once must find room in the queue here.

        Raises   Overloaded.
        """
        if self._status is None or (self.state == "ready" and not self._ledger.holding):
            return
        refused = self._ledger.refusal(request, self._limits or self._status.limits)
        if refused is not None:
            raise _refusal(refused)

    # --- questions

    async def change_limits(self, changes: Mapping[str, object]) -> Limits:
        """Let other limits hold; returns all that hold now.

        Raises   InvalidRequest: nothing has changed. EngineStopped.
        """
        try:
            limits: Limits = await self._ask(ChangeLimits(tuple(changes.items())))
        except OverflowError as error:  # no message holds it
            raise InvalidRequest(f"a limit is too large: {error}") from error
        self._limits = limits
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

    async def accounts(self) -> tuple[Account, ...]:
        """The lives of the last requests of this engine, briefly, the oldest first.

        Raises   EngineStopped.
        """
        accounts: tuple[Account, ...] = await self._ask(ListAccounts())
        return accounts

    async def find_account(self, name: str) -> Account | None:
        """The whole life of the request of this id, or of the only one whose id begins so.

        Raises   UnknownRequest: several begin so. EngineStopped.
        """
        account: Account | None = await self._ask(FindAccount(name))
        return account

    async def show_pool(self, *, most: int) -> PoolShown:
        """Every block, all that run, and at most so many of those that wait.

        Raises   EngineStopped.
        """
        shown: PoolShown = await self._ask(ShowPool(most))
        return shown

    async def show_block(self, block: int) -> BlockShown:
        """What there is to say about one block.

        Raises   InvalidRequest: there is no such block. EngineStopped.
        """
        shown: BlockShown = await self._ask(ShowBlock(block))
        return shown

    async def _ask(self, question: Question) -> Any:
        """The answer; one that died with the engine is asked of the next."""
        if not self.alive:
            raise EngineStopped("the engine has ended")
        self._questions += 1
        number = self._questions
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = question, future
        try:
            self._send([Ask(number, question)])
            return await future
        finally:
            del self._asked[number]

    # --- what the link tells

    def ready(self, status: EngineStatus) -> None:
        self._status = status
        self.state = "ready"
        if self._limits is not None and self._limits != status.limits:
            self._send([Ask(0, ChangeLimits(tuple(named(self._limits).items())))])
        self._send(Ask(number, question) for number, (question, _) in self._asked.items())
        self._send(self._ledger.resubmit(self._clock()))
        if self.restarts:
            _call(self.on_ready)

    def told(self, news: News) -> None:
        self._status = news.status
        now = self._clock()
        events: tuple[_Event, ...] = (*news.scores, *news.tokens, *news.ends, *news.refusals)
        for event in events:
            try:
                self._take(event, now)
            except Exception:  # the trouble of this request alone
                logger.exception("what came of a request could not be taken in")
                if owner := self._ledger.owner_of(event.request_id):
                    self._fail(owner, EngineError("what came of this request was lost"))
        for reply in news.replies:
            self._settle(reply)
        self._send(self._ledger.release(now))

    def _take(self, event: _Event, now: float) -> None:
        match event:
            case Token():
                if owner := self._ledger.token(event, now):
                    self._tell(owner, event)
            case PromptScored():
                if owner := self._ledger.owner(event):
                    self._tell(owner, event)
            case Finished():
                if closed := self._ledger.end(event):
                    self._tell(*closed)
            case Refused():
                if owner := self._ledger.owner_of(event.request_id):
                    self._fail(owner, _refusal(event))

    def died(self, computing: Collection[Key], *, killed: bool = False) -> None:
        self.state = "restarting"
        self.restarts += 1
        if self._status is not None:
            _call(partial(self.on_death, self._status))
        culprit = self._ledger.died(computing, KILLED if killed else DIED, now=self._clock())
        if culprit is not None:
            self._fail(culprit, EngineError(GIVEN_UP))

    def ended(self, why: str) -> None:
        self.state = "ended"
        if not self._closing:
            self.lost.set()
        for owner in tuple(self._mailboxes):
            self._fail(owner, EngineStopped(f"{why} before the answer was complete"))
        for _, future in self._asked.values():
            if not future.done():
                future.set_exception(EngineStopped(f"{why} before it answered"))

    def _send(self, commands: Iterable[Command]) -> None:
        """To the engine that is ready; if none is, `ready` sends what is still wanted then."""
        if self.state == "ready":
            for command in commands:
                self._link.send(command)

    def _tell(self, owner: str, event: Token | PromptScored | Finished) -> None:
        mailbox = self._mailboxes.get(owner)
        if mailbox is None:
            return
        try:
            found_end = mailbox.put(event)
        except Exception:  # the trouble of this request alone
            logger.exception("an answer could not be put into words")
            self._fail(owner, EngineError("this answer could not be put into words"))
            return
        if found_end:
            self._send(self._ledger.stop(owner, event.branch))

    def _fail(self, owner: str, error: OctavoError) -> None:
        """The request ends with an error, whatever is left of it."""
        self._send(self._ledger.close(owner))
        if mailbox := self._mailboxes.get(owner):
            mailbox.fail(error)

    def _settle(self, reply: Reply) -> None:
        """Give who asked the answer, if they still wait for it."""
        question, future = self._asked.get(reply.number, (None, None))
        if question is None or future is None or future.done():
            return
        if reply.problem is not None:
            future.set_exception(error_of(reply.problem))
            return
        try:
            future.set_result(decode(reply.answer, ANSWERS[type(question)]))
        except Exception as error:  # the trouble of who asked alone
            logger.exception("an answer of the engine could not be read")
            future.set_exception(EngineError(f"the engine's answer could not be read: {error}"))


def _call(observer: Callable[[], None]) -> None:
    """Trouble of those who are told is none of the answers'."""
    try:
        observer()
    except Exception:
        logger.exception("one who is told of the engine's life failed")


def _refusal(refused: Refused) -> RequestError:
    if refused.limit == "blocks":
        error = RequestError(refused.message)
        error.code = "context_length_exceeded"
        return error
    message = f"the request was refused: {refused.message}"
    if refused.limit.startswith("waiting"):
        return Overloaded(message)
    return InvalidRequest(message, param="cache_control" if refused.limit == "pin" else None)
