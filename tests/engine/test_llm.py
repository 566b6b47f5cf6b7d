"""`LLM` on the demo model: what a script sees."""

import io
import logging
import re
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.llm import Answer
from octavo.errors import ConfigError, ContextLengthExceeded, InvalidRequest, RequestError
from octavo.ops.native import available_sets
from octavo.text.assembler import Delta, Ended

CONTEXT = 256
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
POEM = "Once upon a time"
SAID = 1234
SEA, COLOURS = "The sea is", "A list of three colours:"


@pytest.fixture(scope="module")
def llm(demo_model_path: Path) -> LLM:
    return LLM(str(demo_model_path), max_model_len=CONTEXT, threads=2)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm: LLM) -> Iterator[None]:
    yield
    status = llm.status()
    assert (status.running, status.waiting, status.blocks_owned) == (0, 0, 0)


def of(llm: LLM, prompt: Any = POEM, **settings: Any) -> Answer:
    """The answer to one prompt, greedy unless told otherwise."""
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 24} | settings))
    (answer,) = llm.generate(prompt, params)
    return answer


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=2)
    prompts = [POEM, "The capital of France is", [504, 3575, 282]]
    together = llm.generate(prompts, [GREEDY, short, GREEDY])
    for prompt, params, answer in zip(prompts, [GREEDY, short, GREEDY], together, strict=True):
        (alone,) = llm.generate([prompt], params)
        assert (alone.text, alone.token_ids, alone.logprobs) == (
            answer.text,
            answer.token_ids,
            answer.logprobs,
        )
    assert "Paris" in together[1].text
    assert len({answer.text for answer in together}) == 3
    assert [len(answer.token_ids) for answer in together] == [24, 2, 24]
    assert together[1].finish_reason == "length"
    assert together[1].receipt.completion_tokens == 2


def test_no_prompts_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_chat_with_one_and_with_several(llm: LLM) -> None:
    other = [{"role": "user", "content": "Name three colours."}]
    (one,) = llm.chat(QUESTION, GREEDY)
    assert "Paris" in one.text
    assert (one.finish_reason, one.stop_reason) == ("stop", None)
    several = llm.chat([QUESTION, other], GREEDY)
    assert several[0].text == one.text
    assert several[1].text != one.text


def test_streams_join_to_the_answer(llm: LLM) -> None:
    *deltas, ended = llm.chat_stream(QUESTION, GREEDY)
    assert isinstance(ended, Ended)
    (whole,) = llm.chat(QUESTION, GREEDY)
    assert "".join(delta.text for delta in deltas) == whole.text  # type: ignore[union-attr]
    assert len(deltas) > 3


def test_streams_and_other_answers_may_be_asked_in_turns(llm: LLM) -> None:
    """Each gets its own tokens, whoever turns the crank."""
    alone = {prompt: of(llm, prompt) for prompt in (POEM, SEA)}
    streams = {prompt: llm.stream(prompt, GREEDY) for prompt in alone}
    heads = {prompt: [next(stream)] for prompt, stream in streams.items()}
    assert of(llm, COLOURS, max_tokens=4).token_ids
    for prompt, stream in streams.items():
        heads[prompt] += [next(stream), next(stream)]
        ids = [token for piece in heads[prompt] for token in piece.token_ids]
        assert tuple(ids) == alone[prompt].token_ids[:3]
    for prompt, stream in streams.items():
        text = "".join(piece.text for piece in heads[prompt])
        *rest, ended = stream
        assert isinstance(ended, Ended)
        assert text + "".join(piece.text for piece in rest) == alone[prompt].text


PROMPTS = tuple(f"{count} {animal}s and" for count in (2, 3, 7) for animal in ("cat", "owl", "ox"))
LENGTHS = (24, 3, 9, 2, 14, 5, 1, 6, 4)


def of_all(llm: LLM) -> list[Answer]:
    return llm.generate(PROMPTS, [greedy(length) for length in LENGTHS])


def greedy(length: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=length, n=1 + length % 2, ignore_eos=True)


