"""What targets bind a step to, who is late, and when one more would be too many."""

import pytest

from octavo.core.budget import Limits
from octavo.core.pace import Pace
from octavo.core.prefix_cache import Context
from octavo.core.request import Request
from octavo.core.sequence import Sequence
from octavo.core.targets import (
    AIM,
    LEAST_PROMPT_TOKENS,
    Outlook,
    excess_tokens,
    is_late,
    outlook,
    turn_s,
)

LIMITS = Limits(
    sequences=64, tokens=512, ttft_target_s=2.0, tpot_target_s=0.12 / AIM, aging_s=300.0
)


def pace() -> Pace:
    """A step takes 20 ms, and 5 ms for each token."""
    learned = Pace()
    for tokens in (10, 100):
        learned.observe(tokens, 0.020 + 0.005 * tokens)
    return learned


def running(
    *,
    drawn: int = 0,
    first_s: float = 0.0,
    arrived_s: float = 0.0,
    prompt: int = 8,
    **fields: float,
) -> Sequence:
    """One that has drawn so many tokens, the first of them at `first_s`."""
    one = Sequence(
        Request(id="a", prompt=tuple(range(prompt)), max_tokens=100, **fields),
        order=0,
        context=Context(),
        block_size=4,
        groups=1,
        now=arrived_s,
    )
    one.admit(row=0, cached=0, now=arrived_s)
    for _ in range(drawn):
        one.length += 1
        one.append(1, 0.0, first_s)
    if drawn:
        one.computed = one.scheduled = len(one.tokens) - 1
    return one


def seen(*members: Sequence, now: float = 1.0, limits: Limits = LIMITS) -> Outlook:
    return outlook(members, limits, pace(), now)


def test_a_step_lasts_as_long_as_the_tightest_target_allows() -> None:
    on_time = running(drawn=1, first_s=1.0)
    assert seen(on_time).tokens == 20
    tighter = running(drawn=1, first_s=1.0, tpot_target_s=0.1 / AIM)
    assert seen(on_time, tighter).tokens == 18  # 16 that prompts have at least, and two answers
    looser = running(drawn=1, first_s=1.0, tpot_target_s=0.2)
    assert seen(looser).tokens == 20  # the target that all have who bring none bounds it still


def test_who_is_behind_gets_shorter_steps_until_it_has_caught_up() -> None:
    """Due at 1.12 s; at 1.02 s a tenth of a second is left."""
    one = running(drawn=1, first_s=1.0)
    loose = Limits(sequences=64, tokens=512, ttft_target_s=2.0, tpot_target_s=0.4 / AIM)
    sizes = [
        seen(running(drawn=1, first_s=1.0), now=now, limits=loose).tokens
        for now in (1.0, 1.2, 1.35)
    ]
    assert sizes == [76, 36, LEAST_PROMPT_TOKENS + 1]
    assert seen(one, now=1.3).tokens == LEAST_PROMPT_TOKENS + 1


def test_without_targets_or_a_pace_the_limit_on_tokens_holds() -> None:
    free = Limits(sequences=64, tokens=512)
    assert seen(running(drawn=1, first_s=1.0), limits=free).tokens == 512
    assert outlook([running(drawn=1, first_s=1.0)], LIMITS, Pace(), 1.0).tokens == 512


@pytest.mark.parametrize(
    "lost",
    [
        running(drawn=1, first_s=2.1),
        running(drawn=1, first_s=0.5, tpot_target_s=0.02),
        running(arrived_s=-2.0),
    ],
    ids=["its first token was late", "its target is out of reach", "its first token is overdue"],
)
def test_who_missed_its_target_binds_nobody(lost: Sequence) -> None:
    ahead = seen(lost, now=2.1)
    assert (ahead.bound, ahead.decodes, ahead.backlog) == (0, 0, 0)
    assert excess_tokens(ahead, [], LIMITS) == 0


def test_a_prompt_waits_for_those_before_it_and_shares_steps_with_answers() -> None:
    """20 tokens a step of which one goes to the answer: 19 a step, each 120 ms."""
    ahead = seen(running(drawn=1, first_s=1.0), running(prompt=30))
    assert (ahead.tokens, ahead.decodes, ahead.backlog) == (20, 1, 30)
    # 48 + 30 tokens in 5 steps: five times the base, 78 tokens, and an answer in four of them
    assert ahead.prompt_s(48) == pytest.approx(5 * 0.020 + (78 + 4) * 0.005)


def test_late_is_who_cannot_have_its_first_token_in_time() -> None:
    ahead = seen()
    one = running(arrived_s=0.0, prompt=20)
    assert not is_late(one, LIMITS, ahead, 1.8)
    assert is_late(one, LIMITS, ahead, 1.9)
    assert not is_late(running(prompt=20), Limits(sequences=1, tokens=1), ahead, 1e9)
    assert is_late(running(prompt=20, ttft_target_s=0.1), LIMITS, ahead, 0.0)


def test_one_more_is_too_many_when_all_would_answer_too_slowly() -> None:
    three = [running(drawn=1, first_s=1.0) for _ in range(3)]
    assert excess_tokens(seen(*three), [], LIMITS) == 0  # 3 + 1 + 16 are 20
    assert excess_tokens(seen(*three), [three[0].request], LIMITS) == 1
    assert excess_tokens(seen(), [], LIMITS) == 0, "nobody is kept from an empty engine"
    assert excess_tokens(seen(), [three[0].request] * 5, LIMITS) == 2


def test_without_a_target_the_turn_comes_when_it_would_have_climbed() -> None:
    free = Limits(sequences=1, tokens=1, aging_s=300.0)
    assert turn_s(running(arrived_s=5.0), free) == 305.0
    assert turn_s(running(arrived_s=5.0), LIMITS) == 7.0
    assert turn_s(running(arrived_s=5.0, ttft_target_s=0.5), LIMITS) == 5.5
