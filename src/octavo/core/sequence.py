"""Sequence: one branch of a request on its way, as a token list and watermarks.

    0 ───────── computed ───────── scheduled ───────── length
      KV is there      in flight          demand

There is no prefill or decode phase: a step computes some of the demand, and the token after the
last position is sampled when it reaches the length. Preemption sets both watermarks to 0; tokens
stay. The epoch tells results of before from those of after. What was swapped is in flight from the
admission on, as if it were computed: its plan moves it in.
"""

from enum import Enum
from typing import Protocol

from octavo.core.acceptance import Acceptance
from octavo.core.block_table import BlockTable
from octavo.core.events import (
    Finished,
    FinishReason,
    Interruption,
    Likeliest,
    PromptScored,
    Receipt,
    Score,
    Token,
    new_token,
)
from octavo.core.plan import Bind, Span, new_span
from octavo.core.prefix_cache import Context, Prefix
from octavo.core.request import Request, branch_name
from octavo.units import common_length

NO_ROW = -1

Ending = tuple[FinishReason, int | None]
"""Why an answer ends, and the token that ends it if one does."""

Rank = tuple[int, int]
"""(class, ticket), see `core.policy`: the lower goes first."""


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class Company(Protocol):
    """Sequences that choose together what each of them goes on with."""

    @property
    def stranded(self) -> bool:
        """Whether one that the others wait for waits itself, to be admitted."""


