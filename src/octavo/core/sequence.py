"""Sequence: one branch of a request on its way, as a token list and watermarks.

    0 ───────── computed ───────── scheduled ───────── length
      KV is there      in flight          demand

There is no prefill or decode phase: a step computes some of the demand, and the token after the
last position is sampled when it reaches the length. Preemption sets both watermarks to 0; tokens
stay. The epoch tells results of before from those of after. What was swapped is in flight from the
admission on, as if it were computed: its plan moves it in.
"""

from enum import Enum

from octavo.core.block_table import BlockTable
from octavo.core.events import Finished, FinishReason, Receipt, Token, token_event
from octavo.core.plan import Span, span_of
from octavo.core.prefix_cache import Context, Prefix
from octavo.core.request import Request, branch_name

NO_ROW = -1

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


class Sequence:
    """Keeps  computed ≤ scheduled ≤ length; owns a row and blocks only while RUNNING.

    `number` counts the branches of a request from 0; the first stands for the prompt in receipts.
    """

    __slots__ = (
        "_admitted_s",
        "_cached_tokens",
        "_reached",
        "_recomputed_tokens",
        "arrived_s",
        "branch",
        "common",
        "computed",
        "context",
        "epoch",
        "first_token_s",
        "headed_s",
        "id",
        "last_position",
        "last_served",
        "longest_chunk",
        "number",
        "order",
        "pinned",
        "preemptions",
        "prefixes",
        "private",
        "promised",
        "rank",
        "request",
        "restored",
        "row",
        "scheduled",
        "sealed",
        "state",
        "submitted_s",
        "swaps",
        "tables",
        "ticket",
        "tokens",
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
        self.common = len(self.tokens) - 1
        """How many leading positions it may share with the other branches of its request: each
        draws its own first token from the logits of the next."""
        self.last_position = len(request.prompt) + request.max_tokens - 1
        """One past the last position that can ever need KV: the final token needs none."""
        self.longest_chunk = self.last_position if longest_chunk is None else longest_chunk
        """How many positions may be computed in one step: more might not fit, even alone."""
        self.state = State.WAITING
        self.row = NO_ROW
        self.epoch = 0
        self.computed = 0
        self.scheduled = 0
        self.restored = 0
        """Where it went on at its last admission: the KV before is there, or on its way."""
        self.promised = 0
        """Tokens that steps in flight will sample."""
        self.tables = tuple(BlockTable(block_size) for _ in range(groups))
        self.prefixes: list[Prefix] = []
        self.sealed = 0
        """Leading blocks whose content is final and was offered to the prefix cache."""
        self.private = False
        """Nothing that it computes is published: it began before the cache was flushed."""
        self.pinned = len(request.pins) if number else 0
        """How many of the pins of its request were granted or refused, or are another sibling's."""
        self.writable = 0
        """Positions from `scheduled` up to here have blocks that nobody else owns or finds: nothing
        is to be reserved. 0 if that is not known. Kept by the block manager."""
        self.last_served = -1
        self._reached = 0
        self._cached_tokens = 0
        self._recomputed_tokens = 0
        self.preemptions = 0
        self.swaps = 0
        self.submitted_s = now
        self._admitted_s: float | None = None
        self.first_token_s: float | None = None

    def arrive(self, order: int, now: float) -> None:
        """Take a place in the queue: `order` counts arrivals, `now` is since when it waits."""
        self.order = (order, self.number)
        self.arrived_s = now
        self.headed_s = now
        """Since when nobody of its priority and tenant has gone before it."""

    @property
    def length(self) -> int:
        return len(self.tokens) + self.promised

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def demand(self) -> int:
        last = len(self.tokens) + self.promised
        if last > self.last_position:
            last = self.last_position
        rest = last - self.scheduled
        return rest if rest < self.longest_chunk else self.longest_chunk

    def common_with(self, sequence: "Sequence") -> int:
        """How many leading positions `sequence`, a sibling, can take over."""
        return min(self.computed, sequence.common)

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
        if self._admitted_s is None:
            self._admitted_s = now
            self._cached_tokens = 0 if self.number else min(cached, len(self.request.prompt))

    def preempt(self, *, kept: bool = False) -> None:
        """Lose row and blocks; keep tokens. Results in flight belong to the epoch before; if KV is
        `kept` elsewhere, what they computed is among it."""
        self.become(State.WAITING)
        self.row = NO_ROW
        self.epoch += 1
        if kept:
            self.swaps += 1
            self._reached = max(self._reached, self.scheduled)
        self.computed = self.scheduled = self.restored = self.sealed = self.writable = 0
        self.preemptions += 1

    def schedule(self, count: int, plan_id: int) -> Span:
        """Put the next `count` positions into a plan; returns them."""
        start, tokens = self.scheduled, self.tokens
        self.scheduled = stop = start + count
        self.last_served = plan_id
        samples = stop == len(tokens) + self.promised
        if samples:
            self.promised += 1
        return span_of((self.row, start, stop, tuple(tokens[start:stop]), samples))

    def compute(self, start: int, stop: int) -> None:
        self.computed = stop
        if start < self._reached:
            self._recomputed_tokens += min(stop, self._reached) - start
        if stop > self._reached:
            self._reached = stop

    def append(self, token: int, logprob: float, now: float) -> Token:
        """Take in an answer token; returns its event."""
        request, tokens = self.request, self.tokens
        self.promised -= 1
        tokens.append(token)
        if self.first_token_s is None:
            self.first_token_s = now
        number = len(tokens) - len(request.prompt) - 1
        return token_event((request.id, number, token, logprob, self.branch))

    def finish(
        self, reason: FinishReason, stop_id: int | None, now: float, message: str = ""
    ) -> Finished:
        """Become FINISHED; returns the terminal event."""
        self.become(State.FINISHED)
        receipt = self.receipt(now)
        return Finished(self.request.id, reason, stop_id, message, receipt, self.branch)

    def ending(self) -> tuple[FinishReason, int | None] | None:
        """Whether the newest token ends the answer, and why."""
        token, request = self.tokens[-1], self.request
        if token in request.stop_token_ids and self.answer_length > request.min_tokens:
            return ("stop", token)
        return ("length", None) if len(self.tokens) > self.last_position else None

    def receipt(self, now: float) -> Receipt:
        return Receipt(
            prompt_tokens=0 if self.number else len(self.request.prompt),
            completion_tokens=self.answer_length,
            cached_tokens=self._cached_tokens,
            recomputed_tokens=self._recomputed_tokens,
            preemptions=self.preemptions,
            arrival_s=self.submitted_s,
            admitted_s=self._admitted_s,
            first_token_s=self.first_token_s,
            finished_s=now,
            peak_blocks=sum(table.peak for table in self.tables),
            swaps=self.swaps,
        )
