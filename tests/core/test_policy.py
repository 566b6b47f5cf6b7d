"""Who goes first, who yields, and how much room a return needs."""

import pytest

from octavo.core import policy
from octavo.core.budget import Limits
from octavo.core.fairness import ServiceCounters
from octavo.core.pace import Pace
from octavo.core.policy import Circumstances
from octavo.core.prefix_cache import Context
from octavo.core.queue import Waiting
from octavo.core.request import Request
from octavo.core.sequence import Sequence


def circumstances(now: float = 0.0, highest: int = 0, **limits: object) -> Circumstances:
    """Those in which the highest class that is live is this one."""
    return policy.circumstances(
        now,
        Limits(sequences=4, tokens=64, **limits),
        [],
        priorities=[highest],
        service=ServiceCounters(),
        pace=Pace(),
    )


AT = circumstances()


def waiting(*sequences: Sequence) -> Waiting:
    queue = Waiting()
    for one in sequences:
        queue.add(one)
    return queue


def sequence(
    order: int, *, priority: int = 0, scheduled: int = 0, length: int = 5, arrived_s: float = 0.0
) -> Sequence:
    made = Sequence(
        Request(id=str(order), prompt=tuple(range(length)), max_tokens=9, priority=priority),
        order=order,
        context=Context(),
        block_size=4,
        groups=1,
        now=arrived_s,
    )
    made.admit(row=0, cached=scheduled, now=arrived_s)
    return made


def test_the_victim_is_the_latest_arrival_of_the_lowest_priority() -> None:
    early, late, low = sequence(1), sequence(3), sequence(2, priority=1)
    assert policy.victim_for(early, [early, late, low]) is low
    assert policy.victim_for(early, [early, late]) is late


def test_nobody_yields_to_one_who_ranks_below() -> None:
    early, late = sequence(1), sequence(2)
    assert policy.victim_for(late, [early, late]) is None
    assert policy.victim_for(late, []) is None


def test_only_lower_priorities_yield_to_a_request_that_waits() -> None:
    same, low, lowest = sequence(1), sequence(2, priority=1), sequence(3, priority=5)
    assert policy.yielding_to(sequence(9), [same, low, lowest], AT) == [lowest, low]


def test_decodes_are_served_first_and_take_turns() -> None:
    prompt = sequence(0)
    decodes = [sequence(order, scheduled=4) for order in (1, 2, 3)]
    decodes[0].last_served = 7
    decodes[1].last_served = 3
    decodes[2].last_served = 3
    demands = [(one, one.demand) for one in (prompt, *decodes)]
    order = [one for one, _ in policy.service_order(demands, AT)]
    assert order == [decodes[1], decodes[2], decodes[0], prompt]


def test_by_arrival_nobody_yields_whatever_the_priority() -> None:
    low, urgent = sequence(1, priority=9), sequence(2, priority=-9)
    by_arrival = circumstances(policy="fcfs")
    assert policy.yielding_to(urgent, [low], by_arrival) == []
    assert policy.first(waiting(urgent, low), by_arrival) is low
    assert policy.first(waiting(urgent, low), AT) is urgent
    assert policy.first(waiting(), AT) is None


def test_who_was_preempted_comes_before_those_of_its_class_that_never_ran() -> None:
    fresh, again, urgent = sequence(1), sequence(2), sequence(3, priority=-1)
    again.take_rank((0, 7))
    assert policy.first(waiting(fresh, again), AT) is again
    assert policy.first(waiting(fresh, again, urgent), circumstances(highest=-1)) is urgent


def test_a_class_is_worth_a_span_of_waiting() -> None:
    """Low priority 2 that came at 0 s, and high priority 0 that comes 100 s later."""
    low, high = sequence(1, priority=2), sequence(2, arrived_s=100.0)
    for now, aging_s, first in (
        (100.0, None, high),
        (100.0, 0.0, high),
        (100.0, 51.0, high),
        (100.0, 50.0, low),
    ):
        at = circumstances(now, aging_s=aging_s)
        assert policy.first(waiting(low, high), at) is first, aging_s


def test_nobody_climbs_above_those_that_are_live() -> None:
    """There, who came first goes first, whatever priority either had at the beginning."""
    low, high = sequence(1, priority=1, arrived_s=5.0), sequence(0, priority=0, arrived_s=0.0)
    at = circumstances(1000.0, aging_s=1.0)
    assert policy.class_of(low, at) == policy.class_of(high, at) == 0
    assert policy.first(waiting(low, high), at) is high


def test_waiting_gives_a_place_and_no_right_to_that_of_others() -> None:
    """Else those that have waited long would throw out, one after the other, those that have."""
    aged, running = sequence(1, priority=1), sequence(2, priority=1)
    running.take_rank((1, 0))
    at = circumstances(1000.0, aging_s=1.0)
    assert policy.class_of(aged, at) < running.rank[0]
    assert policy.yielding_to(aged, [running], at) == []


@pytest.mark.parametrize(
    ("watermark", "preemptions", "expected"),
    [(3, 0, 3), (3, 1, 6), (3, 2, 12), (3, 9, 50), (0, 0, 0), (0, 1, 2), (0, 3, 8), (0, 60, 50)],
)
def test_headroom_doubles_with_each_preemption(
    watermark: int, preemptions: int, expected: int
) -> None:
    """With a watermark of 0 too: else a request could be preempted without bound."""
    one = sequence(1)
    one.preemptions = preemptions
    assert policy.headroom(one, watermark=watermark, alone=False, blocks=50) == expected
    assert policy.headroom(one, watermark=watermark, alone=True, blocks=50) == 0
