"""Equal beginnings that arrive together are computed once, and nobody waits for ever."""

from random import Random

import pytest
from tests.core.serving import Serving, Setup, prompt
from tests.core.test_faults import finished, request

from octavo.core.events import Admitted, Deferred, Preempted
from octavo.core.pace import Pace
from octavo.core.policy import worth_following


@pytest.fixture
def random(seed: int) -> Random:
    return Random(seed)


@pytest.fixture(autouse=True)
def _no_step_costs_more_than_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock of these tests says, a token is worth waiting for."""
    monkeypatch.setattr(Pace, "base_s", 0.0)


def follows(serving: Serving) -> list[tuple[str, int, str]]:
    return [
        (decision.request_id, decision.missing, decision.behind)
        for decision in serving.of(Deferred)
        if decision.limit == "prefix"
    ]


def test_equal_prompts_that_arrive_together_are_computed_once(random: Random) -> None:
    """13 tokens in blocks of 4: three blocks are shared, and the rest is each one's own."""
    serving = Serving(Setup(block_size=4))
    first = prompt(random, 13)
    serving.submit(*(request(name, first, 3) for name in "abcd"))
    serving.step()
    assert follows(serving) == [("b", 12, "a"), ("c", 12, "a"), ("d", 12, "a")]
    assert [sequence.id for sequence in serving.scheduler.running] == ["a"]
    assert [sequence.id for sequence in serving.scheduler.waiting] == ["b", "c", "d"]
    serving.step()
    assert len(serving.scheduler.running) == 4
    serving.finish()
    assert serving.scheduler.counters.tokens_computed == 13 + 3 * 1 + 4 * 2
    assert [finished(serving, name).receipt.cached_tokens for name in "abcd"] == [0, 12, 12, 12]


def test_a_follower_waits_for_what_is_alike_and_no_longer(random: Random) -> None:
    """24 of 80 tokens are alike, 5 of them were cached; the second chunk is not waited for."""
    serving = Serving(Setup(block_size=4, tokens=64, depth=3))
    start = prompt(random, 24)
    serving.submit(request("warm", start[:5], 1))
    serving.finish()
    serving.submit(request("a", (*start, *prompt(random, 58)), 3))
    serving.submit(request("b", (*start, *prompt(random, 5)), 3))
    serving.launch()
    assert not follows(serving)
    serving.launch()
    assert follows(serving) == [("b", 20, "a")]
    serving.land()
    serving.launch()
    assert serving.of(Admitted, "b")
    serving.finish()
    assert finished(serving, "b").receipt.cached_tokens == 24


def test_those_behind_a_follower_go_on(random: Random) -> None:
    serving = Serving(Setup(block_size=4, tokens=30))
    first = prompt(random, 12)
    serving.submit(*(request(name, first, 3) for name in "ab"), request("c", prompt(random, 6), 3))
    serving.step()
    assert [sequence.id for sequence in serving.scheduler.running] == ["a", "c"]
    serving.finish()
    order = [decision.request_id for decision in serving.of(Admitted)]
    assert order == ["a", "c", "b"]


def test_a_follower_of_followers_gets_the_longest_beginning(random: Random) -> None:
    """c begins as b does, and b as a does: each waits for the one before."""
    serving = Serving(Setup(block_size=4, tokens=64))
    one, two = prompt(random, 8), prompt(random, 8)
    serving.submit(
        request("a", (*one, 1), 9),
        request("b", (*one, *two, 1), 9),
        request("c", (*one, *two, 2), 9),
    )
    serving.finish()
    assert follows(serving) == [("b", 8, "a"), ("c", 8, "a"), ("c", 8, "b")]
    assert finished(serving, "c").receipt.cached_tokens == 16


