"""Hits: the KV that is there already, and who is computing what is not there yet.

    positions    0–15   16–31   32–47   48–63
    entries      (7,)   (2,)    (9,)                found: 40 tokens, the last 8 in the middle of 9
    columns      [7,     2,      9]                 a table's head for each layer group

It is found by content, in the prefix cache, or with a parent: a sibling that runs, or a hold. A
search changes nothing but the chain of nodes that a sequence remembers.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from octavo.core.block_table import ABSENT, BlockTable
from octavo.core.prefix_cache import Prefix, PrefixCache
from octavo.core.sequence import Sequence
from octavo.core.windows import Windows, first_needed
from octavo.units import ceil_div


class Parent(Protocol):
    """Who owns blocks that another can go on from: a running sequence, or a hold."""

    id: str
    tables: tuple[BlockTable, ...]
    prefixes: list[Prefix]
    private: bool

    def common_with(self, sequence: Sequence) -> int: ...


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks that hold the first `tokens` positions, an entry each, of one block a layer group; of
    a group with a window perhaps only the last ones, ABSENT before. `parent` owns them; without
    one they are in the prefix cache.
    """

    entries: tuple[tuple[int, ...], ...]
    tokens: int
    parent: Parent | None = None


@dataclass(frozen=True, slots=True)
class Lead:
    """`leader` is computing the first block that a sequence `lacking` so many tokens would not
    find. Below position `upto`, which ends a block, their prompts are `alike`: so many tokens more
    would be found then."""

    leader: Sequence
    upto: int
    alike: int
    lacking: int


class Hits:
    """Searches the prefix cache, if there is one, and the tables of parents."""

    def __init__(self, cache: PrefixCache | None, windows: Windows, block_size: int) -> None:
        self._cache = cache
        self._windows = windows
        self._block_size = block_size

    def most(self, sequence: Sequence, parent: Parent | None, step: int) -> Found:
        """What the prefix cache or `parent` has, a multiple of `step` tokens: one, or a block."""
        found = self.cached(sequence, step)
        if parent is None:
            return found
        shared = parent.common_with(sequence) // step * step
        return max(found, self.held(parent, shared), key=lambda one: one.tokens)

    def cached(self, sequence: Sequence, step: int = 1) -> Found:
        """What the prefix cache has, a multiple of `step` tokens. The last position is left to
        compute.

        Cost     one hash a block whose node is not known yet, then O(blocks).
        """
        if self._cache is None or not sequence.request.reads_cache:
            return Found((), 0)
        length, size = len(sequence.tokens), self._block_size
        self._cache.extend(sequence.prefixes, sequence.context, sequence.tokens, length)
        most = (length - 1) // step * step
        count = self._cache.match(sequence.prefixes, ceil_div(most, size), most)
        tokens = min(count * size, most)
        nodes = sequence.prefixes[:count]
        if tokens < most and step == 1:
            end = min(tokens + size, length - 1)
            before = nodes[-1] if nodes else sequence.context
            begun = self._cache.begins_like(before, tuple(sequence.tokens[tokens:end]))
            if begun is not None:
                nodes, tokens = [*nodes, begun[0]], tokens + begun[1]
        return Found(tuple(tuple(node.blocks) for node in nodes), tokens)

    def held(self, parent: Parent, upto: int) -> Found:
        """What `parent` holds of the first `upto` positions; nothing if it gave back some that
        whoever goes on from there needs."""
        firsts = self._firsts(upto)
        if any(table.first > first for table, first in zip(parent.tables, firsts, strict=True)):
            return Found((), 0)
        return Found(self._entries(parent.tables, upto), upto, parent)

    def columns(self, entries: Items[Items[int]], start: int) -> list[tuple[int, ...]]:
        """The head of a table for each layer group: of the blocks that were found those that
        whoever computes from `start` on needs."""
        return [
            (*[ABSENT] * first, *(entry[group] for entry in entries[first:]))
            for group, first in enumerate(self._firsts(start))
        ]

    def computed_by(self, sequence: Sequence) -> list[tuple[int, ...]]:
        """The blocks that hold the scheduled positions of `sequence`, a layer group each, ABSENT
        where none is needed by whoever goes on from there."""
        entries = self._entries(sequence.tables, sequence.scheduled)
        return self.columns(entries, sequence.scheduled)

    def published(self, nodes: Items[Prefix]) -> list[tuple[int, ...]] | None:
        """The blocks in which a sequence that begins with `nodes`, and computes the last position
        of them again, finds them, a layer group each; None if it would not find all."""
        newest = len(nodes) * self._block_size - 1
        if self._cache is None or self._cache.match(nodes, len(nodes), newest) < len(nodes):
            return None
        return self.columns([node.blocks for node in nodes], newest)

    def publishes(self, block: int) -> bool:
        """Whether the prefix cache finds `block`."""
        return self._cache is not None and self._cache.publishes(block)

    def lead(
        self, sequence: Sequence, leaders: Iterable[Sequence], parent: Parent | None
    ) -> Lead | None:
        """Who of the `leaders` is computing what `sequence` could wait for; None if nobody is.

        Cost     a look-up of the prompt; O(leaders + blocks alike).
        """
        if self._cache is None or not sequence.request.reads_cache:
            return None
        found, size = self.cached(sequence), self._block_size
        nodes, tokens = sequence.prefixes, found.tokens
        if parent is not None:
            tokens = max(tokens, parent.common_with(sequence))
        first = max(self._cache.match(nodes, len(nodes)), tokens // size)
        if first >= len(nodes):
            return None
        alike = [
            (_alike(leader.prefixes, nodes, first), leader)
            for leader in leaders
            if leader.computed // size <= first < len(leader.prefixes)
        ]
        count, leader = max(alike, key=lambda one: one[0], default=(0, sequence))
        if count <= first:
            return None
        length = len(sequence.tokens)
        upto = min(count * size, length - 1)
        return Lead(leader, count * size, upto - tokens, length - tokens)

    def _firsts(self, start: int) -> list[int]:
        """The first entry that whoever computes from `start` on needs, in each layer group."""
        return [first_needed(window, start, self._block_size) for window in self._windows]

    def _entries(self, tables: Items[BlockTable], upto: int) -> tuple[tuple[int, ...], ...]:
        """The blocks of the first `upto` positions."""
        count = ceil_div(upto, self._block_size)
        return tuple(zip(*(table.blocks[:count] for table in tables), strict=True))


def _alike(one: Items[Prefix], other: Items[Prefix], first: int) -> int:
    """Up to which index two chains are the same nodes from `first` on."""
    pairs = zip(one[first:], other[first:], strict=False)
    return first + next(
        (index for index, (a, b) in enumerate(pairs) if a is not b),
        min(len(one), len(other)) - first,
    )
