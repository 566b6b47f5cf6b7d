"""SamplingParams: what each field may be, in Python."""

from typing import Any

import pytest

from octavo.core.request import Dry, Penalty, Sampling
from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.text.structured import Structured

NAN, INFINITY = float("nan"), float("inf")

ALLOWED: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.0, 1e-6, 2, 100.0),
    "top_p": (1e-9, 1, 1.0),
    "top_k": (-1, 0, 1, 10**9),
    "min_p": (0, 0.5, 1.0),
    "seed": (None, 0, -(2**63), 2**64 - 1),
    "repetition_penalty": (0.01, 1, 1.3, 100.0),
    "presence_penalty": (-2, 0, 2.0),
    "frequency_penalty": (-2.0, 0, 2),
    "logit_bias": ({}, {5: 100}, {"5": -100.0, "7": 0}, dict.fromkeys(range(1024), 1)),
    "dry_multiplier": (0, 0.8, 100),
    "dry_base": (1, 1.75, 100),
    "dry_allowed_length": (1, 2, 2**31 - 1),
    "dry_penalty_last_n": (-1, 0, 64),
    "dry_sequence_breakers": ((), "x", ["\n", "long" * 10], None),
    "top_n_sigma": (-1, 0, 1.5),
    "typical_p": (1e-9, 0.5, 1),
    "xtc_probability": (0, 0.5, 1),
    "xtc_threshold": (0, 0.1, 0.9, 1),
    "allowed_token_ids": (None, (5,), [0, 1, 1]),
    "bad_words": ((), "x", ("x", "y"), ["x"] * 128, None, "x" * 256),
    "structured": (None, Structured(json={}), Structured(regex="a")),
    "logprobs": (None, -1, 0, 1, 20, 2**31 - 1),
    "prompt_logprobs": (None, -1, 0, 1, 20, 2**31 - 1),
    "max_tokens": (None, 1, 10**9),
    "min_tokens": (0, 5),
    "stop": ((), "x", ("x", "y"), ["x", "y"], None),
    "stop_token_ids": ((), (0, 1), [7], None),
    "ignore_eos": (True, False),
    "include_stop_str_in_output": (True, False),
    "skip_special_tokens": (True, False),
    "priority": (-(2**31), 0, 2**31 - 1),
    "n": (1, 2, 128),
    "use_beam_search": (True, False),
    "length_penalty": (1, 1.0),  # others with beams only
    "early_stopping": (False,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0, 0.0),
    "tenant": ("", "team a", "x" * 256),
    "ttft_target_s": (None, 0.001, 2, 1e6),
    "tpot_target_s": (None, 0.001, 0.1, 1e6),
    "timeout_s": (None, 0.001, 60, 1e6),
    "cache": ("on", "off"),
    "cache_salt": (None, "a", "x" * 1024),
    "cache_control": (None, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}),
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, 100.5, NAN, INFINITY, "1", None, True),
    "top_p": (0, 0.0, -1, 1.01, NAN, "1", None),
    "top_k": (-2, 1.5, "1", None, True),
    "min_p": (-0.1, 1.1, NAN, None),
    "seed": (2**64, -(2**63) - 1, 0.5, "1", True),
    "repetition_penalty": (0, 0.009, -1, 101, NAN, INFINITY, "1", None, True),
    "presence_penalty": (-2.1, 2.1, NAN, "1", None),
    "frequency_penalty": (-2.1, 2.1, NAN, "1", None),
    "logit_bias": (
        None,
        [5],
        "5",
        {5: 101},
        {5: -100.5},
        {5: NAN},
        {5: INFINITY},
        {5: "1"},
        {5: None},
        {"a": 1},
        {"-1": 1},
        {"1.5": 1},
        {"": 1},
        {"9" * 5000: 1},
        {"²": 1},
        {1.5: 1},
        {True: 1},
        dict.fromkeys(range(1025), 1),
    ),
    "dry_multiplier": (-0.1, 101, NAN, "1", None),
    "dry_base": (0.9, 101, NAN, "1", None),
    "dry_allowed_length": (0, -1, 1.5, "1", None, 2**31),
    "dry_penalty_last_n": (-2, 0.5, "1", None),
    "dry_sequence_breakers": ("", ("",), (5,), 5, ("x",) * 17, "x" * 41),
    "top_n_sigma": (-1.1, NAN, INFINITY, "1", None),
    "typical_p": (0, 1.1, NAN, "1", None),
    "xtc_probability": (-0.1, 1.1, NAN, "1", None),
    "xtc_threshold": (-0.1, 1.1, NAN, "1", None),
    "allowed_token_ids": ((), [], 5, "5", {5}),
    "bad_words": ("", ("",), (5,), 5, {"a": 1}, ("x",) * 129, "x" * 257),
    "structured": ("json", {"json": {}}, 5),
    "logprobs": (-2, 2**31, 1.5, "1", True),
    "prompt_logprobs": (-2, 2**31, 1.5, "1", True),
    "max_tokens": (0, -1, 1.5, "1", True),
    "n": (0, -1, 129, 1.5, "2", None, True),
    "use_beam_search": (1, "yes", None),
    "length_penalty": (-10.1, 10.1, NAN, INFINITY, "1", None, True, 0.5),
    "early_stopping": ("always", 1, None, True, "never"),
    "num_beam_groups": (0, 129, 1.5, "1", None, True, 2),
    "diversity_penalty": (-0.1, 101, NAN, "1", None, 0.5),
    "tenant": ("x" * 257, 5, None, ("a",)),
    "ttft_target_s": (0, -1, 1e7, NAN, INFINITY, "2s", True),
    "tpot_target_s": (0, -1, 1e7, NAN, INFINITY, "100ms", True),
    "timeout_s": (0, -1, 1e7, NAN, INFINITY, "1s", True),
    "min_tokens": (-1, 0.5, None),
    "stop": ("", ("",), (5,), 5, {"a": 1}, ("x",) * 17, "x" * 1025),
    "stop_token_ids": (5, "5", {5}, (5,) * 1025),
    "ignore_eos": (1, "yes", None),
    "include_stop_str_in_output": (0, None),
    "skip_special_tokens": ("no", None),
    "priority": (2**31, -(2**31) - 1, 0.5),
    "cache": (True, None, "auto", ""),
    "cache_salt": ("", "x" * 1025, 5, b"a"),
    "cache_control": ({}, "ephemeral", {"type": "ephemeral", "ttl": 300}),
}


