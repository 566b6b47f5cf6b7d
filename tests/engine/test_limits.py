"""Limits by the names of the settings: each can be changed, each wrong value is refused by name."""

from typing import Any, get_args, get_type_hints

import pytest

from octavo.config import RULES
from octavo.core.budget import Ceilings, Limits
from octavo.engine.limits import changed, named
from octavo.errors import InvalidRequest

LIMITS = Limits(sequences=8, tokens=64, waiting=3)

NAMES = {
    "sequences": "max_num_seqs",
    "tokens": "max_num_batched_tokens",
    "waiting": "max_queued_requests",
    "waiting_tokens": "max_queued_tokens",
    "waiting_s": "max_queue_time",
    "aging_s": "aging",
    "drafts": "max_draft_tokens",
    "ttft_target_s": "ttft_target",
    "tpot_target_s": "tpot_target",
}


def another(kind: Any, value: Any) -> Any:
    """A value of that type that is allowed and not this one."""
    choices = [choice for part in (kind, *get_args(kind)) for choice in get_args(part)]
    texts = [choice for choice in choices if isinstance(choice, str) and choice != value]
    return texts[0] if texts else 1 + (value or 0)


CHANGES = {
    NAMES.get(name, name): (name, another(kind, getattr(LIMITS, name)))
    for name, kind in get_type_hints(Limits).items()
}


def test_every_limit_can_be_changed() -> None:
    assert named(LIMITS).keys() == CHANGES.keys()
    for name, (field, value) in CHANGES.items():
        after = changed(LIMITS, {name: value})
        assert getattr(LIMITS, field) != value
        assert getattr(after, field) == named(after)[name] == value
        assert changed(after, {name: getattr(LIMITS, field)}) == LIMITS


def test_limits_have_the_names_of_settings() -> None:
    assert set(NAMES.values()) <= RULES.keys()


def test_several_change_at_once() -> None:
    after = changed(LIMITS, {name: value for name, (_, value) in CHANGES.items()})
    assert named(after) == {name: value for name, (_, value) in CHANGES.items()}


def test_an_absent_limit_is_none() -> None:
    assert changed(LIMITS, {"max_queued_requests": None}).waiting is None


def test_durations_are_written_as_in_the_settings() -> None:
    limits = changed(LIMITS, {"aging": "5m", "ttft_target": "2s", "tpot_target": "100ms"})
    assert (limits.aging_s, limits.ttft_target_s, limits.tpot_target_s) == (300.0, 2.0, 0.1)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("max_num_seqs", 0, "max_num_seqs is 0: it must be at least 1"),
        ("max_num_seqs", "8", "max_num_seqs: expected `int`"),
        ("max_num_seqs", True, "max_num_seqs: expected `int`"),
        ("max_num_seqs", 1.5, "max_num_seqs: expected `int`"),
        ("max_num_seqs", None, "max_num_seqs: expected `int`"),
        ("max_queued_requests", "none", "max_queued_requests: expected `int | null`"),
        ("policy", "best", "policy: expected one of fcfs, priority, fair, slo, got 'best'"),
        ("aging", "soon", "aging: expected a duration such as 2s, got 'soon'"),
        ("ttft_target", "1ms 5", "ttft_target: expected a duration such as 2s"),
        ("tpot_target", "0ms", "tpot_target is 0"),
        ("aging", True, "aging: expected `float"),
        ("watermark_blocks", -1, "watermark_blocks is -1"),
        ("max_num_seq", 4, "did you mean max_num_seqs?"),
        ("sequences", 4, "sequences is no limit that can be changed"),
        ("block_size", 4, "there are max_num_seqs"),
        ("x" * 10**6, 4, "no limit"),
    ],
)
def test_what_is_wrong_is_refused_by_name(name: str, value: object, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        changed(LIMITS, {"max_num_batched_tokens": 32, name: value})
    assert says in str(caught.value)
    assert caught.value.param == name


def test_ceilings_have_the_same_names() -> None:
    ceilings = named(Ceilings(sequences=1, tokens=2, watermark_blocks=3))
    assert ceilings == {"max_num_seqs": 1, "max_num_batched_tokens": 2, "watermark_blocks": 3}
