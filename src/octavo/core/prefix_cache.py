"""The prefix cache: which block holds the keys and values of which prefix.

A `Prefix` is a node of a tree: sixteen tokens after a parent prefix, in one context. A node is
found by its `BlockKey`, a strong hash of all that the content depends on, and a find compares
tokens and parent too; so two nodes with the same content are the same object, and with a bad hash
the cache finds less, never something wrong.

    context ─ Prefix(tokens 0–15) ─ Prefix(16–31) ─ Prefix(32–47)
                 blocks (7,)        blocks (2,)      blocks (-1,): evicted, a miss from here on

Nodes live as long as somebody needs them: a child, a sequence, or a published block. Those with a
block in every layer group are also kept in order of their tokens beside their siblings: a prompt
that leaves a cached one in the middle of a block finds the block that begins like its own.
"""

import hashlib
import struct
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NewType
from weakref import WeakValueDictionary

from octavo.core.block_table import ABSENT
from octavo.core.windows import Windows, first_needed
from octavo.units import common_length

BlockKey = NewType("BlockKey", bytes)
HashFunction = Callable[[bytes], bytes]

FATES_KEPT = 4096
"""Of how many prefixes it is remembered how they left the cache: half a megabyte."""


def sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """All that KV values depend on besides the tokens before them."""

    model: str = ""
    layout: str = ""
    adapter: str = ""
    salt: str = ""
    attachments: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Tagged, length-prefixed fields: no two contexts share an encoding."""
        fields = [(b"m", self.model), (b"l", self.layout), (b"a", self.adapter), (b"s", self.salt)]
        fields += [(b"t", digest) for digest in self.attachments]
        encoded = [(tag, value.encode("utf-8", "surrogatepass")) for tag, value in fields]
        return b"".join(tag + struct.pack("<Q", len(value)) + value for tag, value in encoded)


class Prefix:
    """One block of tokens after `parent`, and the physical block of each layer group."""

    __slots__ = ("__weakref__", "blocks", "key", "parent", "tokens")

    def __init__(
        self, key: BlockKey, parent: "Prefix | Context", tokens: tuple[int, ...], groups: int
    ) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.blocks = [ABSENT] * groups

    def holds(self, parent: "Prefix | Context", tokens: tuple[int, ...]) -> bool:
        """Whether this node means exactly `tokens` after `parent`."""
        return self.tokens == tokens and (self.parent is parent or self.parent == parent)


@dataclass(frozen=True, slots=True)
class Fate:
    """How a prefix left the cache.

    `why`: its block was reused (evicted) or its content was not trusted any more (distrusted), both
    by `beneficiary`; or the cache was emptied on demand (flushed, with no beneficiary). `at_s` is
    on the core's clock, `plan_id` the plan that was made then, or the next one.
    """

    why: Literal["evicted", "flushed", "distrusted"]
    beneficiary: str
    at_s: float
    plan_id: int


_tokens_of = attrgetter("tokens")


class PrefixCache:
    """Finds and publishes prefixes. It owns no block; the manager asks the pool."""

    def __init__(
        self,
        *,
        block_size: int,
        windows: Windows = (None,),
        hash_function: HashFunction = sha256,
        fates: int = FATES_KEPT,
    ) -> None:
        self._block_size = block_size
        self._groups = len(windows)
        self._full = [group for group, window in enumerate(windows) if window is None]
        self._sliding = [(g, window) for g, window in enumerate(windows) if window is not None]
        self._hash = hash_function
        self._packed = f"<{block_size}q"
        self._nodes: WeakValueDictionary[BlockKey, Prefix] = WeakValueDictionary()
        self._by_block: dict[int, tuple[Prefix, int]] = {}
        self._children: dict[Prefix | Context, list[Prefix]] = {}
        self._fates: OrderedDict[BlockKey, Fate] = OrderedDict()
        self._fates_kept = fates

    def __len__(self) -> int:
        """How many blocks are published."""
        return len(self._by_block)

    def extend(
        self, chain: list[Prefix], context: Context, tokens: Sequence[int], upto: int
    ) -> None:
        """Append to `chain` the nodes of every full block of `tokens` below position `upto`.

        Cost     one hash a new block.
        """
        size = self._block_size
        for start in range(len(chain) * size, upto - size + 1, size):
            parent: Prefix | Context = chain[-1] if chain else context
            chain.append(self._node(parent, tuple(tokens[start : start + size])))

    def _node(self, parent: Prefix | Context, tokens: tuple[int, ...]) -> Prefix:
        key = self._key(parent, tokens)
        node = self._nodes.get(key)
        if node is not None and node.holds(parent, tokens):
            return node
        fresh = Prefix(key, parent, tokens, self._groups)
        if node is None:  # or else the older node keeps the key, and the fresh one stays private
            self._nodes[key] = fresh
        return fresh

    def _key(self, parent: Prefix | Context, tokens: tuple[int, ...]) -> BlockKey:
        head = parent.key if isinstance(parent, Prefix) else self._hash(parent.encode())
        return BlockKey(self._hash(head + struct.pack(self._packed, *tokens)))

    def match(self, chain: Sequence[Prefix], limit: int, most: int | None = None) -> int:
        """How many of the first `limit` nodes of `chain` a sequence can go on from.

        Each layer group has the blocks that are needed by whoever goes on from there, or from
        position `most` if that is before: all, or the last ones where there is a window.

        Cost     O(nodes).
        """
        count = min(limit, len(chain))
        for index, node in enumerate(chain[:limit]):
            if ABSENT in node.blocks and any(node.blocks[group] == ABSENT for group in self._full):
                count = index
                break
        while self._sliding and (gap := self._gap(chain, count, most)) is not None:
            count = gap
        return count

    def _gap(self, chain: Sequence[Prefix], count: int, most: int | None) -> int | None:
        """The last of `count` nodes that lacks a block which a window reaches."""
        positions = count * self._block_size
        start = positions if most is None else min(positions, most)
        needs = [(g, first_needed(window, start, self._block_size)) for g, window in self._sliding]
        for index in reversed(range(count)):
            blocks = chain[index].blocks
            needs = [(group, first) for group, first in needs if first <= index]
            if not needs:
                return None
            if any(blocks[group] == ABSENT for group, _ in needs):
                return index
        return None

    def publish(self, node: Prefix, group: int, block: int) -> bool:
        """Let `block` stand for `node`. False if another block does, or if the node is private."""
        if node.blocks[group] != ABSENT or self._nodes.get(node.key) is not node:
            return False
        node.blocks[group] = block
        self._by_block[block] = (node, group)
        self._fates.pop(node.key, None)
        if ABSENT not in node.blocks:
            children = self._children.setdefault(node.parent, [])
            children.insert(_place(children, node.tokens), node)
        return True

    def begins_like(
        self, parent: Prefix | Context, tokens: tuple[int, ...]
    ) -> tuple[Prefix, int] | None:
        """The node after `parent` that begins with most of `tokens`, and how many; None if none.

        Cost     O(log children): in their order it stands beside where `tokens` would.
        """
        best = self.closest(parent, tokens)
        return best if best is not None and best[1] else None

    def closest(
        self, parent: Prefix | Context, tokens: tuple[int, ...]
    ) -> tuple[Prefix, int] | None:
        """As `begins_like`, one that begins with none of them if there is no better one."""
        children = self._children.get(parent, [])
        place = _place(children, tokens)
        beside = [
            (one, common_length(one.tokens, tokens)) for one in children[max(place - 1, 0) :][:2]
        ]
        return max(beside, key=lambda found: found[1], default=None)

    def contexts(self) -> list[Context]:
        """Every context in which something is cached from the first token on.

        Cost     O(published).
        """
        return [parent for parent in self._children if isinstance(parent, Context)]

    def publishes(self, block: int) -> bool:
        return block in self._by_block

    def node_of(self, block: int) -> tuple[Prefix, int] | None:
        """What a block is published as, and its layer group."""
        return self._by_block.get(block)

    def forget(self, block: int, fate: Fate) -> None:
        """Let nobody find `block` any more, and remember why, for a while.

        Cost     O(1); the fates that are kept decide nothing.
        """
        node, group = self._by_block.pop(block)
        if ABSENT not in node.blocks:
            children = self._children[node.parent]
            del children[_place(children, node.tokens)]
            if not children:
                del self._children[node.parent]
        node.blocks[group] = ABSENT
        self._fates[node.key] = fate
        self._fates.move_to_end(node.key)
        if len(self._fates) > self._fates_kept:
            self._fates.popitem(last=False)

    def fate(self, key: BlockKey) -> Fate | None:
        """How the prefix of this key left the cache last, for those who explain a miss.

        None if it was never there, is there now, or left so long ago that it is not remembered.
        """
        return self._fates.get(key)

    def published(self) -> dict[int, tuple[Prefix, int]]:
        """Every published block with its node and layer group, for audits."""
        return dict(self._by_block)


def _place(children: list[Prefix], tokens: tuple[int, ...]) -> int:
    return bisect_left(children, tokens, key=_tokens_of)
