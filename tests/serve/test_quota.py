"""Quotas: what a minute allows, and what is beyond it."""

from collections.abc import Callable

import pytest

from octavo.errors import RateLimited
from octavo.serve.quota import Meter, Quota


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(meter: Meter) -> RateLimited:
    with pytest.raises(RateLimited) as caught, meter.request():
        pass
    return caught.value


def ask(meter: Meter, times: int) -> None:
    for _ in range(times):
        with meter.request():
            pass


def metered(clock: Callable[[], float], **quota: int) -> Meter:
    return Meter("alice", Quota(**quota), clock=clock)


def test_requests_a_minute() -> None:
    meter = metered(clock := Clock(), requests_per_minute=6)
    ask(meter, 6)
    error = refused(meter)
    assert error.retry_after_s == pytest.approx(10)
    assert str(error) == "the key 'alice' may send 6 requests a minute; try again in 10 s"
    clock.now += 9.9
    refused(meter)
    clock.now += 0.2
    ask(meter, 1)
    refused(meter)
    clock.now += 3600
    ask(meter, 6)
    refused(meter)


def test_tokens_a_minute() -> None:
    """A request that is longer than a minute's worth is answered; what follows waits for it."""
    meter = metered(clock := Clock(), tokens_per_minute=600)
    ask(meter, 100)
    meter.spend(599)
    ask(meter, 1)
    meter.spend(601)
    error = refused(meter)
    assert error.retry_after_s == pytest.approx(60.1)
    assert "600 tokens a minute" in str(error)
    clock.now += 60.2
    ask(meter, 1)


def test_requests_at_once() -> None:
    meter = metered(Clock(), max_concurrent=2)
    with meter.request(), meter.request():
        assert "2 requests under way" in str(refused(meter))
    with pytest.raises(ZeroDivisionError), meter.request():
        raise ZeroDivisionError
    ask(meter, 9)


def test_a_refused_request_is_not_counted() -> None:
    meter = metered(clock := Clock(), requests_per_minute=1, max_concurrent=1)
    with meter.request():
        refused(meter)
        clock.now += 60
        refused(meter)
    ask(meter, 1)


def test_no_quota_no_limit() -> None:
    meter = metered(Clock())
    meter.spend(10**9)
    ask(meter, 1000)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    meter = metered(clock := Clock(), requests_per_minute=1)
    ask(meter, 1)
    clock.now -= 500
    refused(meter)
    clock.now += 500
    refused(meter)
