"""Layer groups with windows: what they hold, give back, find again, and how little that is.

`Serving` has the oracle read what each group sees and no more, and audits after every call that
tables hold exactly what is needed. Every answer is the one that the request gets alone.
"""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.serving import DRAWN, Serving, Setup, constant_hash, prompt

from octavo.core.block_table import ABSENT
from octavo.core.events import Admitted, Finished, Refused
from octavo.core.request import Request
from octavo.core.windows import (
    Windows,
    blocks_for,
    first_held,
    longest_chunk,
    longest_sequence,
    most_held,
)
from octavo.units import ceil_div

SYNTHETIC: Windows = (None, 8, 24)
GEMMA: Windows = (None, 512, 512, 512, 512, 512)


def request(name: str, tokens: tuple[int, ...], max_tokens: int, **fields: object) -> Request:
    return Request(id=name, prompt=tokens, max_tokens=max_tokens, **fields)


def admitted(serving: Serving, name: str) -> Admitted:
    found = serving.of(Admitted, name)[0]
    assert isinstance(found, Admitted)
    return found


@pytest.fixture
def random(seed: int) -> Random:
    return Random(seed)


# --- counting

SIZES = {
    "window": st.none() | st.integers(1, 40),
    "positions": st.integers(1, 120),
    "chunk": st.integers(1, 40),
    "block_size": st.sampled_from([1, 2, 3, 4, 16]),
}


@given(**SIZES)
def test_no_chunk_holds_more_than_the_most(
    window: int | None, positions: int, chunk: int, block_size: int
) -> None:
    held = []
    for start in range(positions):
        stop = min(start + chunk, positions)
        held.append(ceil_div(stop, block_size) - first_held(window, start, block_size))
    most = most_held(window, positions, chunk, block_size)
    assert max(held) <= most <= max(held) + (window is not None)


@given(
    windows=st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=4).map(tuple),
    positions=st.integers(1, 80),
    block_size=st.sampled_from([1, 2, 4]),
    blocks=st.integers(1, 200),
)
def test_the_longest_chunk_fits_and_the_longest_sequence_too(
    windows: Windows, positions: int, block_size: int, blocks: int
) -> None:
    most = longest_sequence(windows, block_size, blocks, 1000)
    assert most == 0 or blocks_for(windows, most, block_size) <= blocks
    assert most == 1000 or blocks_for(windows, most + 1, block_size) > blocks
    if positions <= most:
        chunk = longest_chunk(windows, positions, block_size, blocks)
        held = [most_held(window, positions, chunk, block_size) for window in windows]
        assert chunk >= 1
        assert sum(held) <= blocks or chunk == positions


@pytest.mark.parametrize(
    ("window", "computed", "first"),
    [(None, 1000, 0), (8, 8, 0), (8, 11, 0), (8, 12, 1), (8, 21, 3), (1, 4, 0), (1, 5, 1)],
)
def test_one_position_more_than_the_next_one_sees_is_held(
    window: int | None, computed: int, first: int
) -> None:
    assert first_held(window, computed, 4) == first


# --- answers


@pytest.mark.parametrize(
    ("block_size", "tokens", "depth"), list(product([4, 16], [3, 16, 200], [1, 2, 3]))
)
def test_answers_are_those_of_a_request_alone(
    random: Random, block_size: int, tokens: int, depth: int
) -> None:
    """In chunks of three sizes, beside each other, in a pool that is too small for all."""
    blocks = 3 * blocks_for(SYNTHETIC, 90, block_size) // 2
    setup = Setup(
        blocks=blocks,
        block_size=block_size,
        windows=SYNTHETIC,
        depth=depth,
        watermark_blocks=0,
        admission=random.choice(["full", "chunked"]),
    )
    start, preemptions = prompt(random, 40), 0
    for hash_function, host_blocks in product((None, constant_hash), (0, 30)):
        serving = Serving(
            replace(
                setup,
                tokens=tokens,
                host_blocks=host_blocks,
                preemption="swap" if host_blocks else "recompute",
                **({} if hash_function is None else {"hash_function": hash_function}),
            )
        )
        for number in range(8):
            tail = prompt(random, random.choice([0, 1, 7, 20]))
            branches = random.choice([1, 1, 2])
            serving.submit(
                request(str(number), start + tail, 30, branches=branches, sampling=DRAWN)
            )
            for _ in range(4):
                serving.step()
        serving.finish()
        preemptions += serving.scheduler.counters.preemptions
    assert preemptions > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_gemma_3_in_a_pool_that_would_not_hold_it_whole(random: Random, depth: int) -> None:
    """3,000 positions take 188 blocks where all are seen and 34 where 512 are; not 6 · 188."""
    setup = Setup(block_size=16, windows=GEMMA, tokens=256, depth=depth)
    needed = blocks_for(GEMMA, 3000, 16)
    assert needed == 188 + 5 * 33
    serving = Serving(replace(setup, blocks=needed + 5 * 16 * depth))
    serving.submit(request("long", prompt(random, 2960), 41))
    most = 0
    while not serving.scheduler.idle:
        serving.step()
        most = max(most, serving.scheduler.manager.pool.owned)
    serving.assert_at_rest()
    assert most <= needed + 5 * 16 * depth < 0.6 * 6 * 188
    assert serving.scheduler.counters.preemptions == 0


