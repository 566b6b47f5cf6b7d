"""HostArena: the books of the memory to which preempted sequences are swapped.

    running ── put ──▶ swapped, one slot a block ── take ──▶ running

The arena is cut into slots of one block each, a pool of their own. A slot belongs to the sequence
whose KV it holds, and to every transfer that reads or writes it, until the plan that says so is
committed. A sequence keeps its slots while it waits, and loses them when it ends.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from octavo.core.block_pool import BlockPool, Shortage
from octavo.core.block_table import ABSENT


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSetup:
    """An arena of `host_blocks` slots, and what the engine measured of moving blocks to it.

    `tokens_per_s` is a first guess of how quickly KV is computed, until steps have shown it.
    """

    host_blocks: int
    block_bytes: int
    bytes_per_s: float
    tokens_per_s: float

    def seconds(self, blocks: int) -> float:
        """How long `blocks` take to leave and to come back."""
        return 2 * blocks * self.block_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Swapped:
    """The KV of the first `tokens` positions: `slots[group][index]` holds what the block at that
    entry of the table held, ABSENT where there was none."""

    tokens: int
    slots: tuple[tuple[int, ...], ...]

    def live(self) -> tuple[int, ...]:
        return tuple(slot for slots in self.slots for slot in slots if slot != ABSENT)


class HostArena:
    """Keeps    each slot is free, or held by one swapped sequence, by transfers, or by both."""

    def __init__(self, setup: SwapSetup) -> None:
        self.setup = setup
        self._slots = BlockPool(setup.host_blocks)
        self._swapped: dict[str, Swapped] = {}

    @property
    def total(self) -> int:
        return self._slots.total

    @property
    def room(self) -> int:
        """How many blocks could be swapped now."""
        return self._slots.available

    @property
    def used(self) -> int:
        return self.total - self.room

    def swapped(self, sequence_id: str) -> Swapped | None:
        """What the arena holds of a sequence."""
        return self._swapped.get(sequence_id)

    def held(self) -> dict[str, Swapped]:
        """What it holds of each sequence, for audits."""
        return dict(self._swapped)

    def references(self, slot: int) -> int:
        return self._slots.references(slot)

    def in_transfer(self, sequence_id: str) -> int:
        """How many slots of a sequence are still being written."""
        swapped = self._swapped.get(sequence_id)
        live = () if swapped is None else swapped.live()
        return sum(self._slots.transfers(slot) > 0 for slot in live)

    def put(self, sequence_id: str, tokens: int, blocks: Items[Items[int]]) -> Swapped:
        """Give a slot to each of the `blocks` (a group each, ABSENT where there is none) that hold
        the first `tokens` positions. Until `lift` each is in transfer."""
        assert sequence_id not in self._swapped, f"{sequence_id} is swapped already"
        taken = self._slots.take(sum(block != ABSENT for row in blocks for block in row))
        assert not isinstance(taken, Shortage), "counted before"
        for slot in taken.blocks:
            self._slots.fence(slot)
        slots = iter(taken.blocks)
        swapped = Swapped(
            tokens,
            tuple(tuple(ABSENT if b == ABSENT else next(slots) for b in row) for row in blocks),
        )
        self._swapped[sequence_id] = swapped
        return swapped

    def take(self, sequence_id: str, moving: Iterable[int]) -> None:
        """The sequence is back: it holds its slots no more. Until `lift` those `moving` are in
        transfer."""
        for slot in moving:
            self._slots.fence(slot)
        self.drop(sequence_id)

    def drop(self, sequence_id: str) -> None:
        """Forget what is held of a sequence, if anything is."""
        swapped = self._swapped.pop(sequence_id, None)
        for slot in () if swapped is None else swapped.live():
            self._slots.release(slot, keep=False)

    def lose(self, slots: Iterable[int]) -> None:
        """These were never written: whoever holds one of them has lost its KV."""
        lost = set(slots)
        for sequence_id, swapped in self.held().items() if lost else ():
            if lost.intersection(swapped.live()):
                self.drop(sequence_id)

    def lift(self, slot: int) -> None:
        """One transfer of the slot is over."""
        self._slots.lift(slot, keep=False)
