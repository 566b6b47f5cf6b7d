"""Answers to the prompts of one HTTP request: merged as they come, or joined when they ended."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate

import msgspec
from msgspec import UNSET, UnsetType

from octavo.core.events import Receipt, Score
from octavo.engine.door import Ticket
from octavo.serve.service import Item, Service
from octavo.text.assembler import Delta, Ended, Scored
from octavo.text.parts import Argued, Begun, Part, Said, Thought


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's usage. The details of the prompt are known when all answers have ended; those of the
    answer are there where it may have reasoning."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class OctavoUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What OpenAI's usage has no place for: what the answers cost. Times are in seconds.

    With several answers the tokens are summed, the times are those of the slowest, and the KV
    blocks those of the answer that held most. Of the drafted tokens those accepted were right:
    steps that were not taken. `user` is the caller's own label, sent back.
    """

    queue_s: float | None
    time_to_first_token_s: float | None
    preemptions: int
    recomputed_tokens: int
    cached_tokens: int
    peak_blocks: int
    drafted_tokens: int
    accepted_tokens: int
    user: str | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """The tokens of prompts: what the cache had, what breakpoints asked to keep and it had not, and
    the rest."""

    read: int
    written: int
    rest: int


class Tally:
    """Counts the tokens of one HTTP request."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._prompt_tokens = sum(len(ticket.request.prompt) for ticket in tickets)
        self._completion_tokens = 0
        self._readers = [reader for ticket in tickets for reader in ticket.readers]
        self._receipts: list[Receipt] = []
        self._answers = sum(ticket.request.branches for ticket in tickets)
        pinned = [[pin.tokens for pin in ticket.request.pins] for ticket in tickets]
        self._to_keep = sum(max(tokens, default=0) for tokens in pinned)

    def add(self, item: Item) -> None:
        if isinstance(item, Delta):
            self._completion_tokens += len(item.token_ids)
        else:
            self._receipts.append(item.receipt)

    def usage(self) -> Usage:
        """The tokens up to now."""
        all_ended = len(self._receipts) == self._answers
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached_tokens)
            if all_ended
            else UNSET,
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=self.reasoning_tokens
            )
            if any(reader.reasons for reader in self._readers)
            else UNSET,
        )

    @property
    def reasoning_tokens(self) -> int:
        return sum(reader.reasoning_tokens for reader in self._readers)

    def prompt_split(self) -> PromptSplit:
        """How the prompts divide; before all answers have ended all of it counts as the rest."""
        if len(self._receipts) < self._answers:
            return PromptSplit(0, 0, self._prompt_tokens)
        read = self._cached_tokens
        written = max(0, self._to_keep - read)
        return PromptSplit(read, written, self._prompt_tokens - read - written)

    def cost(self, user: str | None) -> OctavoUsage:
        """What the answers that have ended cost."""
        receipts = self._receipts
        return OctavoUsage(
            queue_s=_longest([(r.arrival_s, r.admitted_s) for r in receipts]),
            time_to_first_token_s=_longest([(r.arrival_s, r.first_token_s) for r in receipts]),
            preemptions=sum(r.preemptions for r in receipts),
            recomputed_tokens=sum(r.recomputed_tokens for r in receipts),
            cached_tokens=self._cached_tokens,
            peak_blocks=max((r.peak_blocks for r in receipts), default=0),
            drafted_tokens=sum(r.drafted_tokens for r in receipts),
            accepted_tokens=sum(r.accepted_tokens for r in receipts),
            user=UNSET if user is None else user,
        )

    @property
    def _cached_tokens(self) -> int:
        return sum(receipt.cached_tokens for receipt in self._receipts)


def _longest(spans: Sequence[tuple[float, float | None]]) -> float | None:
    return max((stop - start for start, stop in spans if stop is not None), default=None)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function: `id` is what its result refers to, `arguments` are JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: the joined stream, in which `text` is all but reasoning and calls. The scores
    of a prompt stand in its first answer."""

    text: str
    ended: Ended
    scored: tuple[Scored, ...] = ()
    prompt: tuple[Score, ...] = ()
    token_ids: tuple[int, ...] = ()
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