def test_a_long_run_in_a_window_takes_no_more_than_the_window(random: Random) -> None:
    """2,000 tokens through 6 blocks of 16, four of which hold the window of 64."""
    serving = Serving(Setup(blocks=6, block_size=16, windows=(64,), cached=False))
    serving.submit(request("long", prompt(random, 5), 2000))
    most = 0
    while not serving.scheduler.idle:
        serving.step()
        most = max(most, serving.scheduler.manager.pool.owned)
    ending = serving.endings["long"]
    assert isinstance(ending, Finished)
    assert most == ending.receipt.peak_blocks == 5
    serving.assert_at_rest()


# --- what fits


def test_what_never_fits_is_refused_and_what_just_fits_is_served(random: Random) -> None:
    """In steps larger than the pool has room for: chunks are cut to what fits beside the window."""
    for positions in (30, 64, 100):
        needed = blocks_for(SYNTHETIC, positions, 4)
        for blocks in (needed - 1, needed, needed + 1, needed + 3):
            setup = Setup(blocks=blocks, block_size=4, windows=SYNTHETIC, tokens=500)
            serving = Serving(replace(setup, cached=random.random() < 0.5))
            serving.submit(request("a", prompt(random, positions - 5), 6))
            assert isinstance(serving.endings.get("a"), Refused) == (blocks < needed)
            serving.finish()
            serving.submit(request("b", prompt(random, 9), 3))
            serving.finish()


@pytest.mark.parametrize(("admission", "held"), [("full", (25, 8, 12)), ("chunked", (2, 2, 2))])
def test_a_sliding_group_reserves_its_window_and_a_chunk(
    random: Random, admission: str, held: tuple[int, ...]
) -> None:
    """Of 100 positions in chunks of 8: all, or 8 + 8 and 24 + 8 positions and what straddles."""
    setup = Setup(blocks=60, block_size=4, windows=SYNTHETIC, tokens=8, admission=admission)
    serving = Serving(setup)
    serving.submit(request("long", prompt(random, 100), 3))
    serving.step()
    (sequence,) = serving.scheduler.running
    found = tuple(len(list(table.live())) for table in sequence.tables)
    assert all(count <= bound for count, bound in zip(found, held, strict=True))
    assert found[0] == held[0]
    serving.finish()


# --- prefix hits


def test_a_hit_needs_only_what_the_window_reaches(random: Random) -> None:
    """The next turn of a talk goes on where the last one ended, though the head is gone."""
    serving = Serving(Setup(blocks=60, block_size=4, windows=(None, 8)))
    first = prompt(random, 30)
    serving.submit(request("one", first, 11))
    serving.finish()
    cache = serving.scheduler.manager.cache
    assert cache is not None
    sliding = {block: node for block, (node, group) in cache.published().items() if group == 1}
    talk = (*first, *serving.tokens["one"])
    manager = serving.scheduler.manager
    for block, node in sliding.items():
        if node not in last_nodes(cache, talk, 2):
            forget(serving, block)
    assert sum(group for _, group in cache.published().values()) == 2
    serving.submit(request("two", (*talk, *prompt(random, 6)), 5))
    serving.step()
    found = admitted(serving, "two")
    assert (found.cached_tokens, found.blocks_found) == (40, 10 + 2)
    (sequence,) = serving.scheduler.running
    assert sequence.tables[1].blocks[:8] == (ABSENT,) * 8
    assert ABSENT not in sequence.tables[0].blocks
    serving.finish()
    assert manager.pool.available == manager.pool.total


def last_nodes(cache: object, tokens: tuple[int, ...], count: int) -> list[object]:
    """The nodes of the last whole blocks of what has been computed of `tokens`."""
    nodes = {node for node, _ in cache.published().values()}
    chain = [node for node in nodes if tokens[len(path(node)) - 4 : len(path(node))] == node.tokens]
    return sorted(chain, key=lambda node: len(path(node)))[-count:]


