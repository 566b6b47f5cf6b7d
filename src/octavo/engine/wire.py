"""What crosses the seam between a front and an engine: commands go in, news comes out.

Only frozen values cross, in one message a turn, so that a thread or a process can stand on the
other side. Messages are msgpack.

    front   ── Setup ──▶                                   engine process begins
            ◀── Ready or Failed ──                         the engine is built, or cannot be
            ── (Submit | Cancel | Ask | Stop, …) ──▶
            ◀── News ──                                    after each turn of the crank
"""

from typing import Any, TypeVar

import msgspec

from octavo.config import EngineConfig
from octavo.core.budget import Limits
from octavo.core.events import CancelReason, Explanation, Finished, PromptScored, Refused, Token
from octavo.core.request import Request
from octavo.engine.engine import EngineStatus
from octavo.engine.showing import BlockShown, PoolShown
from octavo.errors import EngineError, OctavoError
from octavo.observe.explain import Account
from octavo.resolve import Resolved

T = TypeVar("T")


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One branch of a request, or all; "stop" says that a stop string has ended the answer."""

    request_id: str
    branch: int | None = None
    reason: CancelReason = "abort"


class ChangeLimits(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered by the limits that hold then. Pairs of a limit and its new value."""

    changes: tuple[tuple[str, Any], ...]


class Flush(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Empty the prefix cache. Answered by how many blocks it held."""


class Explain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered by what the prefix cache has of this prompt."""

    request: Request


class ListAccounts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered by the lives of the last requests, briefly, the oldest first."""


class FindAccount(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered by the whole life of the request of this id, or of the only one that begins so."""

    name: str


class ShowPool(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered by every block, and by at most so many of those that wait."""

    most: int


class ShowBlock(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered by what there is to say about one block."""

    block: int


Question = ChangeLimits | Flush | Explain | ListAccounts | FindAccount | ShowPool | ShowBlock
"""What the engine is asked about itself, not for a request."""

ANSWERS: dict[type, Any] = {
    ChangeLimits: Limits,
    Flush: int,
    Explain: Explanation,
    ListAccounts: tuple[Account, ...],
    FindAccount: Account | None,
    ShowPool: PoolShown,
    ShowBlock: BlockShown,
}
"""The type of the answer to each question."""


class Ask(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A question, with a number to know its reply by."""

    number: int
    question: Question


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End after the current step."""


Command = Submit | Cancel | Ask | Stop


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """An error, by the name of its class."""

    kind: str
    message: str
    param: str | None = None


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a question, encoded, or why there is none."""

    number: int
    answer: bytes
    problem: Problem | None = None


class News(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What came of one turn. Scores come before tokens, these before the ends of their answers."""

    status: EngineStatus
    scores: tuple[PromptScored, ...] = ()
    tokens: tuple[Token, ...] = ()
    ends: tuple[Finished, ...] = ()
    refusals: tuple[Refused, ...] = ()
    replies: tuple[Reply, ...] = ()


class Setup(msgspec.Struct, frozen=True):
    """What an engine process is to build. The same each time, however often it has died."""

    config: EngineConfig
    resolved: Resolved
    path: str
    """Where the model is."""
    draft_path: str | None = None
    """Where its draft model is, if it has one."""
    restarts: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    status: EngineStatus


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot be built."""

    problem: Problem


Began = Ready | Failed

_encode = msgspec.msgpack.Encoder().encode
_commands = msgspec.msgpack.Decoder(tuple[Command, ...])
_news = msgspec.msgpack.Decoder(News)


def encode(message: object) -> bytes:
    return _encode(message)


def decode(message: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(message, type=kind)


def decode_commands(message: bytes) -> tuple[Command, ...]:
    return _commands.decode(message)


def decode_news(message: bytes) -> News:
    return _news.decode(message)


def problem_of(error: OctavoError) -> Problem:
    return Problem(type(error).__name__, error.message, error.param)


def error_of(problem: Problem) -> OctavoError:
    """The error again, of its own class if it is one of ours."""
    kinds: dict[str, type[OctavoError]] = {kind.__name__: kind for kind in _below(OctavoError)}
    return kinds.get(problem.kind, EngineError)(problem.message, param=problem.param)


def _below(kind: type[OctavoError]) -> list[type[OctavoError]]:
    return [each for below in kind.__subclasses__() for each in (below, *_below(below))]