@pytest.mark.parametrize("end", ["cancelled", "failed", "preempted", "flushed"])
def test_when_the_leader_is_gone_the_first_of_its_followers_leads(random: Random, end: str) -> None:
    serving = Serving(Setup(blocks=14, block_size=4, depth=2, watermark_blocks=0))
    first = prompt(random, 30)
    serving.submit(*(request(name, first, 3, priority=1) for name in "abc"))
    serving.launch()
    assert follows(serving) == [("b", 28, "a"), ("c", 28, "a")]
    if end == "cancelled":
        serving.cancel("a")
    elif end == "failed":
        serving.oracle.failing = {"a": 9}
        serving.land()
    elif end == "flushed":
        serving.flush()
    else:
        serving.submit(request("high", prompt(random, 40), 3))
        serving.launch()
    assert not serving.scheduler.followers
    serving.finish()
    leaders = [leader for follower, _, leader in follows(serving) if follower == "c"]
    assert leaders == (["a", "a"] if end == "preempted" else ["a", "b"])


def test_nobody_waits_for_one_who_comes_after(random: Random) -> None:
    """One of a higher class computes for itself what one of a lower class has begun."""
    serving = Serving(Setup(block_size=4, depth=2))
    first = prompt(random, 30)
    serving.submit(request("low", first, 3, priority=1))
    serving.launch()
    serving.submit(request("high", first, 3))
    serving.launch()
    assert not follows(serving)
    assert [sequence.id for sequence in serving.scheduler.running] == ["low", "high"]
    serving.finish()


@pytest.mark.parametrize("fields", [{"salt": "other"}, {"use_cache": False}])
def test_only_what_may_be_shared_is_waited_for(random: Random, fields: dict[str, object]) -> None:
    for order in (0, 1):
        serving = Serving(Setup(block_size=4))
        pair = [request("a", prompt(random, 13), 3), request("b", prompt(random, 13), 3, **fields)]
        serving.submit(pair[order], pair[1 - order])
        serving.step()
        assert not follows(serving)
        serving.finish()


def test_without_the_cache_nobody_follows(random: Random) -> None:
    serving = Serving(Setup(cached=False))
    first = prompt(random, 13)
    serving.submit(*(request(name, first, 3) for name in "ab"))
    serving.finish()
    assert not follows(serving)


def test_a_follower_counts_in_the_queue_and_can_be_cancelled(random: Random) -> None:
    serving = Serving(Setup(block_size=4, waiting=2, depth=2))
    first = prompt(random, 13)
    serving.submit(request("a", first, 3))
    serving.launch()
    serving.submit(request("b", first, 3), request("c", first, 3))
    serving.launch()
    assert len(follows(serving)) == 2
    serving.submit(request("d", first, 3))
    assert serving.endings["d"].limit == "waiting"
    serving.cancel("b")
    serving.submit(request("e", first, 3))
    serving.finish()
    assert finished(serving, "e").reason == "length"


def test_what_a_step_costs_before_its_first_token_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pace = Pace()
    for tokens in (10, 100) * 40:
        pace.observe(tokens, 1.0 + 0.01 * tokens)
    assert pace.base_s == pytest.approx(1.0)
    assert not worth_following(99, 200, 200, pace)
    assert worth_following(101, 200, 200, pace)
    assert worth_following(1, 201, 200, pace)
    assert not worth_following(0, 201, 200, pace)


def test_nobody_waits_for_one_who_came_back_and_publishes_nothing(random: Random) -> None:
    """`a` was flushed while it ran, swapped, and is back in the plan in which `b` could follow."""
    sizes = {"blocks": 4, "block_size": 4, "watermark_blocks": 0}
    serving = Serving(Setup(**sizes, host_blocks=9, preemption="swap"))
    tokens = prompt(random, 9)
    serving.submit(request("a", tokens, 6))
    serving.step()
    serving.flush()
    serving.submit(request("first", prompt(random, 13), 1, priority=-1))
    serving.step()
    assert serving.of(Preempted, "a")
    serving.submit(request("b", tokens, 1))
    serving.finish()
    assert not follows(serving)