def path(node: object) -> tuple[int, ...]:
    before = path(node.parent) if hasattr(node.parent, "tokens") else ()
    return (*before, *node.tokens)


def forget(serving: Serving, block: int) -> None:
    """As if the block had been evicted."""
    from octavo.core.prefix_cache import Fate

    manager = serving.scheduler.manager
    manager._forget([block], Fate("evicted", "", 0.0, 0))
    manager.pool.drop([block])


@pytest.mark.parametrize("lost", range(10))
def test_a_hole_in_a_window_shortens_the_hit(random: Random, lost: int) -> None:
    """The longest prefix is found whose window is whole: before the hole, or well behind it."""
    serving = Serving(Setup(blocks=60, block_size=4, windows=(None, 8)))
    tokens = prompt(random, 41)
    serving.submit(request("one", tokens, 1))
    serving.finish()
    cache = serving.scheduler.manager.cache
    assert cache is not None
    (hole,) = (
        block
        for block, (node, group) in cache.published().items()
        if group == 1 and len(path(node)) == 4 * lost + 4
    )
    forget(serving, hole)
    serving.submit(request("two", tokens, 3))
    serving.finish()
    assert admitted(serving, "two").cached_tokens == (40 if lost < 8 else 4 * lost)


def test_a_prompt_that_leaves_another_in_the_middle_of_a_block_copies_it(random: Random) -> None:
    serving = Serving(Setup(blocks=60, block_size=4, windows=(None, 6)))
    tokens = prompt(random, 30)
    serving.submit(request("one", tokens, 1))
    serving.finish()
    serving.submit(request("two", (*tokens[:22], 91, 92, 93), 4))
    serving.finish()
    assert admitted(serving, "two").cached_tokens == 22
    assert sum(len(plan.copies) for plan in serving.plans) == 2


def test_a_long_answer_does_not_drive_others_out_of_the_cache(random: Random) -> None:
    """What it gives back is evicted before the prompts that others may come with again."""
    serving = Serving(Setup(blocks=24, block_size=4, windows=(None, 8), tokens=99))
    system = prompt(random, 16)
    serving.submit(request("before", (*system, 90), 1))
    serving.finish()
    serving.submit(request("long", prompt(random, 5), 40))
    serving.finish()
    serving.submit(request("after", (*system, 91), 1))
    serving.finish()
    assert admitted(serving, "after").cached_tokens == 16


# --- branches


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("cached", [True, False])
def test_branches_share_the_window_of_their_prompt(
    random: Random, depth: int, cached: bool
) -> None:
    """The others start from the newest position that the first one computed."""
    for length in range(30, 38):
        setup = Setup(blocks=80, block_size=4, windows=(None, 8), depth=depth, cached=cached)
        serving = Serving(setup)
        serving.submit(request("a", prompt(random, length), 20, branches=3, sampling=DRAWN))
        serving.finish()
        assert all(serving.of(Admitted, f"a#{n}")[0].cached_tokens == length - 1 for n in (1, 2))


def test_a_parent_that_has_gone_on_is_no_parent_any_more(random: Random) -> None:
    """With one row the branches run in turn. Without a cache each computes the prompt."""
    for cached, tokens in ((True, 29), (False, 0)):
        setup = Setup(blocks=80, block_size=4, windows=(8,), sequences=2, cached=cached)
        serving = Serving(setup)
        serving.submit(request("other", prompt(random, 3), 9))
        serving.submit(request("a", prompt(random, 30), 30, branches=2, sampling=DRAWN))
        serving.finish()
        assert admitted(serving, "a#1").cached_tokens >= tokens - (tokens % 4)


def test_a_session_may_end_before_it_computed_anything(random: Random) -> None:
    """All but the last of 13 tokens is found, with what position 12 sees; then the caller ends it.
    Who goes on with all 13 does so there, who asks for 12 again computes what is not held."""
    serving = Serving(Setup(blocks=20, block_size=4, windows=(None, 5)))
    tokens = prompt(random, 13)
    serving.submit(request("warm", tokens, 1))
    serving.finish()
    serving.submit(request("a", tokens, 5, keep=True))
    serving.launch()
    serving.cancel("a", reason="stop")
    (hold,) = serving.scheduler.holds.sessions
    assert [table.first for table in hold.tables] == [0, 2]
    serving.finish()
    serving.flush()
    for count, shared in ((13, 12), (12, 0)):
        serving.submit(request(f"after {count}", tokens[:count], 3, after="a"))
        serving.finish()
        assert admitted(serving, f"after {count}").cached_tokens == shared