@pytest.mark.parametrize("in_flight", [1, 2, 5, None])
@pytest.mark.parametrize("order", ["prompts", "finished"])
def test_answers_come_one_by_one(llm: LLM, order: Any, in_flight: int | None) -> None:
    came = list(llm.answers(PROMPTS, map(greedy, LENGTHS), order=order, in_flight=in_flight))
    indices = [index for index, _ in came]
    assert sorted(indices) == list(range(len(PROMPTS)))
    assert (indices == sorted(indices)) == (order == "prompts" or in_flight == 1)
    whole = of_all(llm)
    for index, answer in came:
        assert len(answer.choices) == len(whole[index].choices)
        for one, other in zip(answer.choices, whole[index].choices, strict=True):
            assert (one.text, one.token_ids) == (other.text, other.token_ids)
            assert one.logprobs == other.logprobs


@pytest.mark.parametrize("order", ["prompts", "finished"])
def test_prompts_without_an_end_are_taken_as_answers_come(llm: LLM, order: Any) -> None:
    taken: list[int] = []

    def prompts() -> Iterator[str]:
        for number in count():
            taken.append(number)
            yield f"{number} and"

    answers = llm.answers(prompts(), greedy(2), order=order, in_flight=3)
    for done in range(1, 13):
        next(answers)
        assert len(taken) <= done + 2 + 3 * (order == "prompts")
    answers.close()  # type: ignore[attr-defined]
    assert llm.status().running == llm.status().waiting == 0


def test_conversations_one_by_one(llm: LLM) -> None:
    talks = [QUESTION, [{"role": "user", "content": "Name a colour."}]]
    assert [answer.text for _, answer in llm.chat_answers(talks, GREEDY)] == [
        answer.text for answer in llm.chat(talks, GREEDY)
    ]


def test_what_is_wrong_with_one_prompt_is_told_when_its_turn_comes(llm: LLM) -> None:
    answers = llm.answers([POEM, SEA, ""], greedy(3), in_flight=1)
    assert [next(answers)[0] for _ in range(2)] == [0, 1]
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        next(answers)
    with pytest.raises(RequestError, match="not as many SamplingParams as prompts"):
        list(llm.answers([POEM, SEA], [greedy(3)]))
    for wrong in ({"order": "random"}, {"in_flight": 0}):
        with pytest.raises(InvalidRequest, match=f"{next(iter(wrong))} must be"):
            llm.answers([POEM], **wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="one text"):
        llm.answers(POEM)


def test_a_stream_that_is_closed_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(POEM, SamplingParams(ignore_eos=True))
    next(stream)
    assert llm.status().running == 1
    stream.close()  # type: ignore[attr-defined]
    assert llm.status().running == 0


def test_the_log_at_start_says_what_was_sized_and_chosen(
    demo_model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="octavo.engine")
    isa = available_sets()[-1]
    LLM(str(demo_model_path), kv_cache_memory="36MiB", max_model_len=100, threads=1, isa=isa)
    for words in (
        "102 blocks of 16 tokens = 1,632 tokens; one token costs 22.5 KiB",
        "14 requests of the maximum length 100 fit at once",
        f"kernels: native-{isa}, threads: 1",
    ):
        assert words in caplog.text


@pytest.mark.parametrize(
    ("settings", "swaps", "computed_again"),
    [
        ({"preemption": "swap", "swap_space": "36MiB"}, True, False),
        ({"preemption": "swap", "swap_space": "400KiB"}, False, True),
        ({"preemption": "recompute"}, False, True),
    ],
)
def test_those_that_yield_are_swapped_or_computed_again(
    demo_model_path: Path, settings: dict[str, str], swaps: bool, computed_again: bool
) -> None:
    """Two that grow beyond what the pool holds; the answers are those of a pool that is large."""
    sizes = {"max_model_len": 128, "threads": 2, "max_num_seqs": 2, "seed": 1}
    tight = LLM(
        str(demo_model_path),
        kv_cache_memory=f"{9 * 360}KiB",
        enable_prefix_caching=False,
        **sizes,
        **settings,
    )
    wide = LLM(str(demo_model_path), **sizes)
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    prompts = [POEM, SEA]
    answers = [answer.token_ids for answer in tight.generate(prompts, params)]
    assert answers == [answer.token_ids for answer in wide.generate(prompts, params)]
    status = tight.status()
    assert status.preemptions > 0
    assert (status.swaps > 0) == swaps
    assert (status.tokens_recomputed > 0) == computed_again
    assert (status.swap_blocks_total > 0) == ("swap_space" in settings)
    assert status.swap_blocks_used == 0
    assert wide.status().swap_blocks_total > 0


