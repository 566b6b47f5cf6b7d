"""Holds: blocks that stay owned while no sequence needs them, so that later requests start there.

    pin       the leading blocks of a cached prefix, until a time; within a quota
    session   all that a finished answer has computed, its partly filled last block too, by name

A hold promises speed, never memory: when blocks are short, holds go before anyone is preempted or
waits longer. Sessions go first, the least recently used before the others, then pins, the one
that ends soonest before the others; one that would give back nothing stays.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from octavo.core.block_manager import BlockManager
from octavo.core.block_table import BlockTable
from octavo.core.events import HoldDropped, HoldExpired, Pinned, PinRefused
from octavo.core.prefix_cache import Context, Prefix
from octavo.core.request import Pin
from octavo.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class Hold:
    """The `tables` hold the KV of `tokens`, in this context. A session has no end."""

    id: str
    tables: tuple[BlockTable, ...]
    tokens: tuple[int, ...]
    context: Context
    prefixes: list[Prefix]
    private: bool = False
    ttl_s: float = 0.0
    until_s: float = inf

    def common_with(self, sequence: Sequence) -> int:
        """How many leading positions `sequence` can take over."""
        most = min(len(self.tokens), sequence.common)
        if list(self.tokens[:most]) == sequence.tokens[:most]:
            return most
        pairs = zip(self.tokens, sequence.tokens, strict=False)
        return next(at for at, (own, other) in enumerate(pairs) if own != other)

    def blocks(self) -> Iterator[int]:
        """Each of its blocks, the tail of a table first."""
        for table in self.tables:
            yield from reversed([block for _, block in table.live()])


class Holds:
    """Keeps  pins within their quota; every block of a hold has it among its owners. That the time
    of a pin is over is seen at the next plan."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._sessions: OrderedDict[str, Hold] = OrderedDict()
        self._pins: dict[Prefix, Hold] = {}
        """By the last node of the prefix."""
        self._pinned: Counter[int] = Counter()
        """In how many pins a block is."""
        self._next_s = inf
        """No pin ends before."""

    def __len__(self) -> int:
        return len(self._sessions) + len(self._pins)

    def __iter__(self) -> Iterator[Hold]:
        """In the order in which they would go."""
        yield from self._sessions.values()
        yield from sorted(self._pins.values(), key=lambda pin: (pin.until_s, pin.id))

    @property
    def sessions(self) -> tuple[Hold, ...]:
        return tuple(self._sessions.values())

    @property
    def pinned_blocks(self) -> int:
        return len(self._pinned)

    # --- sessions

    def keep(self, sequence: Sequence) -> None:
        """Hold what a sequence that ends has computed, under its name, if its request asks."""
        if not sequence.request.keep or not sequence.computed:
            return
        if sequence.computed < sequence.restored:  # it ends while its blocks are moved back
            return
        self.drop(sequence.id)
        tokens = tuple(sequence.tokens[: sequence.computed])
        whole = sequence.prefixes[: sequence.sealed]
        tables = self._manager.keep(sequence)
        self._sessions[sequence.id] = Hold(
            sequence.id, tables, tokens, sequence.context, whole, sequence.private
        )

    def of(self, sequence: Sequence) -> Hold | None:
        """What the request asked to go on from, if it is still there and of the same context."""
        request = sequence.request
        after = request.after if request.prompt_logprobs is None else None
        hold = self._sessions.get(after or "")
        return hold if hold is not None and hold.context == sequence.context else None

    # --- pins

    def pin(
        self, sequence: Sequence, quota_blocks: int, now: float
    ) -> Iterator[Pinned | PinRefused]:
        """Pin what the request asks for, as far as those blocks are sealed; a second time renews.

        A pin that was granted is kept: one that does not fit the quota beside it is refused.
        """
        for pin in sequence.request.pins[sequence.pinned :]:
            told = self._pin(sequence, pin, quota_blocks, now)
            if told is None:
                return
            sequence.pinned += 1
            yield told

    def _pin(
        self, sequence: Sequence, pin: Pin, quota_blocks: int, now: float
    ) -> Pinned | PinRefused | None:
        tokens = min(pin.tokens, len(sequence.request.prompt))
        count = tokens // self._manager.block_size
        if sequence.sealed < count and not sequence.private:
            return None
        if not count:
            return PinRefused(sequence.id, "tokens", 0, self._manager.block_size - tokens)
        if sequence.private:
            return PinRefused(sequence.id, "cache", 0, 0)
        nodes = sequence.prefixes[:count]
        hold = self._pins.get(nodes[-1])
        if hold is None:
            blocks = self._manager.published(nodes)
            if blocks is None:
                return PinRefused(sequence.id, "cache", 0, 0)
            excess = len(self._pinned.keys() | blocks) - quota_blocks
            if excess > 0:
                return PinRefused(sequence.id, "quota", len(blocks), excess)
            hold = self._pins[nodes[-1]] = Hold(
                f"pin-{nodes[-1].key.hex()[:16]}",
                self._manager.pin(nodes),
                tuple(sequence.tokens[: count * self._manager.block_size]),
                sequence.context,
                nodes,
            )
            self._pinned.update(blocks)
        hold.ttl_s = max(hold.ttl_s, pin.ttl_s)
        self._renew(hold, now)
        return Pinned(sequence.id, hold.id, sum(1 for _ in hold.blocks()), hold.until_s)

    def hit(self, sequence: Sequence, now: float) -> None:
        """The blocks that `sequence` found, or its session, are used now."""
        if self._pins:
            for node in sequence.prefixes[: sequence.sealed]:
                if node in self._pins:
                    self._renew(self._pins[node], now)
        session = self.of(sequence)
        if session is not None:
            self._sessions.move_to_end(session.id)

    def _renew(self, hold: Hold, now: float) -> None:
        hold.until_s = now + hold.ttl_s
        self._next_s = min(self._next_s, hold.until_s)

    def expire(self, now: float) -> list[HoldExpired]:
        """Let go the pins whose time has come."""
        if now < self._next_s:
            return []
        ended = [pin for pin in self if pin.until_s <= now]
        expired = [HoldExpired(pin.id, self._drop(pin)) for pin in ended]
        self._next_s = min((pin.until_s for pin in self._pins.values()), default=inf)
        return expired

    # --- both

    def yield_to(self, sequence: Sequence) -> HoldDropped | None:
        """Give up the next hold that gives blocks back; what `sequence` goes on from goes last."""
        pool = self._manager.pool
        if not pool.yielding:
            return None
        giving = (hold for hold in self if any(map(pool.yields, hold.blocks())))
        hold = own = next(giving)
        if own.id == sequence.request.after:
            hold = next(giving, own)
        return HoldDropped(hold.id, sequence.id, self._drop(hold))

    def drop(self, name: str) -> None:
        """Give up the hold of this name, if there is one."""
        hold = next((pin for pin in self._pins.values() if pin.id == name), None)
        hold = self._sessions.get(name, hold)
        if hold is not None:
            self._drop(hold)

    def flush(self) -> None:
        """Give up all pins. Sessions stay, and nothing computed from them is published."""
        for pin in list(self._pins.values()):
            self._drop(pin)
        for hold in self._sessions.values():
            hold.private = True

    def _drop(self, hold: Hold) -> int:
        if self._sessions.get(hold.id) is hold:
            del self._sessions[hold.id]
        else:
            del self._pins[hold.prefixes[-1]]
            for block in hold.blocks():
                self._pinned[block] -= 1
                if not self._pinned[block]:
                    del self._pinned[block]
        return self._manager.let_go(hold.tables)
