"""Holds keep blocks for requests to come, and never stand in anybody's way."""

from random import Random

import pytest
from tests.core.serving import DRAWN, Serving, Setup, prompt
from tests.core.test_faults import fates_of, finished, request

from octavo.core.events import (
    Admitted,
    Deferred,
    HoldDropped,
    HoldExpired,
    Pinned,
    PinRefused,
    Preempted,
    Refused,
)
from octavo.core.prefix_cache import Fate
from octavo.core.request import Pin
from octavo.simulate.oracle import answer_alone


@pytest.fixture
def random(seed: int) -> Random:
    return Random(seed)


def held(serving: Serving) -> list[str]:
    return [hold.id for hold in serving.scheduler.holds]


def copies(serving: Serving) -> int:
    return sum(len(plan.copies) for plan in serving.plans)


# --- sessions


def kept(serving: Serving, name: str, tokens: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Serve a request whose answer is held; returns the tokens that have KV then."""
    serving.submit(request(name, tokens, max_tokens, keep=True))
    serving.finish()
    return (*tokens, *serving.tokens[name])[:-1]


@pytest.mark.parametrize("cached", [True, False])
def test_a_fork_costs_no_block_until_it_diverges_and_then_one_copy(
    random: Random, cached: bool
) -> None:
    """35 + 5 − 1 positions are held in 10 blocks; each of 3 branches adds what it writes."""
    serving = Serving(Setup(block_size=4, cached=cached))
    pool = serving.scheduler.manager.pool
    tokens = kept(serving, "trunk", prompt(random, 35), 4)
    assert pool.owned == pool.yielding == 10
    tails = [prompt(random, 2) for _ in range(3)]
    serving.submit(
        *(request(f"b{n}", (*tokens, *tail), 3, after="trunk") for n, tail in enumerate(tails))
    )
    assert pool.owned == 10
    serving.step()
    assert [admitted.parent for admitted in serving.of(Admitted)[1:]] == ["trunk"] * 3
    assert [admitted.cached_tokens for admitted in serving.of(Admitted)[1:]] == [38] * 3
    assert pool.owned == 10 + 3
    assert copies(serving) == 3
    serving.finish()
    assert pool.owned == pool.yielding == 10
    assert serving.scheduler.counters.tokens_computed == 35 + 3 + 3 * (2 + 2)
    serving.drop("trunk")
    assert pool.owned == 0
    assert pool.cached == (9 + 3 if cached else 0)


def test_a_session_goes_on_and_on_without_computing_anything_twice(random: Random) -> None:
    serving = Serving(Setup(block_size=4, cached=False))
    tokens = prompt(random, 10)
    for turn in range(4):
        name, before = f"t{turn}", f"t{turn - 1}"
        serving.submit(request(name, tokens, 5, keep=True, after=before if turn else None))
        serving.finish()
        serving.drop(before)
        tokens = (*tokens, *serving.tokens[name], *prompt(random, 3))
    assert serving.scheduler.counters.tokens_computed == 10 + 4 * (5 - 1) + 3 * (1 + 3)
    assert serving.scheduler.holds.sessions[0].id == "t3"
    assert len(serving.scheduler.holds) == 1


def test_what_was_held_is_shared_as_far_as_the_prompt_begins_alike(random: Random) -> None:
    serving = Serving(Setup(block_size=4, cached=False))
    tokens = kept(serving, "a", prompt(random, 9), 6)
    for upto in (14, 13, 8, 1, 0):
        name = f"b{upto}"
        serving.submit(request(name, (*tokens[:upto], 998, 999), 3, after="a"))
        serving.finish()
        (admitted,) = serving.of(Admitted, name)
        assert admitted.cached_tokens == upto
        assert finished(serving, name).receipt.cached_tokens == upto


@pytest.mark.parametrize("gone", ["never there", "dropped", "another salt"])
def test_without_its_hold_a_request_computes_its_prompt(random: Random, gone: str) -> None:
    serving = Serving(Setup(block_size=4, cached=False))
    tokens = kept(serving, "a", prompt(random, 9), 6)
    if gone == "dropped":
        serving.drop("a")
    after = "x" if gone == "never there" else "a"
    salt = "other" if gone == "another salt" else ""
    serving.submit(request("b", (*tokens, 991), 3, after=after, salt=salt))
    serving.finish()
    assert finished(serving, "b").receipt.cached_tokens == 0


@pytest.mark.parametrize(
    ("end", "holds"), [("length", 1), ("stop", 1), ("a stop string", 1), ("abort", 0), ("error", 0)]
)
def test_only_an_answer_that_ended_as_it_should_is_held(
    random: Random, end: str, holds: int
) -> None:
    serving = Serving(Setup(block_size=4))
    tokens = prompt(random, 9)
    wanted = request("a", tokens, 6, keep=True)
    stops = frozenset({answer_alone(wanted, 97)[2]}) if end == "stop" else frozenset()
    serving.submit(request("a", tokens, 6, keep=True, stop_token_ids=stops))
    serving.oracle.failing = {"a": 10} if end == "error" else {}
    if end in ("abort", "a stop string"):
        for _ in range(3):
            serving.step()
        serving.cancel("a", reason="abort" if end == "abort" else "stop")
    serving.finish()
    assert len(held(serving)) == holds
    assert serving.scheduler.manager.pool.owned == {"length": 4}.get(end, 3) * holds


def test_each_branch_is_held_under_its_own_name(random: Random) -> None:
    serving = Serving(Setup(block_size=4))
    tokens = prompt(random, 9)
    serving.submit(request("a", tokens, 6, keep=True, branches=3, sampling=DRAWN))
    serving.finish()
    assert sorted(held(serving)) == ["a", "a#1", "a#2"]
    assert serving.scheduler.manager.pool.owned == 2 + 3 * 2
    for name in held(serving):
        tail = (*tokens, *serving.tokens[name], 995)
        follower = f"after {name}".replace("#", " ")
        serving.submit(request(follower, tail, 2, after=name))
        serving.finish()
        assert finished(serving, follower).receipt.cached_tokens == 14


def test_a_name_used_again_holds_the_later_answer(random: Random) -> None:
    serving = Serving(Setup(block_size=4))
    kept(serving, "a", prompt(random, 9), 6)
    serving.endings.clear()
    serving.tokens.clear()
    tokens = kept(serving, "a", prompt(random, 5), 2)
    (hold,) = serving.scheduler.holds
    assert hold.tokens == tokens


# --- who yields


def test_holds_go_before_anyone_is_preempted_the_least_used_first(random: Random) -> None:
    """Each holds 2 of 8 blocks; `c` was held last, `a` is used again."""
    serving = Serving(Setup(blocks=8, block_size=4, watermark_blocks=0, cached=False))
    tokens = {name: kept(serving, name, prompt(random, 6), 2) for name in "abc"}
    serving.submit(request("again", (*tokens["a"], 997), 1, after="a"))
    serving.finish()
    assert held(serving) == ["b", "c", "a"]
    serving.submit(request("big", prompt(random, 11), 14))
    while "c" in held(serving):
        serving.step()
    assert held(serving) == ["a"]
    dropped = serving.of(HoldDropped)
    assert dropped == [HoldDropped("b", "big", 2), HoldDropped("c", "big", 2)]
    serving.finish()
    assert not serving.of(Preempted)
    assert finished(serving, "again").receipt.cached_tokens == 7


def test_no_hold_goes_for_a_request_that_cannot_start_anyway(random: Random) -> None:
    serving = Serving(Setup(blocks=10, block_size=4, watermark_blocks=0, cached=False))
    kept(serving, "a", prompt(random, 6), 2)
    serving.submit(request("runs", prompt(random, 22), 7))
    serving.step()
    serving.submit(request("waits", prompt(random, 20), 2))
    serving.step()
    assert serving.of(Deferred, "waits")[0].missing == 3
    assert held(serving) == ["a"]
    serving.finish()


def test_what_a_request_goes_on_from_yields_to_it_last_and_it_still_runs(random: Random) -> None:
    """The pool is full of two holds: the other one goes, then its own; both times it gets on."""
    serving = Serving(Setup(blocks=8, block_size=4, watermark_blocks=0, cached=False))
    tokens = kept(serving, "own", prompt(random, 15), 1)
    kept(serving, "other", prompt(random, 15), 1)
    serving.submit(request("b", (*tokens, *prompt(random, 3)), 3, after="own"))
    serving.step()
    assert serving.of(HoldDropped) == [HoldDropped("other", "b", 4)]
    (admitted,) = serving.of(Admitted, "b")
    assert admitted.cached_tokens == 15
    serving.finish()
    serving.submit(request("c", (*tokens, *prompt(random, 12)), 3, after="own"))
    serving.finish()
    assert [decision.name for decision in serving.of(HoldDropped)] == ["other", "own"]


def test_a_hold_whose_blocks_are_all_in_use_stays(random: Random) -> None:
    serving = Serving(Setup(blocks=6, block_size=4, watermark_blocks=0, cached=False))
    tokens = kept(serving, "a", prompt(random, 7), 2)
    serving.submit(request("b", (*tokens, 993), 17, after="a"))
    serving.finish()
    assert not serving.of(HoldDropped)
    assert held(serving) == ["a"]


# --- pins


def test_a_pin_outlives_eviction_until_its_time_is_over_and_a_hit_renews_it(
    random: Random,
) -> None:
    serving = Serving(Setup(blocks=8, block_size=4, pinned_blocks=4, watermark_blocks=0))
    tokens = prompt(random, 10)
    serving.submit(request("a", tokens, 1, pins=(Pin(9, 10.0),)))
    serving.finish()
    pool = serving.scheduler.manager.pool
    flood = iter(request(f"f{n}", prompt(random, 22), 1) for n in range(9))

    def evict() -> None:
        serving.submit(next(flood))
        serving.finish()

    evict()
    (pinned,) = serving.of(Pinned)
    assert (pinned.request_id, pinned.blocks, pool.yielding) == ("a", 2, 2)
    assert pinned.until_s == serving.now - 1 + 10
    serving.now = pinned.until_s - 1.5
    serving.submit(request("hit", (*tokens[:8], 991, 992), 1))
    serving.finish()
    assert finished(serving, "hit").receipt.cached_tokens == 8
    serving.now = pinned.until_s + 5
    evict()
    assert not serving.of(HoldExpired)
    serving.now += 10
    evict()
    assert serving.of(HoldExpired) == [HoldExpired(pinned.name, 2)]
    for _ in range(3):
        evict()
    serving.submit(request("miss", (*tokens[:8], 991, 992), 1))
    serving.finish()
    assert finished(serving, "miss").receipt.cached_tokens == 0
    assert pool.owned == 0


def test_a_pin_over_the_quota_is_refused_and_those_granted_stay(random: Random) -> None:
    serving = Serving(Setup(block_size=4, pinned_blocks=3))
    start = prompt(random, 8)
    prompts = {
        "a": start,
        "b": prompt(random, 8),
        "longer": (*start, *prompt(random, 4)),
        "short": prompt(random, 3),
    }
    for name, tokens in prompts.items():
        serving.submit(request(name, tokens, 2, pins=(Pin(12, 99.0),)))
        serving.finish()
    assert [decision.request_id for decision in serving.of(Pinned)] == ["a", "longer"]
    assert serving.of(PinRefused) == [
        PinRefused("b", "quota", 2, 1),
        PinRefused("short", "tokens", 0, 1),
    ]
    assert serving.scheduler.holds.pinned_blocks == 3


def test_a_pin_asked_for_again_has_the_longer_time(random: Random) -> None:
    serving = Serving(Setup(block_size=4, pinned_blocks=3))
    tokens = prompt(random, 9)
    for name, ttl_s in (("a", 10.0), ("b", 100.0), ("c", 1.0)):
        serving.submit(request(name, tokens, 3, pins=(Pin(8, ttl_s),)))
        serving.finish()
    (hold,) = serving.scheduler.holds
    assert {decision.name for decision in serving.of(Pinned)} == {hold.id}
    assert hold.ttl_s == 100.0
    serving.drop(hold.id)
    assert serving.scheduler.manager.pool.owned == serving.scheduler.holds.pinned_blocks == 0


def test_each_pin_of_a_prompt_ends_in_its_own_time(random: Random) -> None:
    """Who shares the shorter beginning alone keeps that alive, and not the longer one."""
    serving = Serving(Setup(block_size=4, pinned_blocks=9))
    tokens = prompt(random, 14)
    pins = (Pin(3, 9.0), Pin(4, 50.0), Pin(12, 50.0))
    serving.submit(request("a", tokens, 1, pins=pins, branches=2))
    serving.finish()
    assert [decision.blocks for decision in serving.of(Pinned)] == [1, 3]
    assert [decision.limit for decision in serving.of(PinRefused)] == ["tokens"]
    assert serving.scheduler.holds.pinned_blocks == 3
    serving.now += 40
    serving.submit(request("shares", (*tokens[:4], *prompt(random, 4)), 1))
    serving.finish()
    serving.now += 40
    serving.submit(request("later", prompt(random, 4), 1))
    serving.finish()
    assert serving.scheduler.holds.pinned_blocks == 1


def test_a_pin_yields_last_and_only_when_nothing_else_does(random: Random) -> None:
    serving = Serving(Setup(blocks=8, block_size=4, watermark_blocks=0, pinned_blocks=4))
    serving.submit(request("late", prompt(random, 8), 1, pins=(Pin(8, 90.0),)))
    serving.submit(request("soon", prompt(random, 8), 1, pins=(Pin(8, 50.0),)))
    serving.finish()
    kept(serving, "session", prompt(random, 8), 1)
    serving.submit(request("big", prompt(random, 30), 2))
    serving.finish()
    names = {decision.request_id: decision.name for decision in serving.of(Pinned)}
    gone = [decision.name for decision in serving.of(HoldDropped)]
    assert gone == ["session", names["soon"], names["late"]]


@pytest.mark.parametrize("fields", [{"use_cache": False}, {}])
def test_a_pin_without_the_cache_is_refused(random: Random, fields: dict[str, bool]) -> None:
    serving = Serving(Setup(cached="use_cache" in fields))
    serving.submit(request("a", prompt(random, 9), 3, pins=(Pin(8, 9.0),), **fields))
    ending = serving.endings["a"]
    assert isinstance(ending, Refused)
    assert ending.limit == "pin"


# --- flush


def test_after_a_flush_nothing_computed_before_is_found(random: Random) -> None:
    """Neither what was cached, nor pinned, nor what a running request computes on top of it."""
    serving = Serving(Setup(block_size=4, pinned_blocks=9))
    tokens = prompt(random, 16)
    serving.submit(request("cached", tokens, 1, pins=(Pin(8, 99.0),)))
    serving.finish()
    serving.submit(request("runs", (*tokens, *prompt(random, 8)), 9))
    serving.step()
    serving.flush()
    pool = serving.scheduler.manager.pool
    assert (pool.cached, pool.yielding) == (0, 0)
    flushed = Fate("flushed", "", serving.now, len(serving.plans))
    assert fates_of(serving, tokens) == [flushed] * 4
    serving.finish()
    assert pool.cached == 0
    for cached in (0, 15):
        name = f"again {cached}"
        serving.submit(request(name, tokens, 1))
        serving.finish()
        assert finished(serving, name).receipt.cached_tokens == cached
    assert fates_of(serving, tokens) == [None] * 4


def test_a_session_survives_a_flush_but_publishes_nothing(random: Random) -> None:
    serving = Serving(Setup(block_size=4))
    tokens = kept(serving, "a", prompt(random, 9), 8)
    serving.flush()
    serving.submit(request("b", (*tokens, *prompt(random, 8)), 6, after="a", keep=True))
    serving.finish()
    assert finished(serving, "b").receipt.cached_tokens == 16
    serving.drop("a")
    serving.drop("b")
    pool = serving.scheduler.manager.pool
    assert pool.available == pool.total
    assert pool.cached == 0


def test_one_preempted_after_a_flush_computes_all_again_and_publishes(random: Random) -> None:
    serving = Serving(Setup(blocks=10, block_size=4, watermark_blocks=0))
    serving.submit(request("low", prompt(random, 9), 12, priority=1))
    serving.step()
    serving.flush()
    serving.submit(request("high", prompt(random, 30), 2))
    serving.finish()
    assert serving.of(Preempted, "low")
    assert serving.scheduler.manager.pool.cached > 0


# --- what is counted


def test_hits_and_queries_count_neither_recompute_nor_those_who_opt_out(random: Random) -> None:
    serving = Serving(Setup(blocks=10, block_size=4, watermark_blocks=0))
    counters = serving.scheduler.counters
    first = prompt(random, 9)
    serving.submit(request("a", first, 12, priority=1))
    serving.step()
    assert (counters.prefix_tokens_queried, counters.prefix_tokens_hit) == (9, 0)
    serving.submit(request("out", first, 1, use_cache=False))
    serving.step()
    assert (counters.prefix_tokens_queried, counters.prefix_tokens_hit) == (9, 0)
    serving.submit(request("high", prompt(random, 30), 2))
    serving.finish()
    assert counters.preemptions == 1
    assert (counters.prefix_tokens_queried, counters.prefix_tokens_hit) == (9 + 30, 0)
    serving.submit(request("hit", first, 1))
    serving.finish()
    assert (counters.prefix_tokens_queried, counters.prefix_tokens_hit) == (9 + 30 + 9, 8)


@pytest.mark.parametrize("length", [9, 11])
def test_hits_and_queries_count_a_prompt_once_for_all_its_answers(
    random: Random, length: int
) -> None:
    """Also where the cache has as much of it as a sibling that runs: all its whole blocks."""
    serving = Serving(Setup(block_size=4))
    counters = serving.scheduler.counters
    serving.submit(request("a", prompt(random, length), 6, branches=4, sampling=DRAWN))
    serving.finish()
    assert (counters.prefix_tokens_queried, counters.prefix_tokens_hit) == (length, 0)


def test_where_nothing_is_cached_nothing_is_counted(random: Random) -> None:
    serving = Serving(Setup(cached=False))
    serving.submit(request("a", prompt(random, 9), 2))
    serving.finish()
    assert serving.scheduler.counters.prefix_tokens_queried == 0


def test_a_pin_goes_for_whom_a_victim_was_swapped(random: Random) -> None:
    """The one block of the victim is pinned: it is free once the pin is gone and it has moved."""
    serving = Serving(
        Setup(
            blocks=3,
            block_size=2,
            watermark_blocks=0,
            pinned_blocks=1,
            host_blocks=9,
            preemption="swap",
        )
    )
    serving.submit(request("a", prompt(random, 4), 2))
    serving.submit(request("b", prompt(random, 2), 2, pins=(Pin(2, 99.0),)))
    serving.step()
    plan = serving.step()
    kinds = [(type(one), getattr(one, "limit", None)) for one in plan.decisions]
    assert kinds[:3] == [(Preempted, None), (HoldDropped, None), (Deferred, "in_transfer")]
    serving.finish()
