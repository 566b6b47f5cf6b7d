"""Who goes first, who yields, and how much room a return needs."""

import pytest

from octavo.core import policy
from octavo.core.prefix_cache import Context
from octavo.core.request import Request
from octavo.core.sequence import Sequence


def sequence(order: int, *, priority: int = 0, scheduled: int = 0, length: int = 5) -> Sequence:
    made = Sequence(
        Request(id=str(order), prompt=tuple(range(length)), max_tokens=9, priority=priority),
        order=order,
        context=Context(),
        block_size=4,
        groups=1,
        now=0.0,
    )
    made.scheduled = scheduled
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
    assert policy.yielding_to(sequence(9), [same, low, lowest]) == [lowest, low]


def test_decodes_are_served_first_and_take_turns() -> None:
    prompt = sequence(0)
    decodes = [sequence(order, scheduled=4) for order in (1, 2, 3)]
    decodes[0].last_served = 7
    decodes[1].last_served = 3
    decodes[2].last_served = 3
    assert policy.service_order([prompt, *decodes]) == [decodes[1], decodes[2], decodes[0], prompt]


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