@pytest.mark.parametrize(
    ("quantization", "weights"), [("none", "256.6 MiB"), ("int8", "136.4 MiB (int8)")]
)
def test_weights_are_kept_as_asked(
    demo_model_path: Path, caplog: pytest.LogCaptureFixture, quantization: str, weights: str
) -> None:
    caplog.set_level(logging.INFO, logger="octavo.engine.build")
    llm = LLM(
        str(demo_model_path), max_model_len=64, threads=2, quantization=quantization, max_num_seqs=1
    )
    assert f"weights {weights}," in caplog.text
    (answer,) = llm.chat([{"role": "user", "content": "Who wrote Romeo and Juliet?"}], GREEDY)
    assert "Shakespeare" in answer.text


@pytest.mark.parametrize(("asked", "pool"), [(None, "22.5 KiB"), ("int8", "12.0 KiB")])
def test_keys_and_values_are_kept_as_asked(
    demo_model_path: Path, caplog: pytest.LogCaptureFixture, asked: str | None, pool: str
) -> None:
    caplog.set_level(logging.INFO, logger="octavo.engine.build")
    llm = LLM(str(demo_model_path), max_model_len=64, threads=2, kv_cache_dtype=asked)
    assert f"one token costs {pool}" in caplog.text
    assert (" (int8), swap space" in caplog.text) == (asked == "int8")
    (answer,) = llm.chat([{"role": "user", "content": "Who wrote Romeo and Juliet?"}], GREEDY)
    assert "Shakespeare" in answer.text


# --- each field changes the answer as it says


def test_a_seed_repeats_an_answer_and_no_seed_does_not(llm: LLM) -> None:
    drawn = {"temperature": 1.0}
    one, again, other, free, freer = (
        of(llm, **drawn, **more) for more in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {}, {})
    )
    assert one.text == again.text
    assert len({one.text, other.text, free.text, freer.text}) == 4


@pytest.mark.parametrize(
    "narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-3}]
)
def test_the_narrowest_filter_is_greedy(llm: LLM, narrow: dict[str, float]) -> None:
    assert of(llm, **({"temperature": 1.0, "seed": 3} | narrow)).token_ids == of(llm).token_ids


