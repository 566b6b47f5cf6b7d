"""Beams end to end: what transformers finds, what the demo model would find token by token."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.core.beams import Prefix, Scored, Scores, search
from tests.models.hf import logits, random_model

from octavo import LLM, SamplingParams
from octavo.core.block_manager import BlockManager
from octavo.core.budget import Limits
from octavo.core.events import Finished, Token
from octavo.core.plan import StepPlan, StepResult
from octavo.core.prefix_cache import PrefixCache
from octavo.core.request import Beams, Request
from octavo.core.scheduler import Scheduler
from octavo.errors import InvalidRequest
from octavo.ops.reference import ReferenceOps
from octavo.runtime.sampler import Draw, Sampler
from octavo.text.assembler import Delta, Ended

POEM = "Once upon a time"
Model = transformers.PreTrainedModel


class WholePrefixes:
    """A runner that asks a model of transformers for the logits after each prefix, whole."""

    def __init__(self, model: Model, rows: int) -> None:
        self._model = model
        self._tokens: dict[int, list[int]] = {}
        self._requests: dict[int, Request] = {}
        self._sampler = Sampler(ReferenceOps(), max_rows=rows)

    def execute(self, plan: StepPlan) -> StepResult:
        for bind in plan.binds:
            self._requests[bind.row] = bind.request
            self._tokens[bind.row] = [*bind.request.prompt, *bind.answered]
        sampled = [span for span in plan.spans if span.samples]
        for span in plan.spans:
            self._tokens[span.row][span.start : span.stop] = span.tokens
        if not sampled:
            return StepResult(plan.id, ())
        rows = [logits(self._model, self._tokens[span.row][: span.stop])[-1] for span in sampled]
        draws = [Draw(span.row, span.stop, self._requests[span.row]) for span in sampled]
        return StepResult(plan.id, self._sampler.sample(np.stack(rows), draws))


def found_by_core(model: Model, *requests: Request) -> dict[tuple[str, int], list[int]]:
    """The answers of requests that are served together."""
    manager = BlockManager(
        blocks=200, block_size=4, cache=PrefixCache(block_size=4, windows=(None,))
    )
    scheduler = Scheduler(manager, Limits(sequences=40, tokens=400, watermark_blocks=0))
    runner, now = WholePrefixes(model, 40), 0.0
    for request in requests:
        assert scheduler.submit(request, now) == ()
    answers: dict[tuple[str, int], list[int]] = {}
    while not scheduler.idle:
        now += 1.0
        plan = scheduler.plan(now)
        assert plan is not None
        for event in scheduler.commit(plan, runner.execute(plan), now):
            assert isinstance(event, Token | Finished)
            answer = answers.setdefault((event.request_id, event.branch), [])
            if isinstance(event, Token):
                answer.append(event.token)
    return answers


SEARCHES: list[dict[str, Any]] = [
    {"length_penalty": penalty, "early_stopping": early}
    for penalty in (1.0, 0.0, 2.5, -1.0)
    for early in (False, True, "never")
]


PROMPTS = ([1, 7, 9, 3], [4, 4, 8], [6])


@pytest.fixture(scope="module")
def tiny() -> Model:
    return random_model(np.random.default_rng(5), "llama", vocab_size=23)


def searched(model: Model, prompt: list[int], width: int, ends: list[int], **asked: Any) -> Any:
    """What transformers finds: rows of tokens."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=9,
        eos_token_id=ends or None,
        pad_token_id=0,
        do_sample=False,
        **asked,
    )
    return found[:, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def likely(tiny: Model) -> list[int]:
    """Tokens that many beams reach, the most frequent first: as ends they will be met."""
    rows = [row for prompt in PROMPTS for row in searched(tiny, prompt, 5, [])]
    return [token for token, _ in Counter(t for row in rows for t in row[3:8]).most_common()]


@pytest.mark.parametrize("asked", SEARCHES, ids=str)
@pytest.mark.parametrize(("width", "count"), [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_they_are_those_of_transformers(
    tiny: Model, likely: list[int], width: int, count: int, asked: dict[str, Any]
) -> None:
    if width == 1 and asked["early_stopping"] == "never":
        asked = asked | {"early_stopping": True}  # one beam is greedy search there, and ends
    ends = likely[:count]
    requests = [
        Request(
            id=f"{number}",
            prompt=tuple(prompt),
            max_tokens=9,
            min_tokens=number,
            stop_token_ids=frozenset(ends),
            branches=width,
            beams=Beams(width=width, **asked),
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    answers = found_by_core(tiny, *requests)
    lengths = set()
    for number, prompt in enumerate(PROMPTS):
        rows = searched(tiny, prompt, width, ends, min_new_tokens=number, **asked)
        for branch, row in enumerate(rows):
            ours = answers[f"{number}", branch]
            lengths.add(len(ours))
            assert ours == row[: len(ours)]
            assert not any(row[len(ours) :]) or ours[-1] in ends
    assert width == 1 or asked["length_penalty"] > 1 or len(lengths) > 1, (
        "no answer has ended before its length"
    )


@pytest.fixture(scope="module")
def llm(demo_model_path: Path) -> LLM:
    return LLM(str(demo_model_path), max_model_len=256, threads=2)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        status = request.getfixturevalue("llm").status()
        assert (status.running, status.waiting, status.blocks_owned) == (0, 0, 0)


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**({"use_beam_search": True, "n": 3, "max_tokens": 6} | settings))


def token_by_token(llm: LLM, **settings: Any) -> list[Scored]:
    """What a search finds that asks for the likeliest tokens after each prefix, computed anew."""
    asked = params(**settings)
    beams = asked.beams()
    assert beams is not None
    prompt = llm._door.encode(POEM, add_special=True)
    ends = frozenset(llm._door.tokenizer.eos_ids) | frozenset(asked.stop_token_ids)

    def scores_of(answer: Prefix) -> Scores:
        one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, cache="off")
        (alone,) = llm.generate([*prompt, *answer], one, progress=False)
        found: Mapping[int, float] = dict(alone.top_logprobs[0])
        if len(answer) < asked.min_tokens:
            found = {token: score for token, score in found.items() if token not in ends}
        return found

    return search(beams, scores_of, ends=ends, max_tokens=6)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"length_penalty": 0.0, "stop_token_ids": (30, 28), "min_tokens": 3},
        {"n": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "early_stopping": True},
    ],
    ids=str,
)
def test_they_are_those_of_a_search_token_by_token(llm: LLM, settings: dict[str, Any]) -> None:
    """The tokens by ==, whoever shares the batch; the log-probabilities are the model's."""
    other = SamplingParams(temperature=0.0, max_tokens=12)
    alone = llm.generate(POEM, other, progress=False)[0]
    answer, beside = llm.generate([POEM, POEM], [params(logprobs=2, **settings), other])
    assert beside.token_ids == alone.token_ids
    assert beside.logprobs == alone.logprobs
    found = token_by_token(llm, **settings)
    assert [choice.token_ids for choice in answer.choices] == [tokens for _, tokens in found]
    if not settings:
        for choice, (score, _) in zip(answer.choices, found, strict=True):
            assert sum(choice.logprobs) / 6 == pytest.approx(score, abs=1e-5)
    assert all(len(top) == 2 for choice in answer.choices for top in choice.top_logprobs)
    receipts = [choice.receipt for choice in answer.choices]
    assert [one.prompt_tokens > 0 for one in receipts] == [True] + [False] * (len(receipts) - 1)
    assert [one.completion_tokens for one in receipts] == [len(t) for _, t in found]