class Sequence:
    """Keeps  computed ≤ scheduled ≤ length; owns a row and blocks only while RUNNING.

    `number` counts the branches of a request from 0; the first stands for the prompt in receipts.
    """

    __slots__ = (
        "_admitted_s",
        "_reached",
        "_recomputed_tokens",
        "arrived_s",
        "barred",
        "branch",
        "cached_tokens",
        "common",
        "company",
        "computed",
        "context",
        "demand",
        "drafting",
        "drafts",
        "epoch",
        "first_token_s",
        "headed_s",
        "id",
        "interruptions",
        "last_position",
        "last_served",
        "length",
        "longest_chunk",
        "next_event",
        "number",
        "order",
        "pinned",
        "preemptions",
        "prefixes",
        "private",
        "prompt_length",
        "rank",
        "request",
        "restored",
        "row",
        "runs",
        "scheduled",
        "scored",
        "sealed",
        "state",
        "submitted_s",
        "swaps",
        "tables",
        "ticket",
        "tokens",
        "unsettled",
        "writable",
    )

    def __init__(
        self,
        request: Request,
        *,
        order: int,
        context: Context,
        block_size: int,
        groups: int,
        now: float,
        number: int = 0,
        longest_chunk: int | None = None,
    ) -> None:
        self.request = request
        self.id = branch_name(request.id, number)
        self.number = number
        self.branch = request.sampling.branch
        """The number in its events."""
        self.arrive(order, now)
        self.ticket: int | None = None
        """Which admission was its first; None before that."""
        self.rank: Rank = (request.priority, order)
        """Who goes first of those that run; fixed at each admission."""
        self.context = context
        self.tokens = [*request.prompt, *request.emitted]
        self.length = len(self.tokens)
        """Tokens, those that steps in flight will sample among them."""
        self.prompt_length = len(request.prompt)
        self.common = self.length - 1
        """How many leading positions it may share with the other branches of its request: each
        draws its own first token from the logits of the next."""
        self.last_position = len(request.prompt) + request.max_tokens - 1
        """One past the last position that can ever need KV: the final token needs none."""
        self.longest_chunk = self.last_position if longest_chunk is None else longest_chunk
        """How many positions may be computed in one step: more might not fit, even alone."""
        self.state = State.WAITING
        self.row = NO_ROW
        self.epoch = 0
        self._begin()
        self.tables = tuple(BlockTable(block_size) for _ in range(groups))
        self.prefixes: list[Prefix] = []
        self.company: Company | None = None
        self.barred = False
        """It has done its part of what its company chooses from, or has none: its turn comes when
        that has chosen."""
        self.runs = request.sampling.grammar is not None or request.beams is not None
        """Only the result of a step says what comes next: several tokens, or those of another."""
        self.private = False
        """Nothing that it computes is published: it began before the cache was flushed."""
        self.pinned = len(request.pins) if number else 0
        """How many of the pins of its request were granted or refused, or are another sibling's."""
        self.scored = self.prompt_length if request.emitted else 1
        """Up to which token its prompt was scored, if that is asked: before a restart all were."""
        self.last_served = -1
        self._start_counting(now)

    def _start_counting(self, now: float) -> None:
        """What its receipt will tell."""
        self._reached = 0
        """How many positions it had computed before it was preempted, at most."""
        self.cached_tokens = 0
        """Of its prompt, what its first admission found in the prefix cache."""
        self._recomputed_tokens = 0
        self.drafting = Acceptance()
        self.preemptions = 0
        self.swaps = 0
        self.interruptions: tuple[Interruption, ...] = ()
        self.submitted_s = now
        self._admitted_s: float | None = None
        self.first_token_s: float | None = None

    def _begin(self) -> None:
        """Nothing is computed."""
        self.computed = 0
        self.scheduled = 0
        self.restored = 0
        """Where it went on at its last admission: the KV before is there, or on its way."""
        self.demand = self._demand()
        """How many positions the next step may compute, from `scheduled` on."""
        self.drafts = 0
        """How many the span in flight may have, beyond `scheduled`."""
        self.unsettled = False
        """A span is in flight of which nobody knows how many tokens it will bring."""
        self.sealed = 0
        """Leading blocks whose content is final and was offered to the prefix cache."""
        self.writable = 0
        """Positions from `scheduled` up to here have blocks that nobody else owns or finds: nothing
        is to be reserved. 0 if that is not known. Kept by the block manager."""
        self.next_event = 0
        """While fewer positions than this are computed, a step brings a token and nothing else: no
        block is full or leaves its window, no sibling's turn comes, and only a stop token can end
        the answer. 0 if that is not known. Kept by the scheduler."""

    def arrive(self, order: int, now: float) -> None:
        """Take a place in the queue: `order` counts arrivals, `now` is since when it waits."""
        self.order = (order, self.number)
        self.arrived_s = now
        self.headed_s = now
        """Since when nobody of its priority and tenant has gone before it."""

    @property
    def promised(self) -> int:
        """Tokens that steps in flight will sample."""
        return self.length - len(self.tokens)

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    def bind(self) -> Bind:
        """What tells a runner whom its row serves."""
        return Bind(self.row, self.request, tuple(self.tokens[self.prompt_length :]))

    def _demand(self) -> int:
        return min(min(self.length, self.last_position) - self.scheduled, self.longest_chunk)

    def common_with(self, sequence: "Sequence") -> int:
        """How many leading positions `sequence`, a sibling, can take over."""
        if self.company is None:
            return min(self.computed, sequence.common)
        return min(
            self.computed, common_length(self.tokens, sequence.tokens), len(sequence.tokens) - 1
        )

    @property
    def idle(self) -> bool:
        """It has nothing to do until one that waits has been admitted: it keeps nobody from
        that."""
        return self.barred and self.company is not None and self.company.stranded

    def idles_for(self, other: "Sequence") -> bool:
        """Whether it has nothing to do until `other`, or one that waits, has gone on."""
        return self.barred and (self.company is other.company or self.idle)

    def become(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.id}: {self.state} → {state}"
        self.state = state

    def take_rank(self, rank: Rank) -> None:
        """Have this rank while it runs; the ticket is for good."""
        self.rank = rank
        self.ticket = rank[1]

    def admit(self, *, row: int, cached: int, now: float, restored: int = 0) -> None:
        """Run: the KV of the first `cached` positions is there, up to `restored` on its way."""
        self.become(State.RUNNING)
        self.row = row
        self.computed = cached
        self.scheduled = self.restored = max(cached, restored)
        self.demand = self._demand()
        if self._admitted_s is None:
            self._admitted_s = now
            self.cached_tokens = 0 if self.number else min(cached, len(self.request.prompt))

    def preempt(self, *, kept: bool = False) -> None:
        """Lose row and blocks; keep tokens. Results in flight belong to the epoch before; if KV is
        `kept` elsewhere, what they computed is among it."""
        self.become(State.WAITING)
        self.row = NO_ROW
        self.epoch += 1
        if kept:
            self.swaps += 1
            self._reached = max(self._reached, self.scheduled)
        elif self.computed > self.restored:  # what was only found is not computed again
            self._reached = max(self._reached, self.computed)
        self._begin()
        if not kept:
            self.drafting.reached = 0
        self.preemptions += 1

    @property
    def decodes(self) -> bool:
        """All tokens are known, only the last of them is to be computed, and drafts may follow."""
        known = self.scheduled == self.length - 1 and self.length == len(self.tokens)
        return known and self.company is None

    def schedule(self, count: int, plan_id: int, drafts: int = 0) -> Span:
        """Put the next `count` positions into a plan; returns them. With `drafts`, or if it `runs`,
        nothing more is put into one until it is known how many tokens came of it."""
        start = self.scheduled
        self.scheduled = stop = start + count
        self.last_served = plan_id
        samples = stop == self.length
        if samples:
            self.length = stop + 1
            self.drafts = drafts
            self.unsettled = drafts > 0 or self.runs
            self.demand = 1 if stop < self.last_position and not self.unsettled else 0
        else:
            self.demand = self._demand()
        tokens = self.tokens
        known = (
            (tokens[start],) if count == 1 and start < len(tokens) else tuple(tokens[start:stop])
        )
        return new_span(Span, (self.row, start, stop, known, samples, drafts))

    def replace(self, tokens: list[int], computed: int) -> None:
        """Be another answer from here on, of which the KV of so many positions is there."""
        self.tokens = tokens
        self._begin()
        self.computed = self.restored = computed
        self.settle()

    def settle(self) -> None:
        """All tokens of a span are there: go on after them."""
        self.length = len(self.tokens)
        self.scheduled = self.computed
        self.drafts = 0
        self.unsettled = False
        self.demand = self._demand()

    def compute(self, start: int, stop: int) -> None:
        """The KV of positions [start, stop) is there; some may be computed again."""
        self.computed = stop
        if start < self._reached:
            self._recomputed_tokens += min(stop, self._reached) - start

    def append(self, token: int, logprob: float, now: float, top: Likeliest = ()) -> Token:
        """Take in an answer token; returns its event."""
        if self.first_token_s is None:
            self.first_token_s = now
        self.tokens.append(token)
        request = self.request
        number = len(self.tokens) - self.prompt_length - 1
        return new_token(Token, (request.id, number, token, logprob, self.branch, top))

    def score(self, first: int, scores: tuple[Score, ...]) -> PromptScored | None:
        """Take in scores of the prompt; the event of those that were not told yet."""
        new = scores[self.scored - first :]
        if not new:
            return None
        first, self.scored = self.scored, self.scored + len(new)
        return PromptScored(self.request.id, first, new, self.branch)

    def step(self, stop: int, token: int, logprob: float, top: Likeliest) -> Token:
        """`compute` and `append` before the `next_event`, for a span that samples: the first token
        is there, and nothing is computed again."""
        self.computed = stop
        self.tokens.append(token)
        request = self.request
        number = stop - self.prompt_length
        return new_token(Token, (request.id, number, token, logprob, self.branch, top))

    def finish(
        self, reason: FinishReason, stop_id: int | None, now: float, message: str = ""
    ) -> Finished:
        """Become FINISHED; returns the terminal event."""
        self.become(State.FINISHED)
        self.next_event = 0
        receipt = self.receipt(now)
        return Finished(self.request.id, reason, stop_id, message, receipt, self.branch)

    def ending(self) -> Ending | None:
        """Whether the newest token ends the answer, and why."""
        token, request = self.tokens[-1], self.request
        if token in request.stop_token_ids and self.answer_length > request.min_tokens:
            return ("stop", token)
        return ("length", None) if len(self.tokens) > self.last_position else None

    def receipt(self, now: float) -> Receipt:
        return Receipt(
            prompt_tokens=0 if self.number else len(self.request.prompt),
            completion_tokens=self.answer_length,
            cached_tokens=self.cached_tokens,
            recomputed_tokens=self._recomputed_tokens,
            preemptions=self.preemptions,
            arrival_s=self.submitted_s,
            admitted_s=self._admitted_s,
            first_token_s=self.first_token_s,
            finished_s=now,
            peak_blocks=sum(table.peak for table in self.tables),
            swaps=self.swaps,
            interruptions=self.interruptions,
            drafted_tokens=self.drafting.drafted,
            accepted_tokens=self.drafting.accepted,
        )
