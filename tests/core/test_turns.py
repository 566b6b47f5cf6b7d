"""Whose turn it is, seen from outside: nobody starves, and a change of policy holds at once."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.serving import Serving, Setup

from octavo.core.events import Admitted, Preempted
from octavo.core.request import Request


def request(name: str, length: int = 4, answer: int = 4, **fields: object) -> Request:
    prompt = tuple(own_token(name, position) for position in range(length))
    return Request(id=name, prompt=prompt, max_tokens=answer, **fields)


def own_token(name: str, position: int) -> int:
    """A token of its own for each request, so that nobody shares blocks."""
    return sum(name.encode()) * 31 + position


def admitted(serving: Serving) -> list[str]:
    return [d.request_id for d in serving.of(Admitted) if isinstance(d, Admitted) and not d.resumed]


# --- aging


@given(
    aging_s=st.floats(1.0, 60.0),
    priority=st.integers(1, 4),
    rows=st.integers(1, 3),
    blocks=st.integers(8, 30),
    depth=st.integers(1, 2),
    answer=st.integers(1, 8),
)
def test_low_priority_ends_under_an_endless_flood_of_high(
    aging_s: float, priority: int, rows: int, blocks: int, depth: int, answer: int
) -> None:
    """More high ones than can be served come at every step, for ever."""
    serving = Serving(
        Setup(sequences=rows, blocks=blocks, tokens=32, aging_s=aging_s, depth=depth, cached=False)
    )
    serving.submit(request("low", priority=priority, answer=answer))
    # It is first once it is in their class; those that ran then, and it, take their steps.
    bound = int(aging_s * priority) + 60
    for step in range(bound):
        if "low" in serving.endings:
            break
        serving.submit(*(request(f"high {step} {n}", answer=8) for n in range(2)))
        serving.step()
    assert "low" in serving.endings, f"still waits after {bound} steps"


def test_without_aging_low_priority_waits_for_as_long_as_high_ones_come() -> None:
    """What the test above would see if nobody climbed."""
    serving = Serving(Setup(sequences=1, tokens=32))
    serving.submit(request("low", priority=1))
    for step in range(300):
        serving.submit(request(f"high {step}"))
        serving.step()
    assert "low" not in serving.endings
    serving.finish()


def test_who_climbed_keeps_its_place_while_it_runs() -> None:
    """One of high priority that comes then takes nothing from it: else both would go in circles."""
    serving = Serving(Setup(sequences=1, tokens=32, aging_s=10.0))
    serving.submit(request("first", answer=12))
    serving.step()
    serving.submit(request("low", priority=1, answer=12), request("other", priority=1))
    for _ in range(12):
        serving.step()
    serving.submit(request("high"))
    while "low" not in serving.endings:
        serving.step()
    assert not serving.of(Preempted)
    serving.finish()
    assert admitted(serving)[:2] == ["first", "low"]


# --- a change of policy


def test_a_change_of_policy_orders_anew_those_that_wait() -> None:
    names = {"a": 2, "b": 0, "c": 1}
    for policies, expected in (
        (["fcfs", "priority"], ["a", "b", "c"]),
        (["priority", "fcfs"], ["b", "a", "c"]),
    ):
        serving = Serving(Setup(sequences=1, blocks=99, tokens=99, policy=policies[0]))
        for name, priority in names.items():
            serving.submit(request(name, priority=priority))
        serving.step()
        limits = serving.scheduler.limits
        serving.scheduler.limits = replace(limits, policy=policies[1], aging_s=1e9)
        serving.finish()
        assert admitted(serving) == expected


@pytest.mark.parametrize("first", ["fcfs", "priority"])
def test_policies_may_change_at_any_time(first: str, seed: int) -> None:
    """All that was promised to each request holds across changes."""
    for run in range(40):
        random = Random(f"{seed} {run}")
        serving = Serving(Setup(sequences=3, blocks=14, tokens=9, policy=first))
        for number in range(12):
            serving.submit(request(f"{number}", 5, 6, priority=random.choice([0, 1, -1])))
            limits = serving.scheduler.limits
            policy, aging_s = random.choice(["fcfs", "priority"]), random.choice([None, 2.0])
            serving.scheduler.limits = replace(limits, policy=policy, aging_s=aging_s)
            for _ in range(random.randint(0, 4)):
                serving.step()
        serving.finish()
