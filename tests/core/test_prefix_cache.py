"""A key says all that the content depends on; a find compares the content itself too."""

import gc
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.serving import constant_hash

from octavo.core.prefix_cache import Context, Fate, HashFunction, Prefix, PrefixCache, sha256
from octavo.core.windows import Windows

GONE = Fate("evicted", "r", 1.0, 7)


def cache_of(
    size: int, hash_function: HashFunction = sha256, windows: Windows = (None,)
) -> PrefixCache:
    return PrefixCache(block_size=size, windows=windows, hash_function=hash_function)


def chain_of(cache: PrefixCache, context: Context, tokens: list[int]) -> list[Prefix]:
    chain: list[Prefix] = []
    cache.extend(chain, context, tokens, len(tokens))
    return chain


def test_only_full_blocks_have_a_node() -> None:
    assert len(chain_of(cache_of(4), Context(), list(range(11)))) == 2
    assert chain_of(cache_of(4), Context(), [1, 2, 3]) == []


def test_a_chain_grows_where_it_ended() -> None:
    cache, tokens = cache_of(4), list(range(20))
    whole = chain_of(cache, Context(), tokens)
    grown: list[Prefix] = []
    for upto in (5, 8, 8, 19, 20):
        cache.extend(grown, Context(), tokens, upto)
    assert grown == whole


def test_the_same_content_is_the_same_node() -> None:
    cache = cache_of(2)
    one, other = (chain_of(cache, Context(salt="x"), [1, 2, 3, 4]) for _ in range(2))
    assert one[0] is other[0]
    assert one[1] is other[1]


@pytest.mark.parametrize("hash_function", [sha256, constant_hash])
@given(
    texts=st.lists(st.text(max_size=2), min_size=4, max_size=8),
    tokens=st.lists(st.integers(-2, 2), min_size=2, max_size=6),
    others=st.lists(st.integers(-2, 2), min_size=2, max_size=6),
)
def test_different_content_is_never_the_same_node(
    hash_function: HashFunction, texts: list[str], tokens: list[int], others: list[int]
) -> None:
    cache = cache_of(2, hash_function)
    first = Context(adapter=texts[0], salt=texts[1], attachments=tuple(texts[4:6]))
    second = Context(adapter=texts[2], salt=texts[3], attachments=tuple(texts[6:]))
    one, other = chain_of(cache, first, tokens), chain_of(cache, second, others)
    for index, (node, twin) in enumerate(zip(one, other, strict=False)):
        upto = 2 * index + 2
        same = first == second and tokens[:upto] == others[:upto]
        assert (node is twin) <= same
        assert (node.key == twin.key) == (same or hash_function is constant_hash)


@given(
    one=st.tuples(*[st.text(max_size=3)] * 4, st.lists(st.text(max_size=3), max_size=3)),
    other=st.tuples(*[st.text(max_size=3)] * 4, st.lists(st.text(max_size=3), max_size=3)),
)
def test_no_two_contexts_share_an_encoding(one: tuple, other: tuple) -> None:
    first, second = (
        Context(model=m, layout=y, adapter=a, salt=s, attachments=tuple(t))
        for m, y, a, s, t in (one, other)
    )
    assert (first.encode() == second.encode()) == (first == second)


@given(bit=st.integers(0, 255), digest=st.binary(min_size=32, max_size=32))
def test_any_bit_of_an_attachment_changes_the_key(bit: int, digest: bytes) -> None:
    """B016: digests were cut short before they went into the key."""
    flipped = (int.from_bytes(digest, "big") ^ (1 << bit)).to_bytes(32, "big")
    contexts = [Context(attachments=(content.hex(),)) for content in (digest, flipped)]
    one, other = (chain_of(cache_of(2), context, [1, 2])[0] for context in contexts)
    assert one.key != other.key