def test_what_is_edited_is_searched(llm: LLM) -> None:
    """Bias, penalties and masks are in the scores; the log-probabilities stay the model's."""
    plain = llm.generate(POEM, params())[0]
    for edit in (
        {"logit_bias": {plain.token_ids[0]: -100.0}},
        {"bad_words": (plain.text.split()[1],)},
        {"repetition_penalty": 3.0},
        {"presence_penalty": 2.0, "max_tokens": 40},
        {"dry_multiplier": 5.0, "dry_allowed_length": 1, "max_tokens": 64},
        {"allowed_token_ids": tuple(range(300, 400))},
    ):
        found = llm.generate(POEM, params(**edit))[0]
        before = llm.generate(POEM, params(max_tokens=edit.get("max_tokens", 6)))[0]
        assert found.token_ids != before.token_ids, edit
    allowed = llm.generate(POEM, params(allowed_token_ids=tuple(range(300, 400))))[0]
    assert {token for one in allowed.choices for token in one.token_ids} <= set(range(300, 400))


def test_a_stream_says_all_at_the_end(llm: LLM) -> None:
    items = list(llm.stream(POEM, params()))
    (whole,) = llm.generate(POEM, params())
    for branch, choice in enumerate(whole.choices):
        own = [item for item in items if item.branch == branch]
        assert [one.token_ids[0] for one in own if isinstance(one, Delta) and one.token_ids] == (
            list(choice.token_ids)
        )
        assert isinstance(own[-1], Ended)


def test_a_stream_that_is_closed_ends_the_search(llm: LLM) -> None:
    first = llm.stream(POEM, params(max_tokens=4))
    second = llm.stream(POEM, params(max_tokens=60))
    next(first)
    second.close()
    first.close()


def test_a_session_goes_on_from_no_search(llm: LLM) -> None:
    with llm.session(POEM) as session, pytest.raises(InvalidRequest, match="use_beam_search"):
        session.generate("", params(n=1))


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_small_pool_gives_the_same_beams(
    llm: LLM, demo_model_path: Path, preemption: str
) -> None:
    asked = params(n=6, max_tokens=48, num_beam_groups=3, diversity_penalty=3.0)
    (wide,) = llm.generate(POEM, asked)
    small = LLM(
        str(demo_model_path),
        max_model_len=128,
        threads=2,
        kv_cache_memory=f"{9 * 360}KiB",
        preemption=preemption,
        **({"swap_space": "64MiB"} if preemption == "swap" else {}),
    )
    (narrow,) = small.generate(POEM, asked)
    assert small.status().preemptions
    assert [one.token_ids for one in narrow.choices] == [one.token_ids for one in wide.choices]
    assert [one.logprobs for one in narrow.choices] == [one.logprobs for one in wide.choices]
    assert small.status().blocks_owned == 0
