"""The ledger: what a front keeps of each request, so that it outlives the engine (C11).

    open ──▶ token, token, … ──▶ end
             │            ▲
             engine died  └ submitted again as prompt + emitted tokens

No I/O and no clock. An answer that was being computed when an engine died is to blame for it,
perhaps; a token clears it. Blamed for two deaths it is suspected, and from then on computed alone,
while all others wait, until it gets a token. A request that was alone when the engine died, and had
been suspected or alone at the death before, ends with an error.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from octavo.core.events import Finished, Interruption, PromptScored, Receipt, Token
from octavo.core.request import Request, branch_name
from octavo.engine.wire import Cancel, Command, Submit

Key = tuple[str, int]
"""What an engine calls an answer: the id of its request, and its branch."""

DIED, KILLED, SUSPICIOUS = 4, 1, 8
"""The blame for an engine that died or hung; for one that was killed from outside (by hand, or as
memory ran out), which is hardly a request's doing; and what makes a suspect."""


@dataclass(slots=True)
class Answer:
    """One branch of a request under way. `owner` is the id by which the front knows the request,
    `request` the branch as a request of its own."""

    owner: str
    request: Request
    arrived_s: float
    emitted: list[int] = field(default_factory=list)
    first_token_s: float | None = None
    deaths: tuple[Interruption, ...] = ()
    """Of engines that worked on it."""
    lost_tokens: int = 0
    """Positions whose KV went with an engine, as far as tokens came of them."""
    blame: int = 0
    """For deaths at which it was being computed since it got a token."""
    blame_alone: int = 0
    """For those of them at which nothing else was being computed."""
    stopped: bool = False
    """The front has found its end, and waits for the engine to say so too."""
    held: bool = False
    """Not in the engine: a suspect is computed alone."""

    @property
    def branch(self) -> int:
        return self.request.sampling.branch

    @property
    def suspected(self) -> bool:
        return self.blame >= SUSPICIOUS


class Ledger:
    """The answers under way, in order of arrival."""

    def __init__(self) -> None:
        self._answers: dict[Key, Answer] = {}

    def open(self, request: Request, now: float) -> tuple[Command, ...]:
        """Keep a request; what to send."""
        held = self._suspect() is not None
        for one in request.split():
            name = branch_name(request.id, one.sampling.branch) if held else request.id
            self._answers[name, one.sampling.branch] = Answer(request.id, one, now, held=held)
        return () if held else (Submit(request),)

    def token(self, event: Token, now: float) -> str | None:
        """Keep a token; the id of its request, None if that has gone.

        Cost     O(1).
        """
        answer = self._answers.get((event.request_id, event.branch))
        if answer is None:
            return None
        assert event.number == len(answer.emitted), f"{event} after {len(answer.emitted)} tokens"
        answer.emitted.append(event.token)
        answer.blame = answer.blame_alone = 0
        if answer.first_token_s is None:
            answer.first_token_s = now
        return answer.owner

    def owner(self, event: PromptScored) -> str | None:
        """The id of the request that an event is about, None if that has gone."""
        answer = self._answers.get((event.request_id, event.branch))
        return None if answer is None else answer.owner

    def end(self, event: Finished) -> tuple[str, Finished] | None:
        """Close an answer; the id of its request and its end, None if that has gone."""
        answer = self._answers.pop((event.request_id, event.branch), None)
        if answer is None:
            return None
        return answer.owner, replace(event, receipt=_whole(event.receipt, answer))

    def stop(self, owner: str, branch: int) -> tuple[Cancel, ...]:
        """The front has found the end of an answer, a stop string say; what to send."""
        for key, answer in self._answers.items():
            if answer.owner == owner and answer.branch == branch and not answer.stopped:
                answer.stopped = True
                return () if answer.held else (Cancel(*key, "stop"),)
        return ()

    def close(self, owner: str) -> tuple[Cancel, ...]:
        """Forget all that is left of a request; what to send."""
        keys = [key for key, answer in self._answers.items() if answer.owner == owner]
        closed = [(name, self._answers.pop((name, branch))) for name, branch in keys]
        names = dict.fromkeys(name for name, answer in closed if not answer.held)
        return tuple(Cancel(name) for name in names)

    def owner_of(self, name: str) -> str | None:
        """The id of the request that an engine calls so."""
        return next((a.owner for (known, _), a in self._answers.items() if known == name), None)

    # --- the engine dies, and another is ready

    def died(
        self, computing: Collection[Key], blame: int = DIED, *, now: float = 0.0
    ) -> str | None:
        """The engine died computing these answers. The id of a request that is not to be tried
        again."""
        for answer in self._answers.values():
            if not answer.held:
                answer.deaths += (Interruption(now, "engine_died"),)
                length = len(answer.request.prompt) + len(answer.emitted)
                answer.lost_tokens += length if answer.emitted else 0
        known = [self._answers[key] for key in computing if key in self._answers]
        if not known:  # between two steps: over anything that it was told
            known = [answer for answer in self._answers.values() if not answer.held]
        alone = len({answer.owner for answer in known}) == 1
        culprit = None
        for answer in known:
            if alone and (answer.suspected or answer.blame_alone + blame >= SUSPICIOUS):
                culprit = answer.owner
            answer.blame += blame
            answer.blame_alone += blame * alone
        return culprit

    def resubmit(self, now: float) -> tuple[Command, ...]:
        """What to send to another engine: all answers, or the first suspect alone."""
        answers, self._answers = self._answers.values(), {}
        for answer in answers:
            self._answers[branch_name(answer.owner, answer.branch), answer.branch] = answer
            answer.held = True
        return self.release(now)

    def release(self, now: float) -> tuple[Command, ...]:
        """What to send now: nothing while a suspect is computed, then the next, then all others."""
        if self._suspect() is not None:
            return ()
        held = [(key, answer) for key, answer in self._answers.items() if answer.held]
        suspects = [(key, answer) for key, answer in held if answer.suspected]
        commands: list[Command] = []
        for key, answer in suspects[:1] or held:
            answer.held = False
            commands += _again(key, answer, now)
        return tuple(commands)

    def _suspect(self) -> Answer | None:
        """The one that is in the engine."""
        return next((a for a in self._answers.values() if a.suspected and not a.held), None)


def _again(key: Key, answer: Answer, now: float) -> tuple[Command, ...]:
    timeout_s = answer.request.timeout_s
    request = replace(
        answer.request,
        id=key[0],
        emitted=tuple(answer.emitted),
        accepted=True,
        after=None,
        timeout_s=None if timeout_s is None else max(0.0, timeout_s - (now - answer.arrived_s)),
    )
    return (Submit(request), *([Cancel(*key, "stop")] if answer.stopped else []))


def _whole(receipt: Receipt, answer: Answer) -> Receipt:
    """What an answer cost with all the engines that worked on it: each death was a preemption, at
    which the KV was lost. `receipt` is that of the last engine; when the first one admitted the
    request is not known, but that it was no later than the first token."""
    if not answer.deaths:
        return receipt
    first = answer.branch == 0
    recomputed = max(0, answer.lost_tokens - receipt.cached_tokens)
    return replace(
        receipt,
        prompt_tokens=receipt.prompt_tokens if first else 0,
        cached_tokens=receipt.cached_tokens if first else 0,
        recomputed_tokens=receipt.recomputed_tokens + recomputed,
        preemptions=receipt.preemptions + len(answer.deaths),
        interruptions=(*answer.deaths, *receipt.interruptions),
        arrival_s=answer.arrived_s,
        admitted_s=answer.first_token_s or receipt.admitted_s,
        first_token_s=answer.first_token_s or receipt.first_token_s,
    )
