"""The crank: obeys commands and steps, for a thread or a process that carries the two."""

from collections.abc import Iterable

from octavo.core.events import Event, Finished, PromptScored, Refused, Token
from octavo.engine.engine import Engine
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
    Stop,
    Submit,
    encode,
    problem_of,
)
from octavo.errors import OctavoError
from octavo.observe.explain import account
from octavo.observe.lives import Lives


class Crank:
    """An engine and what is asked of it. `lives` observes the same engine."""

    def __init__(self, engine: Engine, lives: Lives | None = None) -> None:
        self.engine = engine
        self._lives = lives or Lives()

    @property
    def idle(self) -> bool:
        return self.engine.idle

    def obey(self, commands: Iterable[Command]) -> News:
        """What came of the commands up to a `Stop`; they take no step."""
        events: list[Event] = []
        replies: list[Reply] = []
        for command in commands:
            match command:
                case Submit(request):
                    events += self.engine.submit(request)
                case Cancel(request_id, branch, reason):
                    events += self.engine.cancel(request_id, branch, reason)
                case Ask(number, question):
                    replies.append(self._reply(number, question))
                case Stop():
                    break
        return self._news(events, replies)

    def step(self) -> News:
        """What came of one step, if there was anything to compute."""
        return self._news(self.engine.step())

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
            status=self.engine.status(),
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
