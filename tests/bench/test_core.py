"""The traffic that the core is measured with is what it says."""

import time
from itertools import accumulate, islice

import pytest

from octavo.bench.core import TRAFFIC, measure_pools, object_ns, scheduler_for


def test_decode_is_decode_and_mixed_is_mixed() -> None:
    demands: dict[str, list[int]] = {}
    for name, traffic in TRAFFIC.items():
        scheduler = scheduler_for(6)
        times = list(islice(traffic(scheduler), 40))
        assert len(times) == 40
        assert all(plan > 0 and commit > 0 for plan, commit in times)
        assert len(scheduler.running) >= 4
        demands[name] = [sequence.demand for sequence in scheduler.running]
        assert bool(scheduler.waiting) == (name == "mixed")
    assert set(demands["decode"]) == {1}


def test_pools_are_compared_step_by_step() -> None:
    decode, mixed = measure_pools(4, 1400, 4000, steps=5)
    assert (decode.traffic, mixed.traffic) == ("decode", "mixed")
    assert (decode.few, decode.many) == (1400, 4000)
    assert decode.times > 0


def test_a_visit_is_the_median_time_over_the_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = accumulate((0, 9_000, 7, 1_000, 7, 3_000))  # three rounds, with something between them
    monkeypatch.setattr(time, "process_time_ns", lambda: next(ticks))
    assert object_ns(objects=100, rounds=3) == 30
    assert next(ticks, None) is None


def test_a_visit_is_far_cheaper_than_a_plan() -> None:
    scheduler = scheduler_for(6)
    plan_us, _ = list(islice(TRAFFIC["decode"](scheduler), 20))[-1]
    assert 1 < object_ns(objects=100, rounds=5) < 1e3 * plan_us
