"""The door: what a client sent becomes a request, or an error that names the field."""

import random
from typing import Any

import pytest
from tests.text.vocabulary import metadata_of

from octavo.engine.door import Door
from octavo.engine.params import SamplingParams
from octavo.errors import ContextLengthExceeded, InvalidRequest
from octavo.text.tokenizer import Tokenizer

CONTEXT = 64
PADDED = 5
"""Ids that the model has and the tokenizer does not know."""


@pytest.fixture
def door() -> Door:
    return door_of()


def door_of(seed: int | None = None, **metadata: Any) -> Door:
    tokenizer = Tokenizer.from_gguf(metadata_of([]) | metadata)
    vocabulary = tokenizer.vocab_size + PADDED
    return Door(tokenizer, max_model_len=CONTEXT, vocab_size=vocabulary, seed=seed)


def test_text_and_ids_are_the_same_prompt(door: Door) -> None:
    text = door.completion("Zwölf", SamplingParams()).request
    ids = door.completion(list(text.prompt), SamplingParams()).request
    assert ids.prompt == text.prompt
    assert len(text.prompt) == len("Zwölf".encode())
    assert ids.id != text.id


def test_B086_ids_outside_the_vocabulary_are_refused_by_name(door: Door) -> None:
    last = door.vocab_size - 1
    params = SamplingParams(stop_token_ids=(last,))
    assert door.completion([0, last], params).request.prompt == (0, last)
    for wrong in (-1, last + 1, 2**31, 2**63, "abc", 1.5, True, None):
        with pytest.raises(InvalidRequest) as caught:
            door.completion([5, wrong], SamplingParams())  # type: ignore[list-item]
        assert caught.value.param == "prompt"
        assert repr(wrong) in caught.value.message
        with pytest.raises(InvalidRequest) as caught:
            door.completion([5], SamplingParams(stop_token_ids=(wrong,)))  # type: ignore[arg-type]
        assert caught.value.param == "stop_token_ids"
        assert repr(wrong) in caught.value.message
        with pytest.raises(InvalidRequest) as caught:
            door.completion([5], SamplingParams(logit_bias={last: 1, wrong: 1}))  # type: ignore[dict-item]
        assert caught.value.param == "logit_bias"
        assert repr(wrong) in caught.value.message
        with pytest.raises(InvalidRequest) as caught:
            door.completion([5], SamplingParams(allowed_token_ids=(last, wrong)))  # type: ignore[arg-type]
        assert caught.value.param == "allowed_token_ids"
        assert repr(wrong) in caught.value.message


@pytest.mark.parametrize("prompt", ["", []])
def test_B085_an_empty_prompt_is_refused(door: Door, prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        door.completion(prompt, SamplingParams())


def test_an_empty_prompt_is_the_first_token_alone_if_the_model_wants_one() -> None:
    door = door_of(**{"tokenizer.ggml.add_bos_token": True})
    assert door.completion("", SamplingParams()).request.prompt == (1,)


def test_the_context_bounds_prompt_and_answer(door: Door) -> None:
    def asked(length: int, max_tokens: int | None = None) -> int:
        return door.completion(
            [9] * length, SamplingParams(max_tokens=max_tokens)
        ).request.max_tokens

    assert asked(CONTEXT - 1) == 1
    assert asked(10) == CONTEXT - 10
    assert asked(10, CONTEXT - 10) == CONTEXT - 10
    for length, max_tokens, param in (
        (CONTEXT, None, "prompt"),
        (CONTEXT + 1, 1, "prompt"),
        (10, CONTEXT - 9, "max_tokens"),
    ):
        with pytest.raises(ContextLengthExceeded, match=str(CONTEXT)) as caught:
            asked(length, max_tokens)
        assert caught.value.param == param


def test_a_default_limits_the_answer_where_it_fits(door: Door) -> None:
    def limit(length: int, **fields: Any) -> int:
        params = SamplingParams(**fields)
        return door.completion([9] * length, params, default_max_tokens=16).request.max_tokens

    assert limit(3) == 16
    assert limit(CONTEXT - 5) == 5
    assert limit(3, max_tokens=40) == 40
    assert limit(3, min_tokens=30) == 30


def test_min_tokens_must_fit_too(door: Door) -> None:
    with pytest.raises(InvalidRequest, match="only 4 tokens fit") as caught:
        door.completion([9] * (CONTEXT - 4), SamplingParams(min_tokens=5))
    assert caught.value.param == "min_tokens"


def test_B069_every_end_token_of_the_model_and_the_caller_ends_it() -> None:
    door = door_of(**{"tokenizer.ggml.eot_token_id": 2})
    own = SamplingParams(stop_token_ids=(9,), min_tokens=5)
    request = door.completion("x", own).request
    assert request.stop_token_ids == {0, 2, 9}
    assert request.min_tokens == 5
    ignoring = SamplingParams(stop_token_ids=(9,), ignore_eos=True)
    assert door.completion("x", ignoring).request.stop_token_ids == {9}


def test_a_request_without_a_seed_gets_one(door: Door) -> None:
    params = SamplingParams()
    seeds = [door.completion("x", params).request.sampling.seed for _ in range(8)]
    assert len(set(seeds)) == 8
    assert door.completion("x", SamplingParams(seed=4)).request.sampling.seed == 4


def test_drawn_seeds_repeat_if_the_engine_has_a_seed(seed: int) -> None:
    engine_seed = random.Random(seed).randrange(2**63)

    def drawn(engine_seed: int | None) -> list[int]:
        door = door_of(engine_seed)
        return [door.completion("x", SamplingParams()).request.sampling.seed for _ in range(4)]

    assert drawn(engine_seed) == drawn(engine_seed) != drawn(engine_seed + 1)
    assert drawn(None) != drawn(None)


def test_a_model_without_a_template_cannot_chat(door: Door) -> None:
    assert not door.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        door.chat([{"role": "user", "content": "x"}], SamplingParams())


def test_B124_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = door.tokenizer.longest_piece_bytes
    assert longest is not None

    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenised")

    with pytest.raises(ContextLengthExceeded):
        door.completion("x" * (longest * CONTEXT), SamplingParams())
    monkeypatch.setattr(Tokenizer, "encode", encode)
    with pytest.raises(ContextLengthExceeded, match="characters"):
        door.completion("x" * (longest * CONTEXT + 1), SamplingParams())
    with pytest.raises(ContextLengthExceeded):
        door.completion([-1] * 10**6, SamplingParams())


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("most", [0, 5, 20, -1])
def test_how_many_log_probabilities_may_be_asked_for(field: str, most: int) -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of([]))
    size = tokenizer.vocab_size + 3
    door = Door(tokenizer, max_model_len=CONTEXT, vocab_size=size, max_logprobs=most)
    allowed = size if most < 0 else most
    for count in (0, allowed, *([-1] if most < 0 else [])):
        request = door.completion([7, 8], SamplingParams(**{field: count})).request
        seen = {"logprobs": request.top_logprobs, "prompt_logprobs": request.prompt_logprobs}
        assert seen[field] == (size if count < 0 else count)
    for count in (allowed + 1, *([-1] if most >= 0 else [])):
        with pytest.raises(
            InvalidRequest, match=f"{field} must be at most {allowed} here"
        ) as error:
            door.completion([7, 8], SamplingParams(**{field: count}))
        assert error.value.param == field
