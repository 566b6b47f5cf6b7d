"""Limits that change while requests run: nobody accepted is lost, what is lower holds at once."""

from dataclasses import replace

import pytest
from tests.core.serving import Serving, Setup

from octavo.core.budget import Ceilings, Limits
from octavo.core.events import Deferred, Refused
from octavo.core.request import Request
from octavo.errors import ConfigError

SETUP = Setup(blocks=64, sequences=4, tokens=16, cached=False)


def request(name: str, prompt: int = 4, answer: int = 6, priority: int = 0) -> Request:
    start = sum(map(ord, name)) % 90
    tokens = tuple(range(start, start + prompt))
    return Request(id=name, prompt=tokens, max_tokens=answer, priority=priority)


def running(serving: Serving) -> list[str]:
    return sorted(sequence.id for sequence in serving.scheduler.running)


def test_fewer_sequences_stop_admission_and_nobody_who_runs() -> None:
    serving = Serving(SETUP)
    serving.submit(*(request(name) for name in "abcd"))
    serving.step()
    assert running(serving) == ["a", "b", "c", "d"]
    serving.set_limits(sequences=2)
    serving.submit(request("e"))
    serving.step()
    assert running(serving) == ["a", "b", "c", "d"]
    assert serving.of(Deferred, "e")[-1] == Deferred("e", "rows", 3)
    for name in "abc":
        serving.cancel(name)
    serving.step()
    assert running(serving) == ["d", "e"]
    serving.finish()


def test_more_sequences_are_admitted_in_the_next_step() -> None:
    serving = Serving(SETUP)
    serving.submit(*(request(name, prompt=2) for name in "abcdefg"))
    serving.step()
    assert len(running(serving)) == 4
    serving.set_limits(sequences=7)
    serving.step()
    assert len(running(serving)) == 7
    serving.finish()


def test_a_higher_priority_takes_the_rows_of_others_down_to_the_lower_limit() -> None:
    serving = Serving(SETUP)
    serving.submit(*(request(name) for name in "abcd"))
    serving.step()
    serving.set_limits(sequences=2)
    serving.submit(request("urgent", priority=-1))
    serving.step()
    serving.step()
    assert running(serving) == ["a", "urgent"]
    serving.finish()


def test_the_token_budget_holds_from_the_next_plan_on() -> None:
    serving = Serving(replace(SETUP, depth=2))
    serving.submit(request("a", prompt=60))
    first = serving.launch()
    serving.set_limits(tokens=3)
    second = serving.launch()
    serving.set_limits(tokens=24)
    serving.land()
    third = serving.launch()
    plans = [first, second, third]
    assert [sum(s.stop - s.start for s in plan.spans) for plan in plans if plan] == [16, 3, 24]
    serving.finish()


def test_a_budget_below_the_number_that_runs_serves_all_in_turn() -> None:
    serving = Serving(SETUP)
    serving.submit(*(request(name, answer=5) for name in "abcd"))
    serving.step()
    serving.set_limits(tokens=1)
    serving.finish()


def test_a_small_budget_is_not_held_by_one_that_finds_no_blocks() -> None:
    """The youngest was to be served next, found no block and may preempt nobody; its token came
    back each step, and the elder, who would have gone on, got none."""
    serving = Serving(Setup(blocks=7, block_size=1, sequences=2, tokens=9, watermark_blocks=0))
    serving.submit(Request(id="elder", prompt=(1, 2), max_tokens=4))
    serving.submit(Request(id="younger", prompt=(5, 6), max_tokens=4))
    serving.step()
    serving.set_limits(tokens=1)
    serving.finish()


def test_the_queue_limit_turns_away_who_comes_and_nobody_who_waits() -> None:
    serving = Serving(replace(SETUP, sequences=1))
    serving.submit(*(request(name) for name in "abcd"))
    serving.step()
    serving.set_limits(waiting=1)
    serving.submit(request("e"))
    assert isinstance(serving.endings["e"], Refused)
    assert len(serving.scheduler.waiting) == 3
    serving.set_limits(waiting=None)
    serving.submit(request("f"))
    serving.finish()
    assert [name for name, end in serving.endings.items() if isinstance(end, Refused)] == ["e"]


def test_the_watermark_holds_for_the_next_admission() -> None:
    serving = Serving(replace(SETUP, blocks=10))
    serving.set_limits(watermark_blocks=9)
    serving.submit(request("a", prompt=8), request("b", prompt=8))
    serving.step()
    assert running(serving) == ["a"]
    serving.set_limits(watermark_blocks=0)
    serving.step()
    assert running(serving) == ["a", "b"]
    serving.finish()


@pytest.mark.parametrize("name", ["sequences", "tokens", "watermark_blocks"])
def test_no_limit_rises_above_its_ceiling(name: str) -> None:
    serving = Serving(SETUP)
    most = getattr(SETUP.ceilings(), name)
    serving.set_limits(**{name: most})
    before = serving.scheduler.limits
    with pytest.raises(ConfigError, match=f"built for at most {most}") as caught:
        serving.set_limits(**{name: most + 1})
    assert caught.value.param == name
    assert serving.scheduler.limits == before


def test_ceilings_name_limits() -> None:
    assert set(Ceilings.__dataclass_fields__) < set(Limits.__dataclass_fields__)
