"""LLM: one answer a prompt, with all its choices."""

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.text.assembler import Delta, Ended

PROMPTS = ["The sea is", "A list of three colours:"]


@pytest.fixture(scope="module")
def llm(demo_model_path: Path) -> LLM:
    return LLM(str(demo_model_path), max_model_len=128, max_num_seqs=4, threads=2)


def test_a_prompt_without_n_has_one_choice(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=4, seed=1), progress=False)
    assert answer.choices == (answer,)
    assert answer.others == ()


def test_choices_are_in_order_and_repeatable(llm: LLM) -> None:
    """Five choices on four rows: the first is the only one of n = 1; prompts change nothing."""
    asked = SamplingParams(n=5, max_tokens=6, seed=3, ignore_eos=True)
    answers = llm.generate(PROMPTS, asked, progress=False)
    again = [llm.generate(prompt, asked, progress=False)[0] for prompt in reversed(PROMPTS)]
    for prompt, answer, repeated in zip(PROMPTS, answers, reversed(again), strict=True):
        assert len(answer.choices) == 5
        tokens = [choice.token_ids for choice in answer.choices]
        assert tokens == [choice.token_ids for choice in repeated.choices]
        assert len(set(tokens)) > 1
        (one,) = llm.generate(
            prompt, SamplingParams(max_tokens=6, seed=3, ignore_eos=True), progress=False
        )
        assert one.token_ids == answer.token_ids
        assert [bool(choice.receipt.prompt_tokens) for choice in answer.choices] == [
            True,
            *[False] * 4,
        ]


def test_greedy_choices_are_equal(llm: LLM) -> None:
    asked = SamplingParams(n=3, max_tokens=5, temperature=0.0)
    (answer,) = llm.generate(PROMPTS[1], asked, progress=False)
    assert len({choice.text for choice in answer.choices}) == 1


def test_a_stream_says_which_branch_each_piece_is_of(llm: LLM) -> None:
    asked = SamplingParams(n=3, max_tokens=5, seed=9, ignore_eos=True)
    (whole,) = llm.generate(PROMPTS[0], asked, progress=False)
    tokens: dict[int, tuple[int, ...]] = {0: (), 1: (), 2: ()}
    ended = []
    for item in llm.stream(PROMPTS[0], asked):
        if isinstance(item, Delta):
            assert item.branch not in ended
            tokens[item.branch] += item.token_ids
        else:
            assert isinstance(item, Ended)
            ended.append(item.branch)
    assert sorted(ended) == [0, 1, 2]
    assert list(tokens.values()) == [choice.token_ids for choice in whole.choices]


def test_a_stop_string_ends_its_own_branch_alone(llm: LLM) -> None:
    asked = SamplingParams(n=4, max_tokens=12, seed=5, ignore_eos=True)
    (plain,) = llm.generate(PROMPTS[0], asked, progress=False)
    stop = plain.choices[2].text[8:13]
    (cut,) = llm.generate(
        PROMPTS[0],
        SamplingParams(n=4, max_tokens=12, seed=5, ignore_eos=True, stop=(stop,)),
        progress=False,
    )
    assert cut.choices[2].stop_reason == stop
    for before, after in zip(plain.choices, cut.choices, strict=True):
        assert after.text == before.text.partition(stop)[0]
