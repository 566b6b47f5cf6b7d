"""The crank: obeys commands and steps, for a thread or a process that carries the two."""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from octavo.core.events import Event, Finished, PromptScored, Refused, Token
from octavo.core.request import Request
from octavo.engine.engine import Engine, EngineStatus
from octavo.engine.showing import show_block, show_pool
from octavo.engine.wire import (
    Ask,
    Cancel,
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
    Stop,
    Submit,
    encode,
    problem_of,
)
from octavo.errors import EngineError, OctavoError
from octavo.observe.explain import account
from octavo.observe.lives import Lives
from octavo.text.grammar import Compiled, Grammars

logger = logging.getLogger(__name__)


class Crank:
    """An engine and what is asked of it. `lives` observes the same engine.

    A request whose grammar is new here waits until one of the threads of `grammars` has compiled
    it; the others go on meanwhile.
    """

    def __init__(
        self, engine: Engine, lives: Lives | None = None, grammars: Grammars | None = None
    ) -> None:
        self.engine = engine
        self._lives = lives or Lives()
        self._grammars = grammars
        self._held: list[tuple[Request, Future[Compiled]]] = []
        """Requests that wait for their grammar, in order of arrival."""

    @property
    def idle(self) -> bool:
        return self.engine.idle and not self._held

    def status(self) -> EngineStatus:
        """The engine's, where those that wait for their grammar wait too."""
        status = self.engine.status()
        held = sum(request.branches for request, _ in self._held)
        return replace(status, waiting=status.waiting + held) if held else status

    def obey(self, commands: Iterable[Command]) -> News:
        """What came of the commands up to a `Stop`; they take no step."""
        events: list[Event] = []
        replies: list[Reply] = []
        for command in commands:
            match command:
                case Submit(request):
                    events += self._submit(request)
                case Cancel(request_id, branch, reason):
                    events += self._let_in(partial(_is_named, request_id))
                    events += self.engine.cancel(request_id, branch, reason)
                case Ask(number, question):
                    replies.append(self._reply(number, question))
                case Stop():
                    break
        return self._news(events, replies)

    def step(self) -> News:
        """What came of one step, if there was anything to compute."""
        if self._held and self.engine.idle:
            self._held[0][1].result()  # nothing else to do
        ready = self._let_in(lambda _, compiled: compiled.done())
        return self._news((*ready, *self.engine.step()))

    def _submit(self, request: Request) -> tuple[Event, ...]:
        grammar = request.sampling.grammar
        if grammar is not None and self._grammars is not None:
            compiled = self._grammars.prepare(grammar)
            if not compiled.done():
                self._held.append((request, compiled))
                return ()
        return self.engine.submit(request)

    def _let_in(self, chosen: Callable[[Request, Future[Compiled]], bool]) -> tuple[Event, ...]:
        """Submit those that are held and chosen."""
        if not self._held:
            return ()
        entering = [one for one in self._held if chosen(*one)]
        self._held = [one for one in self._held if one not in entering]
        return tuple(event for request, _ in entering for event in self.engine.submit(request))

    def _news(self, events: Iterable[Event], replies: Iterable[Reply] = ()) -> News:
        scores, tokens, ends, refusals = [], [], [], []
        for event in events:
            if isinstance(event, Token):
                tokens.append(event)
            elif isinstance(event, Finished):
                ends.append(event)
            elif isinstance(event, PromptScored):
                scores.append(event)
            else:
                assert isinstance(event, Refused)
                refusals.append(event)
        return News(
            status=self.status(),
            scores=tuple(scores),
            tokens=tuple(tokens),
            ends=tuple(ends),
            refusals=tuple(refusals),
            replies=tuple(replies),
        )

    def _reply(self, number: int, question: Question) -> Reply:
        try:
            return Reply(number, encode(self._answer(question)))
        except OctavoError as error:
            return Reply(number, b"", problem_of(error))
        except Exception as error:
            logger.exception("the engine failed on a question")
            return Reply(number, b"", problem_of(EngineError(f"the engine failed: {error!r}")))

    def _answer(self, question: Question) -> object:
        match question:
            case ChangeLimits(changes):
                return self.engine.change_limits(dict(changes))
            case Flush():
                return self.engine.flush()
            case Explain(request):
                return self.engine.explain(request)
            case ListAccounts():
                started_s = self._lives.started_s or 0.0
                return tuple(account(life, started_s, brief=True) for life in self._lives.all())
            case FindAccount(name):
                life = self._lives.find(name)
                return None if life is None else account(life, self._lives.started_s or 0.0)
            case ShowPool(most):
                return show_pool(self.engine, self._lives, most=most)
            case ShowBlock(block):
                return show_block(self.engine, self._lives, block)


def _is_named(name: str, request: Request, _: object) -> bool:
    return request.id == name
