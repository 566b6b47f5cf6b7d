"""Misses: how each block of a prompt fares in the prefix cache, and why.

    blocks    0 1 2 3   │ 4                       │ 5 6      │ 7
              hit       │ partial: 12 tokens alike │ evicted  │ not_full

For those who ask: nothing here decides or changes anything.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from octavo.core.block_manager import BlockManager
from octavo.core.block_table import ABSENT
from octavo.core.events import Difference, Explanation, Fares, Stretch
from octavo.core.prefix_cache import Context, Prefix, PrefixCache
from octavo.core.sequence import Sequence
from octavo.units import ceil_div


def explain(manager: BlockManager, sequence: Sequence, now: float) -> Explanation:
    """What the cache has of a sequence that was not admitted yet, and why not the rest.

    Cost     a look-up of the prompt, and a search through all that is cached for the same tokens
             in other contexts.
    """
    found, length, size = manager.cached_tokens(sequence), len(sequence.tokens), manager.block_size
    cache = manager.cache
    if cache is None or not sequence.request.reads_cache:
        stretches = [Stretch(0, ceil_div(length, size), "cache_off")]
    else:
        elsewhere = _elsewhere(cache, sequence, size)
        stretches = list(_stretches(cache, sequence, found, size, elsewhere))
    return Explanation(length, found, size, tuple(stretches), now)


def first_miss(manager: BlockManager, sequence: Sequence, found: int) -> Stretch | None:
    """Why no more than the first `found` tokens were there: the block in which they end.

    None if all that can be cached was there, or if the cache is not used.
    Cost     O(1): neither its siblings nor other contexts are searched.
    """
    cache, size = manager.cache, manager.block_size
    if cache is None or not sequence.request.reads_cache or found >= len(sequence.tokens) - 1:
        return None
    missed = _fares(cache, sequence, found, size, found // size, {})
    return None if missed.why == "not_full" else missed


def _stretches(
    cache: PrefixCache, sequence: Sequence, found: int, size: int, elsewhere: Mapping[Fares, int]
) -> Iterator[Stretch]:
    """All blocks, those that follow each other and fare the same way in one."""
    hits = found // size
    if found == len(sequence.tokens) - 1 and hits < len(sequence.prefixes):
        hits += ABSENT not in sequence.prefixes[hits].blocks  # its last position is computed again
    if hits:
        yield Stretch(0, hits, "hit")
    rest = [
        _fares(cache, sequence, found, size, index, elsewhere)
        for index in range(hits, ceil_div(len(sequence.tokens), size))
    ]
    if rest and not rest[0].why.startswith("other_"):
        rest[0] = replace(rest[0], differs=_difference(cache, sequence, hits, size))
    for _, group in groupby(rest, key=lambda one: (one.why, one.alike, one.by, one.plan_id)):
        alike = list(group)
        yield replace(alike[0], stop=alike[-1].stop)


def _fares(
    cache: PrefixCache,
    sequence: Sequence,
    found: int,
    size: int,
    index: int,
    elsewhere: Mapping[Fares, int],
) -> Stretch:
    """How a block fares that is not found whole."""
    alike = found % size if index == found // size else 0
    block = Stretch(index, index + 1, "partial" if alike else "never_seen", alike)
    if index >= len(sequence.prefixes):
        return block if alike else replace(block, why="not_full")
    node = sequence.prefixes[index]
    if ABSENT not in node.blocks:
        return replace(block, why="behind_a_miss")
    fate = cache.fate(node.key)
    if fate is not None:
        by, at_s, plan_id = fate.beneficiary, fate.at_s, fate.plan_id
        return replace(block, why=fate.why, by=by, at_s=at_s, plan_id=plan_id)
    other = next((why for why, blocks in elsewhere.items() if blocks > index), None)
    return block if other is None else replace(block, why=other)


def _difference(cache: PrefixCache, sequence: Sequence, index: int, size: int) -> Difference | None:
    """Where the cached block that is most like this one differs from it first."""
    parent: Prefix | Context = sequence.prefixes[index - 1] if index else sequence.context
    tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
    closest = cache.closest(parent, tokens)
    if closest is None or closest[1] >= len(tokens):
        return None
    node, alike = closest
    return Difference(index * size + alike, tokens[alike], node.tokens[alike])


def _elsewhere(cache: PrefixCache, sequence: Sequence, size: int) -> dict[Fares, int]:
    """How many leading blocks of the prompt other contexts have, by what is other there."""
    most: dict[Fares, int] = {}
    for context in cache.contexts():
        if context == sequence.context:
            continue
        node: Prefix | Context = context
        blocks = 0
        for start in range(0, len(sequence.tokens) - size + 1, size):
            tokens = tuple(sequence.tokens[start : start + size])
            closest = cache.closest(node, tokens)
            if closest is None or closest[1] < size:
                break
            node, blocks = closest[0], blocks + 1
        why = _what_differs(context, sequence.context)
        most[why] = max(most.get(why, 0), blocks)
    return most


def _what_differs(one: Context, other: Context) -> Fares:
    if one.adapter != other.adapter:
        return "other_adapter"
    if one.attachments != other.attachments:
        return "other_attachments"
    return "other_salt"
