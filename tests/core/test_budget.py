"""Tokens of a step are handed out until they are gone; limits that stop everything are refused."""

import pytest

from octavo.core.budget import Budget, Limits
from octavo.errors import ConfigError


def test_a_grant_is_what_is_asked_or_what_is_left() -> None:
    budget = Budget(10)
    assert [budget.grant(demand) for demand in (4, 0, 9, 1)] == [4, 0, 6, 0]
    budget.refund(3)
    assert budget.grant(5) == 3
    assert budget.left == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequences": 0},
        {"tokens": 0},
        {"tokens": -5},
        {"waiting": 0},
        {"watermark_blocks": -1},
        {"waiting_tokens": 0},
        {"aging_s": -1},
        {"ttft_target_s": 0},
        {"tpot_target_s": -0.1},
    ],
)
def test_limits_under_which_nothing_could_run_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"is -?[\d.]+: it must be at least") as caught:
        Limits(**{"sequences": 4, "tokens": 16, **wrong})
    assert caught.value.param == next(iter(wrong))


def test_an_unknown_rule_of_admission_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="admission is 'some': it must be one of full, chunked, predicted"
    ):
        Limits(sequences=4, tokens=16, admission="some")  # type: ignore[arg-type]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="policy is 'mine': it must be one of fcfs, priority, fair, slo"
    ):
        Limits(sequences=4, tokens=16, policy="mine")  # type: ignore[arg-type]