@pytest.mark.parametrize("wide", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_a_filter_changes_what_a_seed_draws(llm: LLM, wide: dict[str, float]) -> None:
    hot = {"temperature": 1.5, "seed": 5}
    filtered, plain = of(llm, **hot, **wide), of(llm, **hot)
    assert filtered.token_ids != plain.token_ids
    assert sum(filtered.logprobs) > sum(plain.logprobs)


def test_max_tokens_is_the_rest_of_the_context_if_not_given(llm: LLM) -> None:
    answer = of(llm, [11] * (CONTEXT - 30), max_tokens=None, ignore_eos=True)
    assert (len(answer.token_ids), answer.finish_reason) == (30, "length")


def test_the_end_can_be_ignored_or_put_off(llm: LLM) -> None:
    (whole,) = llm.chat(QUESTION, GREEDY)
    count = len(whole.token_ids)
    assert whole.finish_reason == "stop"
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": count + 8}
    (ignoring,) = llm.chat(QUESTION, SamplingParams(**settings, ignore_eos=True))
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (count + 8, "length")
    assert ignoring.token_ids[:count] == whole.token_ids
    (later,) = llm.chat(QUESTION, SamplingParams(**settings, min_tokens=count + 3))
    assert len(later.token_ids) >= count + 3
    assert later.token_ids[: count - 1] == whole.token_ids[:-1]
    assert later.token_ids[count - 1] != whole.token_ids[-1]


def test_stop_strings_and_stop_ids(llm: LLM) -> None:
    whole = of(llm)
    word = re.findall(r"\w{4,}", whole.text)[-1]
    stopped = of(llm, stop=word)
    assert stopped.text == whole.text[: whole.text.index(word)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
    included = of(llm, stop=word, include_stop_str_in_output=True)
    assert included.text == stopped.text + word
    straddling = POEM[-3:] + whole.text[:3]
    assert of(llm, stop=straddling).text == whole.text, "B072: the prompt is no part of the answer"
    token = whole.token_ids[9]
    first = whole.token_ids.index(token)
    by_id = of(llm, stop_token_ids=(token,))
    assert by_id.token_ids == whole.token_ids[: first + 1]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", token)


# --- several answers to one prompt


def test_a_prompt_without_n_has_one_choice(llm: LLM) -> None:
    (answer,) = llm.generate(SEA, SamplingParams(max_tokens=4, seed=1), progress=False)
    assert answer.choices == (answer,)
    assert answer.others == ()


def test_choices_are_in_order_and_repeatable(llm: LLM) -> None:
    """The first is the only one of n = 1; prompts change nothing."""
    asked = SamplingParams(n=5, max_tokens=6, seed=3, ignore_eos=True)
    answers = llm.generate([SEA, COLOURS], asked, progress=False)
    again = [llm.generate(prompt, asked, progress=False)[0] for prompt in (COLOURS, SEA)]
    for prompt, answer, repeated in zip((SEA, COLOURS), answers, reversed(again), strict=True):
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
    (answer,) = llm.generate(COLOURS, asked, progress=False)
    assert len({choice.text for choice in answer.choices}) == 1


def test_a_stream_says_which_branch_each_piece_is_of(llm: LLM) -> None:
    asked = SamplingParams(n=3, max_tokens=5, seed=9, ignore_eos=True)
    (whole,) = llm.generate(SEA, asked, progress=False)
    tokens: dict[int, tuple[int, ...]] = {0: (), 1: (), 2: ()}
    ended = []
    for item in llm.stream(SEA, asked):
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
    (plain,) = llm.generate(SEA, asked, progress=False)
    stop = plain.choices[2].text[8:13]
    (cut,) = llm.generate(
        SEA,
        SamplingParams(n=4, max_tokens=12, seed=5, ignore_eos=True, stop=(stop,)),
        progress=False,
    )
    assert cut.choices[2].stop_reason == stop
    for before, after in zip(plain.choices, cut.choices, strict=True):
        assert after.text == before.text.partition(stop)[0]


# --- bad input


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", InvalidRequest),
        ([[]], InvalidRequest),
        ([-1], InvalidRequest),
        ([10**6], InvalidRequest),
        ("word " * CONTEXT, ContextLengthExceeded),
        ([POEM, "", POEM], InvalidRequest),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_is_computed(
    llm: LLM, prompt: Any, error: type[Exception]
) -> None:
    before = llm.status().steps
    with pytest.raises(error):
        llm.generate(prompt, GREEDY)
    assert llm.status().steps == before
    assert of(llm).finish_reason == "length"


def test_params_must_match_the_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 SamplingParams for 3 prompts"):
        llm.generate([POEM] * 3, [GREEDY] * 2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"thread": 1}, "did you mean 'threads'"),
        ({"isa": "z80"}, "z80"),
        ({"kv_cache_memory": "1KiB"}, "kv_cache_memory"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    demo_model_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(str(demo_model_path), **settings)


# --- the progress bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(llm: LLM, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    monkeypatch.setattr(sys, "stderr", screen)
    llm.generate([POEM] * 3, SamplingParams(temperature=0.0, max_tokens=3), **options)
    monkeypatch.undo()
    return screen.getvalue()


def test_a_terminal_shows_progress(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(llm, Terminal(), monkeypatch).split("\r")
    counts = [int(found[1]) for line in lines if (found := re.search(r"(\d)/3 answers", line))]
    assert counts[-1] == 3
    assert counts == sorted(counts)
    assert re.search(r"█{30} 3/3 answers, \d+ tokens/s \n$", lines[-1])


def test_nothing_is_drawn_elsewhere_or_on_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert drawn(llm, io.StringIO(), monkeypatch) == ""
    assert drawn(llm, Terminal(), monkeypatch, progress=False) == ""


def test_penalties_and_biases_change_the_answer(llm: LLM) -> None:
    plain = of(llm, COLOURS)
    for settings in (
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {plain.token_ids[0]: -100}},
    ):
        assert of(llm, COLOURS, **settings).token_ids != plain.token_ids, settings
    forced = of(llm, COLOURS, logit_bias={SAID: 100}, max_tokens=5)
    assert forced.token_ids == (SAID,) * 5
    for value in forced.logprobs:
        assert value < -1  # of the model, whatever was added


def test_only_what_is_allowed_and_nothing_bad_is_answered(llm: LLM) -> None:
    plain = of(llm, COLOURS)
    word = plain.text.split()[0].strip(",.")
    assert word not in of(llm, COLOURS, bad_words=[word]).text
    allowed = plain.token_ids[3:6]
    assert set(of(llm, COLOURS, allowed_token_ids=allowed).token_ids) <= set(allowed)
    with pytest.raises(InvalidRequest, match="allowed_token_ids holds 99999999"):
        of(llm, COLOURS, allowed_token_ids=[99999999])


def test_the_likeliest_tokens_come_along(llm: LLM) -> None:
    plain = of(llm, COLOURS)
    assert plain.top_logprobs == ()
    scored = of(llm, COLOURS, logprobs=3)
    assert (scored.token_ids, scored.logprobs) == (plain.token_ids, plain.logprobs)
    for token, logprob, top in zip(
        scored.token_ids, scored.logprobs, scored.top_logprobs, strict=True
    ):
        assert top[0] == (token, logprob)
        assert len(top) == 3
        assert top[0][1] >= top[1][1] >= top[2][1]


def test_the_samplers_of_llama_cpp_change_the_answer(llm: LLM) -> None:
    drawn = {"temperature": 1.5, "seed": 4, "max_tokens": 24}
    plain = of(llm, COLOURS, **drawn)
    for settings in (
        {"top_n_sigma": 0.5},
        {"typical_p": 0.2},
        {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    ):
        changed = of(llm, COLOURS, **drawn, **settings)
        assert changed.token_ids != plain.token_ids, settings
        assert changed.token_ids == of(llm, COLOURS, **drawn, **settings).token_ids
    again = "one two three four five one two three four five one two three"
    said = of(llm, again, max_tokens=8)
    assert "one two" in said.text
    assert "one two" not in of(llm, again, max_tokens=8, dry_multiplier=9, dry_base=4).text


def test_the_scores_of_a_prompt_are_those_of_its_beginnings(llm: LLM) -> None:
    """Each token as likely as if it had been drawn after those before it: by ==."""
    prompt = of(llm, COLOURS, max_tokens=24).token_ids
    plain = of(llm, prompt)
    scored = of(llm, prompt, prompt_logprobs=20, n=2)
    assert scored.token_ids == plain.token_ids
    assert scored.others[0].prompt_logprobs == plain.prompt_logprobs == ()
    assert [score.token for score in scored.prompt_logprobs] == list(prompt[1:])
    assert scored.receipt.cached_tokens == 0
    for length, score in enumerate(scored.prompt_logprobs, 1):
        (top,) = of(llm, prompt[:length], max_tokens=1, logprobs=20).top_logprobs
        assert score.top == top
        if score.token in dict(top):
            assert score.logprob == dict(top)[score.token]
            assert top[score.rank - 1][0] == score.token
    assert of(llm, prompt, prompt_logprobs=0).prompt_logprobs == tuple(
        score._replace(top=()) for score in scored.prompt_logprobs
    )


def test_a_session_scores_no_prompt(llm: LLM) -> None:
    with llm.session(POEM) as session, pytest.raises(InvalidRequest, match="prompt_logprobs"):
        session.generate("", SamplingParams(prompt_logprobs=1))