def test_each_field_of_the_context_parts_the_keys() -> None:
    base = Context(model="m", layout="l", adapter="a", salt="s", attachments=("t",))
    changes = [{"model": "x"}, {"layout": "x"}, {"adapter": "x"}, {"salt": "x"}]
    changes += [{"attachments": ("x",)}, {"attachments": ("t", "t")}]
    contexts = [base, *(replace(base, **change) for change in changes)]
    keys = {chain_of(cache_of(2), context, [1, 2])[0].key for context in contexts}
    assert len(keys) == len(contexts)


def test_a_salt_that_is_no_valid_unicode_has_a_key() -> None:
    """JSON can hold half a surrogate pair; the loop must not end by it."""
    keys = {
        chain_of(cache_of(2), Context(salt=salt), [1, 2])[0].key
        for salt in ("\ud800", "\ud801", "?", "")
    }
    assert len(keys) == 4


def test_match_ends_at_the_first_block_missing_in_any_group() -> None:
    cache = cache_of(2, windows=(None, None))
    chain = chain_of(cache, Context(), [1, 2, 3, 4, 5, 6])
    for index, node in enumerate(chain):
        cache.publish(node, 0, index)
        if index != 1:
            cache.publish(node, 1, 10 + index)
    assert cache.match(chain, 3) == 1
    cache.publish(chain[1], 1, 11)
    assert cache.match(chain, 3) == 3
    assert cache.match(chain, 2) == 2
    cache.forget(0, GONE)
    assert cache.match(chain, 3) == 0


@given(
    published=st.lists(st.tuples(*[st.integers(0, 2)] * 4), unique=True, max_size=12),
    gone=st.sets(st.integers(0, 11)),
    tokens=st.lists(st.integers(0, 2), max_size=4).map(tuple),
)
def test_the_node_that_begins_most_alike_is_found(
    published: list[tuple[int, ...]], gone: set[int], tokens: tuple[int, ...]
) -> None:
    cache, context = cache_of(4), Context(salt="s")
    for block, own in enumerate(published):
        cache.publish(chain_of(cache, context, list(own))[0], 0, block)
    for block in gone & set(range(len(published))):
        cache.forget(block, GONE)
    left = [own for block, own in enumerate(published) if block not in gone]
    alike = [n for own in left for n in range(len(tokens) + 1) if own[:n] == tokens[:n]]
    best = max(alike, default=0)
    found = cache.begins_like(Context(salt="s"), tokens)
    assert (0 if found is None else found[1]) == best
    assert found is None or found[0].tokens[:best] == tokens[:best]
    assert cache.begins_like(Context(), tokens) is None


def test_only_a_node_with_a_block_in_every_group_is_found_by_how_it_begins() -> None:
    cache = cache_of(2, windows=(None, None))
    parent, node = chain_of(cache, Context(), [1, 2, 3, 4])
    cache.publish(node, 1, 7)
    assert cache.begins_like(parent, (3,)) is None
    cache.publish(node, 0, 8)
    assert cache.begins_like(parent, (3,)) == (node, 1)
    assert cache.begins_like(parent, (3, 4, 5)) == (node, 2)
    assert cache.begins_like(parent, (4,)) is cache.begins_like(Context(), (3,)) is None
    cache.forget(7, GONE)
    assert cache.begins_like(parent, (3,)) is None


def test_one_block_stands_for_a_node() -> None:
    cache = cache_of(2)
    (node,) = chain_of(cache, Context(), [1, 2])
    assert cache.publish(node, 0, 5)
    assert not cache.publish(node, 0, 6)
    assert not cache.publishes(6)
    assert cache.published() == {5: (node, 0)}


def test_with_colliding_keys_only_the_older_node_is_published() -> None:
    cache = cache_of(2, constant_hash)
    (older,) = chain_of(cache, Context(), [1, 2])
    (younger,) = chain_of(cache, Context(), [3, 4])
    assert not cache.publish(younger, 0, 7)
    assert cache.publish(older, 0, 8)
    assert cache.match([younger], 1) == 0


