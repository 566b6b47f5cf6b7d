"""What every handler works with: the engine's client, the door, the settings, the books."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Protocol, TypeVar

from octavo.core.budget import Limits
from octavo.core.events import Explanation, Receipt
from octavo.core.request import Request
from octavo.engine.door import Door, Ticket
from octavo.engine.engine import EngineStatus
from octavo.engine.params import SamplingParams
from octavo.engine.showing import BlockShown, PoolShown
from octavo.engine.voice import SILENT, Talk
from octavo.errors import (
    DeadlineExceeded,
    EngineError,
    EngineStopped,
    Expired,
    InvalidRequest,
    OctavoError,
    Overloaded,
    QueueTimeout,
    RequestError,
    UnknownModel,
)
from octavo.observe.explain import Account
from octavo.observe.metrics import Metrics
from octavo.observe.tracing import Outcome, Tracing
from octavo.serve.departures import Departures
from octavo.serve.history import History
from octavo.serve.keys import Keyring, Visit
from octavo.serve.tracing import caller
from octavo.serve.watch import Watch
from octavo.text.assembler import Delta, Ended
from octavo.units import KIB, MIB

Item = Delta | Ended
T = TypeVar("T")

MOST_WAITING = 200
"""Of those that wait, so many are shown."""
_LARGE_BODY_BYTES = 64 * KIB
"""A body of this size takes milliseconds to tokenise."""


class Client(Protocol):
    """The engine, as a server sees it."""

    @property
    def alive(self) -> bool: ...

    @property
    def restarting(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    @property
    def busy_since_s(self) -> float | None: ...

    def drain(self, on: bool = True) -> None: ...

    def status(self) -> EngineStatus: ...

    async def change_limits(self, changes: Mapping[str, object]) -> Limits: ...

    async def flush(self) -> int: ...

    async def explain(self, request: Request) -> Explanation: ...

    async def accounts(self) -> tuple[Account, ...]: ...

    async def find_account(self, name: str) -> Account | None: ...

    async def show_pool(self, *, most: int) -> PoolShown: ...

    async def show_block(self, block: int) -> BlockShown: ...

    def stream(self, ticket: Ticket) -> AsyncGenerator[Item, None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutModel:
    """What clients may ask about the model: where it came from, and what it is."""

    reference: str = ""
    architecture: str = ""
    parameters: int = 0
    stored_as: str = ""
    weights_bytes: int = 0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What the server is told once.

    The first of `model_names` is the one it shows; `about` is what stands behind all. `defaults`
    fill what a request leaves out. The engine counts as stalled when it has work and made no step
    for `stall_s`.
    """

    model_names: tuple[str, ...]
    version: str
    about: AboutModel = AboutModel()
    defaults: SamplingParams = field(default_factory=SamplingParams)
    max_body_bytes: int = 8 * MIB
    stall_s: float = 60.0
    cache_facts: Mapping[str, str] = field(default_factory=dict)
    """What the metrics tell of the pool."""
    web: bool = True
    """Whether there is a page at /."""
    keyring: Keyring | None = None
    """The API keys, one of which every request must have. None: there are none."""
    allowed_origins: tuple[str, ...] = ()
    """Whose pages may use the server, beside its own; * is every one."""
    trust_templates: bool = False
    """A request may bring its own chat template."""
    request_timeout_s: float | None = None
    """The longest a request may take, and what one takes at most that does not say."""
    stop_asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request has asked the server to end."""


class Service:
    """Follows answers from the engine, and keeps the books about them.

    `visit` is the request on whose behalf it does; `for_visit` gives the same service for another.
    """

    def __init__(
        self,
        client: Client,
        door: Door,
        settings: ServeSettings,
        metrics: Metrics,
        *,
        tracing: Tracing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.door = door
        self.settings = settings
        self.metrics = metrics
        self._tracing = tracing
        self.watch = Watch(
            lambda: client.show_pool(most=MOST_WAITING), client.status, lambda: client.draining
        )
        self.history = History(metrics)
        self.started_at = int(time.time())
        self.visit = Visit()
        self._clock = clock
        self._departures = Departures()

    def for_visit(self, visit: Visit) -> "Service":
        view = copy(self)
        view.visit = visit
        defaults = self.settings.defaults.but(timeout_s=self.settings.request_timeout_s)
        view.settings = replace(self.settings, defaults=visit.permit.defaults(defaults))
        return view

    def model_named(self, name: str | None) -> str:
        """The name to answer with; a request without one means the only model there is.

        Raises  UnknownModel.
        """
        if name is None:
            return self.settings.model_names[0]
        if name not in self.settings.model_names:
            served = ", ".join(self.settings.model_names)
            raise UnknownModel(
                f"the model {name!r} is not served here; use {served}", param="model"
            )
        return name

    def door_for(self, template: str | None) -> Door:
        """The door, with the chat template of a request if it brings one.

        Raises  InvalidRequest: it may not, or it is none.
        """
        if template is None:
            return self.door
        if not self.settings.trust_templates:
            raise InvalidRequest(
                "chat_template: templates of clients are not taken here (a template is a program;"
                " --trust-request-chat-template lets them in); leave it out",
                param="chat_template",
            )
        return self.door.speaking(template)

    async def at_door(
        self,
        body_bytes: int,
        work: Callable[[], T],
        params: SamplingParams | None = None,
        talk: Talk = SILENT,
    ) -> T:
        """The result of `work` at the door; a large body, or a grammar that may have to be
        compiled, does not hold up the event loop."""
        compiles = talk.guides or (params is not None and params.structured is not None)
        if body_bytes < _LARGE_BODY_BYTES and not compiles:
            return work()
        return await asyncio.to_thread(work)

    async def follow(self, ticket: Ticket) -> AsyncGenerator[Item, None]:
        """The answer as it comes. Closing the iterator cancels the request at the engine.

        Raises  RequestError when the engine refuses, Expired when the time of the request is over,
                EngineError when it fails.
        """
        request = self.visit.permit.stamped(ticket.request)
        self._check_timeout(request)
        ticket = replace(ticket, request=request)
        self.visit.spend(len(request.prompt))
        self._departures.enter(self._clock())
        began_s, ends, failure = self._clock(), list[Ended](), ""
        outcome = "abort"
        try:
            async with aclosing(self.client.stream(ticket)) as items:
                async for item in items:
                    if isinstance(item, Ended):
                        outcome = item.finish_reason
                        _raise_failure(item, request)
                        self._departures.ended(self._clock())
                        limits = self.client.status().limits
                        self.metrics.finished(outcome, request, item.receipt, limits)
                        ends.append(item)
                        outcome = "abort" if len(ends) < request.branches else ""
                    else:
                        self.visit.spend(len(item.token_ids))
                    yield item
        except Expired as error:  # counted as what it is
            failure = error.code or error.kind
            raise
        except RequestError as error:
            outcome, failure = "", error.code or error.kind
            if isinstance(error, Overloaded):
                raise self._placed(error) from error
            raise
        except OctavoError as error:
            outcome, failure = "error", error.code or error.kind
            raise
        finally:
            self._departures.leave()
            if outcome:
                left = request.branches - len(ends)
                self.metrics.lost(outcome, request, left, self.client.status().limits)
            if self._tracing is not None:
                self._tracing.ended(caller(), request, _outcome(began_s, ends, failure or outcome))

    @property
    def open_answers(self) -> int:
        """Prompts whose answers are under way."""
        return self._departures.open

    async def explain(self, ticket: Ticket) -> Explanation:
        """What the prefix cache has of the prompt of a request like this."""
        return await self.client.explain(self.visit.permit.stamped(ticket.request))

    @property
    def stalled(self) -> bool:
        """The engine has answers to compute, and has made no step for too long."""
        since_s = self.client.busy_since_s
        if since_s is None:
            return False
        last_s = max(since_s, self.client.status().stepped_at_s)
        return self._clock() - last_s > self.settings.stall_s

    def _check_timeout(self, request: Request) -> None:
        longest_s = self.settings.request_timeout_s
        if longest_s is not None and (request.timeout_s is None or request.timeout_s > longest_s):
            raise InvalidRequest(
                f"timeout_s is {request.timeout_s}; no request may take longer than {longest_s:g} s"
                " here",
                param="timeout_s",
            )

    def _placed(self, error: Overloaded) -> Overloaded:
        """The error with the place in the queue that the request would have had."""
        position = self.client.status().waiting + 1
        predicted_s = self._departures.predicted_s(position, self._clock())
        wait = "" if predicted_s is None else f", for about {max(1, math.ceil(predicted_s))} s"
        placed = Overloaded(f"{error.message}; it would be number {position} to wait{wait}")
        placed.queue_position, placed.predicted_queue_s = position, predicted_s
        if predicted_s is not None:
            placed.retry_after_s = predicted_s
        return placed


def _outcome(began_s: float, ends: Sequence[Ended], error: str) -> Outcome:
    ends = sorted(ends, key=attrgetter("branch"))
    return Outcome(
        began_s=began_s,
        reasons=tuple(end.finish_reason for end in ends),
        receipts=tuple(end.receipt for end in ends),
        error=error,
    )


def _raise_failure(ended: Ended, request: Request) -> None:
    if ended.finish_reason == "timeout":
        raise _expired(ended.receipt, request)
    if ended.finish_reason == "abort":
        raise EngineStopped(ended.message or "the engine gave up this request; send it again")
    if ended.finish_reason == "error":
        raise EngineError(ended.message or "the engine failed on this request")


def _expired(receipt: Receipt, request: Request) -> Expired:
    there_s = receipt.finished_s - receipt.arrival_s
    # The clock's values are rounded, so that their difference may be a little less.
    if request.timeout_s is not None and there_s > request.timeout_s - 1e-3:
        return DeadlineExceeded(
            f"the request has not ended within its timeout_s of {request.timeout_s:g} s",
            param="timeout_s",
        )
    return QueueTimeout(
        f"the request has waited {there_s:.1f} s to be started, as long as any may here; try later"
    )