def parts_of(ticket: Ticket, item: Item) -> tuple[Part, ...]:
    """What an item adds to its answer. Each is to be asked for once, in their order."""
    if ticket.readers:
        return ticket.readers[item.branch].take(item)
    return (Said(item.text),) if isinstance(item, Delta) and item.text else ()


def call_id(ticket: Ticket, branch: int, index: int) -> str:
    """The name of a call. It has nine characters, as the templates of Mistral's models want."""
    seed = f"{ticket.request.id}/{branch}/{index}".encode()
    return hashlib.blake2b(seed, digest_size=5).hexdigest()[:9]


def has_called(ticket: Ticket, ended: Ended) -> bool:
    """Whether an answer ended with calls that are complete."""
    if ended.finish_reason != "stop" or isinstance(ended.stop_reason, str) or not ticket.readers:
        return False
    return ticket.readers[ended.branch].calls > 0


async def collect(service: Service, tickets: Sequence[Ticket], tally: Tally) -> tuple[Answer, ...]:
    """All answers, in the order of the tickets and of their branches."""
    places = [(ticket, branch) for ticket in tickets for branch in range(len(ticket.assemblers))]
    deltas: list[list[Delta]] = [[] for _ in places]
    parts: list[list[Part]] = [[] for _ in places]
    ends: dict[int, Ended] = {}
    async with aclosing(merge(service, tickets)) as items:
        async for index, item in items:
            tally.add(item)
            parts[index] += parts_of(places[index][0], item)
            if isinstance(item, Ended):
                ends[index] = item
            else:
                deltas[index].append(item)
    return tuple(
        Answer(
            "".join([part.text for part in parts[index] if isinstance(part, Said)]),
            ends[index],
            tuple([one for delta in deltas[index] for one in delta.scored]),
            tuple([one for delta in deltas[index] for one in delta.prompt]),
            tuple([token for delta in deltas[index] for token in delta.token_ids]),
            "".join([part.text for part in parts[index] if isinstance(part, Thought)]),
            _calls(ticket, branch, parts[index]),
        )
        for index, (ticket, branch) in enumerate(places)
    )


def _calls(ticket: Ticket, branch: int, parts: Sequence[Part]) -> tuple[Call, ...]:
    arguments: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, Argued):
            arguments.setdefault(part.index, []).append(part.text)
    return tuple(
        Call(call_id(ticket, branch, part.index), part.name, "".join(arguments.get(part.index, ())))
        for part in parts
        if isinstance(part, Begun)
    )


async def merge(
    service: Service, tickets: Sequence[Ticket]
) -> AsyncGenerator[tuple[int, Item], None]:
    """What the answers bring, as it comes, each with the index of its choice.

    When one fails or the iterator is closed, all are cancelled.
    """
    if len(tickets) == 1:
        async with aclosing(service.follow(tickets[0])) as items:
            async for item in items:
                yield item.branch, item
        return
    arrived: asyncio.Queue[tuple[int, Item] | Exception] = asyncio.Queue(maxsize=1)
    *firsts, unfinished = accumulate((len(ticket.assemblers) for ticket in tickets), initial=0)
    pumps = [
        asyncio.ensure_future(_pump(service, ticket, first, arrived))
        for ticket, first in zip(tickets, firsts, strict=True)
    ]
    try:
        while unfinished:
            got = await arrived.get()
            if isinstance(got, Exception):
                raise got
            unfinished -= isinstance(got[1], Ended)
            yield got
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    service: Service,
    ticket: Ticket,
    first: int,
    arrived: "asyncio.Queue[tuple[int, Item] | Exception]",
) -> None:
    try:
        async with aclosing(service.follow(ticket)) as items:
            async for item in items:
                await arrived.put((first + item.branch, item))
    except Exception as error:
        await arrived.put(error)