def test_no_field_is_forgotten_here() -> None:
    assert ALLOWED.keys() == REFUSED.keys() == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("field", ALLOWED)
def test_values_in_range_are_taken(field: str) -> None:
    for value in ALLOWED[field]:
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", REFUSED)
def test_values_out_of_range_are_refused_by_name(field: str) -> None:
    for value in REFUSED[field]:
        with pytest.raises(InvalidRequest, match=field.rstrip("s")) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field


@pytest.mark.parametrize(
    "given",
    [
        {"length_penalty": -10},
        {"length_penalty": 10},
        {"early_stopping": True},
        {"early_stopping": "never"},
        {"num_beam_groups": 2, "diversity_penalty": 100},
        {"num_beam_groups": 4, "diversity_penalty": 0.1},
    ],
)
def test_a_search_takes_what_is_said_of_it(given: dict[str, Any]) -> None:
    beams = SamplingParams(use_beam_search=True, n=4, **given).beams()
    assert beams is not None
    found = {
        "length_penalty": beams.length_penalty,
        "early_stopping": beams.early_stopping,
        "num_beam_groups": beams.groups,
        "diversity_penalty": beams.diversity_penalty,
    }
    assert (beams.width, found | given) == (4, found)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    with pytest.raises(InvalidRequest, match="min_tokens is 5, more than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_lists_and_single_texts_become_tuples() -> None:
    """So that params can be compared, hashed and sent on."""
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[3])  # type: ignore[arg-type]
    assert params == SamplingParams(stop=("a", "b"), stop_token_ids=(3,))
    assert hash(params) == hash(SamplingParams(stop=("a", "b"), stop_token_ids=(3,)))
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


def test_what_the_sampler_gets() -> None:
    params = SamplingParams(temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, seed=-1)
    assert params.sampling(seed=7) == Sampling(
        temperature=0.5, top_k=0, top_p=0.9, min_p=0.1, seed=2**64 - 1
    )
    assert SamplingParams().sampling(seed=7).seed == 7


def test_penalties_and_biases_reach_the_sampling() -> None:
    assert SamplingParams().sampling(seed=1).penalty is None
    asked = SamplingParams(
        repetition_penalty=2, presence_penalty=-1, frequency_penalty=0.5, logit_bias={"3": 4}
    )
    sampling = asked.sampling(seed=1)
    assert sampling.penalty == Penalty(repetition=2.0, presence=-1.0, frequency=0.5)
    assert sampling.logit_bias == ((3, 4.0),)


def test_what_is_off_is_not_there() -> None:
    plain = SamplingParams(temperature=0).sampling(seed=1)
    for settings in (
        {"dry_base": 3},
        {"dry_multiplier": 1, "dry_penalty_last_n": 0},
        {"top_n_sigma": -1},
        {"logit_bias": {}},
        {"bad_words": []},
    ):
        assert SamplingParams(temperature=0, **settings).sampling(seed=1) == plain  # type: ignore[arg-type]
    no_effect = SamplingParams(xtc_probability=1, xtc_threshold=0.6).sampling(seed=1)
    assert no_effect.xtc_probability == 0
    asked = SamplingParams(dry_multiplier=2, dry_penalty_last_n=9)
    assert asked.sampling(seed=1, dry_breakers=((5,),)).dry == Dry(
        multiplier=2.0, window=9, breakers=((5,),)
    )


def test_what_is_changed_to_what_it_is_stays_itself() -> None:
    params = SamplingParams(temperature=0.5, n=2)
    assert params.but(temperature=0.5, n=2) is params
    assert params.but() is params
    assert params.but(n=3, seed=4) == SamplingParams(temperature=0.5, n=3, seed=4)
    with pytest.raises(InvalidRequest, match="temperature"):
        params.but(temperature=-1.0)
