"""The ledger: what a front keeps of each request, so that it outlives the engine (C11).

    open ──▶ token, token, … ──▶ end
             │            ▲
             engine died  └ submitted again as prompt + emitted tokens

No I/O and no clock. An answer that was being computed when an engine died is to blame for it,
perhaps. Blamed for two deaths it is suspected, and tried: computed alone, while all others wait,
until it has come further than it did in the engine that died.

    blamed ──▶ suspected ──▶ tried alone ──▶ passed: suspected again at the next death
                                  │          (each trial may be twice as long as the one before)
                                  └────────▶ died: the request ends with an error

So does a request that was alone at two deaths. Whatever an answer does to engines, their number
grows with the logarithm of its length, not with its length.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from octavo.core.budget import Limits
from octavo.core.events import Finished, Interruption, PromptScored, Receipt, Refused, Token
from octavo.core.queue import turned_away
from octavo.core.request import Request, branch_name
from octavo.engine.wire import Cancel, Command, Submit

Key = tuple[str, int]
"""What an engine calls an answer: the id of its request, and its branch."""

DIED, KILLED, SUSPICIOUS = 4, 1, 8
"""The blame for an engine that died or hung; for one that was killed from outside (by hand, or as
memory ran out), which is hardly a request's doing; and what makes a suspect. A token clears what is
less than `DIED`."""
TRIAL_TOKENS = 4
"""The most tokens of an answer's first trial."""


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
    """For deaths at which it was being computed since it passed a trial."""
    blame_alone: int = 0
    """For all at which nothing else was being computed."""
    began: int = 0
    """How many tokens it had when the engine got it."""
    lived: int = 0
    """How many came of the last engine that died with it."""
    trials: int = 0
    """Those that it passed."""
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

    def take(self, token: int) -> None:
        self.emitted.append(token)
        if self.blame or self.blame_alone:
            self._clear()

    def _clear(self) -> None:
        self.blame -= self.blame % DIED
        self.blame_alone -= self.blame_alone % DIED
        enough = min(max(self.lived + 1, 1 << self.trials), TRIAL_TOKENS << self.trials)
        if self.suspected and len(self.emitted) - self.began >= enough:
            self.blame = DIED
            self.trials += 1

    def outlive(self, now: float) -> None:
        """The engine died that had it."""
        self.deaths += (Interruption(now, "engine_died"),)
        self.lived = len(self.emitted) - self.began
        if self.emitted:
            self.lost_tokens += len(self.request.prompt) + len(self.emitted)


class Ledger:
    """The answers under way, in order of arrival."""

    def __init__(self) -> None:
        self._answers: dict[Key, Answer] = {}

    @property
    def since_s(self) -> float | None:
        """Since when some answer has been under way; None if none is.

        Cost     O(1).
        """
        return next((answer.arrived_s for answer in self._answers.values()), None)

    @property
    def holding(self) -> bool:
        """What comes now is held back, as a suspect is computed alone."""
        return self._suspect() is not None

    def refusal(self, request: Request, limits: Limits) -> Refused | None:
        """Whether the queue is too long for one request more while no engine can say so: who has no
        token yet waits then."""
        waiting = [answer for answer in self._answers.values() if not answer.emitted]
        tokens = sum(1 if one.branch else len(one.request.prompt) for one in waiting)
        return turned_away(request, limits, answers=len(waiting), tokens=tokens)

    def open(self, request: Request, now: float) -> tuple[Command, ...]:
        """Keep a request; what to send."""
        held = self.holding
        for one in request.split():
            answer = Answer(request.id, one, now, held=held)
            self._answers[_name(answer) if held else request.id, answer.branch] = answer
        return () if held else (Submit(request),)

    def token(self, event: Token, now: float) -> str | None:
        """Keep a token; the id of its request, None if that has gone.

        Cost     O(1).
        """
        answer = self._answers.get((event.request_id, event.branch))
        if answer is None:
            return None
        assert event.number == len(answer.emitted), f"{event} after {len(answer.emitted)} tokens"
        answer.take(event.token)
        if answer.first_token_s is None:
            answer.first_token_s = now
        return answer.owner

    def owner(self, event: PromptScored) -> str | None:
        """The id of the request that an event is about, None if that has gone."""
        answer = self._answers.get((event.request_id, event.branch))
        return None if answer is None else answer.owner

    def end(self, event: Finished) -> tuple[str, Finished] | None:
        """Close an answer; the id of its request and its end, None if that has gone."""
        answer = self._answers.get((event.request_id, event.branch))
        if answer is None:
            return None
        whole = replace(event, receipt=_whole(event.receipt, answer))
        del self._answers[event.request_id, event.branch]
        return answer.owner, whole

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
                answer.outlive(now)
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
            self._answers[_name(answer), answer.branch] = answer
            answer.held = True
        return self.release(now)

    def release(self, now: float) -> tuple[Command, ...]:
        """What to send now: nothing while a suspect is computed, then the next, then all others."""
        if self._suspect() is not None:
            return ()
        held = [(key, answer) for key, answer in self._answers.items() if answer.held]
        suspects = [answer for _, answer in held if answer.suspected]
        # Who has passed a trial goes on beside the next; if that dies there, it is the next first.
        first = max(suspects, key=lambda one: one.blame, default=None)
        commands: list[Command] = []
        for key, answer in held:
            if first is None or _search_together(answer, first):
                answer.held, answer.began = False, len(answer.emitted)
                commands += _again(key, answer, now)
        return tuple(commands)

    def _suspect(self) -> Answer | None:
        """The one that is in the engine."""
        return next((a for a in self._answers.values() if a.suspected and not a.held), None)


def _name(answer: Answer) -> str:
    """What an engine calls an answer from its second submission on; those that are searched for
    together stay one request."""
    if answer.request.beams is not None:
        return answer.owner
    return branch_name(answer.owner, answer.branch)


def _search_together(one: Answer, other: Answer) -> bool:
    """Whether both are the same answer, or of the same search."""
    return one is other or (one.owner == other.owner and one.request.beams is not None)


def _again(key: Key, answer: Answer, now: float) -> tuple[Command, ...]:
    """What to send of one answer. The first one of a search, of which nothing is known before its
    end, stands for all."""
    timeout_s, beams = answer.request.timeout_s, answer.request.beams
    if beams is not None and answer.branch:
        return ()
    request = replace(
        answer.request,
        id=key[0],
        emitted=tuple(answer.emitted),
        branches=1 if beams is None else beams.width,
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