def test_nodes_nobody_needs_are_gone() -> None:
    cache = cache_of(2)
    chain = chain_of(cache, Context(), [1, 2, 3, 4])
    cache.publish(chain[1], 0, 3)
    del chain
    gc.collect()
    assert len(cache._nodes) == 2, "a published block keeps its node and the parents"
    cache.forget(3, GONE)
    gc.collect()
    assert len(cache._nodes) == 0


def test_a_very_long_prefix_can_be_let_go() -> None:
    cache = cache_of(16)
    chain = chain_of(cache, Context(), list(range(320_000)))
    last = chain[-1]
    chain.clear()
    del last
    gc.collect()
    assert len(cache._nodes) == 0


def test_a_prefix_that_left_is_remembered_until_it_is_back() -> None:
    cache = cache_of(2)
    one, other = chain_of(cache, Context(), [1, 2, 3, 4])
    assert cache.fate(one.key) is None
    for node, block in ((one, 0), (other, 1)):
        cache.publish(node, 0, block)
        assert cache.fate(node.key) is None
        cache.forget(block, GONE)
        assert cache.fate(node.key) == GONE
    cache.publish(one, 0, 2)
    assert (cache.fate(one.key), cache.fate(other.key)) == (None, GONE)
    flushed = Fate("flushed", "", 2.0, 9)
    cache.forget(2, flushed)
    assert cache.fate(one.key) == flushed


def test_only_the_latest_fates_are_kept() -> None:
    cache = PrefixCache(block_size=1, fates=3)
    nodes = chain_of(cache, Context(), list(range(5)))
    for round_ in range(2):
        for block, node in enumerate(nodes):
            cache.publish(node, 0, block)
            cache.forget(block, GONE)
        assert [cache.fate(node.key) for node in nodes] == [None] * 2 + [GONE] * 3, round_


# Pairs that Python's own hash cannot tell apart.
ALIKE = [(-1, -2), (2**61 - 1, 0), (2**61, 1), (5, 5 + 2**61 - 1)]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_B012_numbers_alike_under_the_languages_hash_have_different_keys(
    one: int, other: int
) -> None:
    """B012: keys came from hash(), for which colliding prompts can be built on purpose."""
    assert hash(one) == hash(other)
    keys = {chain_of(cache_of(2), Context(), [7, token])[0].key for token in (one, other)}
    assert len(keys) == 2
    texts = {chain_of(cache_of(2), Context(salt=str(t)), [7, 7])[0].key for t in (one, other)}
    assert len(texts) == 2


def test_B012_keys_are_the_same_whatever_the_hash_seed() -> None:
    """B012: keys must not depend on PYTHONHASHSEED."""
    code = (
        "from octavo.core.prefix_cache import *\n"
        "chain = []\n"
        "context = Context(model='m', adapter='a', salt='s', attachments=('t',))\n"
        "PrefixCache(block_size=2).extend(chain, context, [1, 2, 3, 4], 4)\n"
        "print([node.key.hex() for node in chain])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(printed) == 1


def test_B013_an_adapter_and_a_salt_of_one_name_are_told_apart() -> None:
    """B013: bare strings in one tuple: adapter X without salt had the key of salt X."""
    contexts = [
        Context(adapter="x"),
        Context(salt="x"),
        Context(adapter="ab", salt="c"),
        Context(adapter="a", salt="bc"),
        Context(model="x"),
        Context(layout="x"),
        Context(attachments=("x",)),
        Context(attachments=("x", "")),
    ]
    cache = cache_of(2)
    nodes = [chain_of(cache, context, [1, 2])[0] for context in contexts]
    assert len({node.key for node in nodes}) == len(contexts)
    cache.publish(nodes[0], 0, 4)
    assert [cache.match([node], 1) for node in nodes] == [1] + [0] * (len(nodes) - 1)
