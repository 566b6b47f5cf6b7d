"""Whose time is over, seen by the scheduler without a look at everybody."""

from dataclasses import replace
from random import Random

import pytest
from tests.core.serving import Serving, Setup

from octavo.core.events import Finished
from octavo.core.request import Request


def request(name: str, **fields: object) -> Request:
    return Request(**{"id": name, "prompt": (1, 2, 3), "max_tokens": 4} | fields)  # type: ignore[arg-type]


def expire(serving: Serving) -> tuple[str, ...]:
    """What an engine does before each step."""
    overdue = serving.scheduler.overdue(serving.now)
    for name in overdue:
        serving.cancel(name, reason="timeout")
    return overdue


def waiting(seconds: float | None, **setup: int) -> Serving:
    serving = Serving(Setup(**({"sequences": 1} | setup)))  # type: ignore[arg-type]
    serving.set_limits(waiting_s=seconds)
    return serving


def test_who_waits_too_long_is_over_time() -> None:
    serving = waiting(2.0)
    serving.submit(request("runs", max_tokens=9), request("waits"), request("many", branches=3))
    serving.step()
    serving.submit(request("later"))
    assert expire(serving) == ()
    serving.step()
    assert expire(serving) == ("waits", "many")
    assert expire(serving) == ()
    serving.step()
    assert expire(serving) == ("later",)
    serving.finish()
    for name in ("waits", "many", "many#1", "many#2", "later"):
        ended = serving.endings[name]
        assert isinstance(ended, Finished)
        assert (ended.reason, ended.receipt.admitted_s) == ("timeout", None)
    assert serving.endings["runs"].reason == "length"  # type: ignore[union-attr]


def test_whoever_ran_once_may_wait_again() -> None:
    """Preempted, or from another engine: only a first admission has to come in time."""
    serving = waiting(2.0, sequences=2, blocks=4, block_size=4, watermark_blocks=0)
    serving.submit(request("first", max_tokens=12), request("second", max_tokens=9))
    while not serving.endings:
        serving.step()
        assert expire(serving) == ()
    victim = serving.scheduler.waiting
    assert [one.id for one in victim] == ["second"], "the case is not made"
    serving = waiting(2.0)
    serving.submit(request("runs", max_tokens=9))
    serving.step()
    serving.submit(request("again", emitted=(7,)))
    serving.finish()
    assert serving.endings["again"].reason == "length"  # type: ignore[union-attr]


def test_a_timeout_holds_wherever_the_request_is() -> None:
    serving = waiting(None)
    serving.submit(request("runs", max_tokens=20, timeout_s=3.0), request("waits", timeout_s=1.0))
    serving.step()
    assert expire(serving) == ("waits",)
    serving.step()
    serving.step()
    assert expire(serving) == ("runs",)
    ended = serving.endings["runs"]
    assert isinstance(ended, Finished)
    assert (ended.reason, ended.receipt.completion_tokens) == ("timeout", 3)
    assert serving.scheduler.idle


def test_a_timeout_holds_for_branches_after_the_first_has_ended() -> None:
    serving = waiting(None, sequences=4)
    serving.submit(request("a", max_tokens=20, timeout_s=3.0, branches=2))
    serving.step()
    serving.step()
    serving.cancel("a", 0)
    serving.step()
    assert expire(serving) == ("a",)
    assert serving.endings["a#1"].reason == "timeout"  # type: ignore[union-attr]


def test_a_limit_that_is_set_holds_for_those_that_wait() -> None:
    serving = waiting(None)
    serving.submit(request("runs", max_tokens=20), request("waits"))
    for _ in range(5):
        serving.step()
    assert expire(serving) == ()
    serving.set_limits(waiting_s=100.0)
    assert expire(serving) == ()
    serving.set_limits(waiting_s=5.0)
    assert expire(serving) == ("waits",)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_time_that_is_over_at_once(timeout_s: float) -> None:
    serving = waiting(None)
    serving.submit(request("a", timeout_s=timeout_s))
    assert expire(serving) == ("a",)


def test_nobody_is_missed_and_nobody_is_early(seed: int) -> None:
    """The same as a look at everybody each time, with limits that change."""
    random = Random(seed)
    serving = Serving(Setup(sequences=2, blocks=30, block_size=2))
    arrived: dict[str, tuple[float, float]] = {}
    expired: set[str] = set()
    for number in range(400):
        if random.random() < 0.5:
            name = f"r{number}"
            timeout_s = random.choice([None, None, 1.0, 4.0, 9.5])
            arrived[name] = serving.now, float("inf") if timeout_s is None else timeout_s
            answers = random.choice([1, 1, 3])
            length = random.randint(1, 8)
            serving.submit(request(name, timeout_s=timeout_s, branches=answers, max_tokens=length))
        if random.random() < 0.1:
            serving.set_limits(waiting_s=random.choice([None, 2.0, 5.0]))
        limit_s = serving.scheduler.limits.waiting_s
        expected = {
            one.request.id
            for one in serving.scheduler.roster
            if serving.now >= sum(arrived[one.request.id])
            or (
                limit_s is not None
                and one.ticket is None
                and one.number == 0
                and serving.now >= arrived[one.request.id][0] + limit_s
            )
        }
        assert set(expire(serving)) == expected
        expired |= expected
        serving.step()
    assert len(expired) > 20
    serving.finish()


def test_nothing_is_due_without_deadlines() -> None:
    serving = waiting(None)
    serving.submit(*(request(f"r{number}") for number in range(5)))
    assert replace(request("a"), timeout_s=None) == request("a")
    serving.now = 1e9
    assert expire(serving) == ()
