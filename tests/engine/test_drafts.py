"""Drafts change how soon an answer comes, and nothing else.

Guesses come from a draft model, the same network in eight bits, whose KV lies in the blocks of the
model; or from what a text has said before. Through chunks, a warm cache, branches, swaps,
preemptions and several plans in flight the answers, their scores and those of the prompts are
those of an engine without drafts, by ==.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.noisy import LAYOUT, Noise, Noisy
from tests.engine.test_same_tokens import (
    BEST,
    MAX_CONTEXT,
    SEQUENCES,
    Served,
    draft_model,
    mixed_requests,
    name_of,
    write_network,
)

from octavo.core.acceptance import Acceptance
from octavo.core.events import Event, Finished, PromptScored, Token
from octavo.core.invariants import check
from octavo.core.plan import Runner, Span, StepPlan
from octavo.core.request import Request, Sampling
from octavo.core.scheduler import Scheduler
from octavo.models.loader import Model, load_model
from octavo.ops.native import NativeOps
from octavo.runtime.batch import RowTables
from octavo.runtime.draft_model import DraftModel, Filled
from octavo.runtime.storage import KVStorage
from octavo.text.structured import Structured

Told = dict[str, list[object]]


@pytest.fixture(
    scope="module",
    params=[(BEST, "plain"), ("portable", "plain"), (BEST, "int8-kv"), (BEST, "windows")],
    ids="-".join,
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_seed: int
) -> Served:
    isa, kind = request.param
    path = write_network(tmp_path_factory.mktemp("network") / isa, run_seed)
    if kind == "int8-kv":
        return Served(path, isa, kv="int8")
    return Served(path, isa, windows=(20, None, 20) if kind == "windows" else None)


@pytest.fixture(scope="module")
def draft(served: Served) -> Model:
    return load_model(
        served.path,
        NativeOps(threads=2, isa=served.isa),
        2048,
        quantization="int8",
        max_rows=SEQUENCES,
        max_context=MAX_CONTEXT,
    )


@pytest.fixture(scope="module")
def requests(run_seed: int) -> list[Request]:
    """Some in branches, some whose prompts are scored, all that may stop early."""
    found = mixed_requests(run_seed, 500, 24)
    return [
        replace(
            one,
            branches=3 if number % 5 == 0 else 1,
            prompt_logprobs=2 if number % 4 == 1 else None,
        )
        for number, one in enumerate(found)
    ]


@pytest.fixture(scope="module")
def plain(served: Served, requests: list[Request]) -> Told:
    return told_by(served.engine().scheduler, runner_of(served), requests)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three drafts for everybody in each step, whatever they cost."""
    monkeypatch.setattr(Acceptance, "worth", lambda self, price, debt: 3)


def runner_of(served: Served, **sizes: Any) -> Runner:
    runner: Runner = served.engine(**sizes)._runner
    return runner


def told_by(
    scheduler: Scheduler, runner: Runner, requests: Sequence[Request], *, depth: int = 1
) -> Told:
    """All that is told of each branch, with so many plans in flight."""
    told: Told = defaultdict(list)
    flight: deque[StepPlan] = deque()
    for request in requests:
        assert scheduler.submit(request, 0.0) == ()
    step = 0
    while not scheduler.idle:
        step += 1
        plan = scheduler.plan(float(step))
        if plan is not None:
            flight.append(plan)
        if plan is None or len(flight) == depth:
            oldest = flight.popleft()
            tell(told, scheduler.commit(oldest, runner.execute(oldest), step + 0.5))
            check(scheduler)
    return dict(told)


def tell(told: Told, events: Sequence[Event]) -> None:
    for event in events:
        name = name_of(event.request_id, getattr(event, "branch", 0))
        match event:
            case Token():
                told[name].append((event.token, event.logprob, event.top))
            case PromptScored(_, first, scores):
                told[f"prompt of {name}"] += enumerate(scores, first)
            case Finished():
                assert event.reason in ("stop", "length"), event
                told[name].append((event.reason, event.stop_id))


SIZES: dict[str, dict[str, Any]] = {
    "together": {},
    "alone": {"sequences": 1, "blocks": 16},
    "chunks": {"sequences": 12, "tokens": 20},
    "recompute": {"blocks": 14, "preemption": "recompute"},
    "swap": {"blocks": 14, "preemption": "swap", "host_blocks": 60},
    "both": {"blocks": 14, "preemption": "swap", "host_blocks": 6},
}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("eager")
def test_answers_with_a_draft_model_are_the_same(
    served: Served, draft: Model, requests: list[Request], plain: Told, size: str, depth: int
) -> None:
    engine = served.engine(drafts=3, draft=draft, **SIZES[size])
    assert told_by(engine.scheduler, engine._runner, requests, depth=depth) == plain
    status = engine.status()
    if depth == 1:  # with more in flight there is little time to guess in
        assert status.tokens_accepted < status.tokens_drafted
    if depth == 1 and served.windows is None:  # else it sees more than the model
        assert status.tokens_accepted > 0
    assert (status.preemptions > 0) == (size in ("recompute", "swap", "both"))
    assert (status.swaps > 0) == (size in ("swap", "both"))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("eager")
def test_answers_with_prompt_lookup_are_the_same(
    served: Served, requests: list[Request], plain: Told, size: str, depth: int
) -> None:
    engine = served.engine(drafts=3, **SIZES[size])
    assert told_by(engine.scheduler, engine._runner, requests, depth=depth) == plain


def test_answers_are_the_same_by_whatever_is_worth_it(
    served: Served, draft: Model, requests: list[Request], plain: Told
) -> None:
    """Nobody says how many drafts to try but what they cost and bring."""
    engine = served.engine(drafts=8, draft=draft)
    assert told_by(engine.scheduler, engine._runner, requests) == plain


@pytest.mark.usefixtures("eager")
def test_a_warm_cache_has_the_kv_of_the_draft_model_too(
    served: Served, draft: Model, requests: list[Request], plain: Told
) -> None:
    """What it computes to catch up is less the second time, and it guesses as well."""
    engine = served.engine(drafts=3, draft=draft)
    counted = Counting(engine._runner)
    assert told_by(engine.scheduler, counted, requests) == plain
    cold, accepted = counted.positions, engine.status().tokens_accepted
    again = [replace(one, id=f"again {one.id}") for one in requests]
    warm = told_by(engine.scheduler, counted, again)
    assert {name.replace("again ", ""): said for name, said in warm.items()} == plain
    assert engine.status().prefix_tokens_hit > 0
    assert counted.positions - cold < cold
    assert engine.status().tokens_accepted > accepted > 0


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("size", ["together", "swap"])
def test_the_model_is_its_own_best_draft_model(
    served: Served, requests: list[Request], size: str
) -> None:
    """Each guess without penalties and the like is right: so nowhere, after a chunk, a hit, a copy
    or a swap, is its KV that of other tokens."""
    if served.windows is not None:
        pytest.skip("a draft model sees every position")
    plain = [
        replace(one, sampling=replace(DRAWN, seed=number) if number % 2 else Sampling())
        for number, one in enumerate(requests)
    ]
    engine = served.engine(drafts=3, draft=served.model(2)[1], sequences=8, **SIZES[size])
    twice = [*plain, *(replace(one, id=f"again {one.id}") for one in plain)]
    told_by(engine.scheduler, engine._runner, twice)
    status = engine.status()
    ends = sum(one.branches for one in twice)
    assert status.tokens_accepted > 2 * ends
    assert status.tokens_drafted - status.tokens_accepted <= 3 * ends, "but at the end of an answer"


DRAWN = Sampling(temperature=0.9, top_p=0.95)


class Counting:
    """Counts what rounds of guesses compute."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.positions = 0

    def execute(self, plan: StepPlan) -> Any:
        result = self._runner.execute(plan)
        self.positions += sum(positions for positions, _ in result.rounds)
        return result


@pytest.mark.usefixtures("eager")
def test_tokens_after_guesses_have_the_probabilities_of_the_model(
    served: Served, draft: Model, seed: int
) -> None:
    """Chi-square over every place where many draws stand after the same tokens, the first draw of
    an answer left out: that one is never a guess."""
    prompt = tuple(int(token) for token in np.random.default_rng(seed).integers(3, 500, 9))
    drawn = Sampling(temperature=1.0, top_k=4)
    requests = [
        Request(
            id=str(number),
            prompt=prompt,
            max_tokens=3,
            sampling=replace(drawn, seed=number),
            top_logprobs=4,
        )
        for number in range(1500)
    ]
    engine = served.engine(drafts=2, draft=draft, sequences=8)
    told = told_by(engine.scheduler, engine._runner, requests)
    assert engine.status().tokens_accepted > 200
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    chances: dict[tuple[int, ...], dict[int, float]] = {}
    for answer in told.values():
        tokens = tuple(token for token, *_ in answer[:3])
        for place in (1, 2):
            counts[tokens[:place]][tokens[place]] += 1
            top = {token: math.exp(value) for token, value in answer[place][2]}
            chances[tokens[:place]] = {one: top[one] / sum(top.values()) for one in top}
    statistic, freedom = 0.0, 0
    for before, found in counts.items():
        expected = {one: found.total() * chance for one, chance in chances[before].items()}
        if min(expected.values()) >= 5:
            statistic += sum((found[one] - n) ** 2 / n for one, n in expected.items())
            freedom += len(expected) - 1
        assert found.keys() <= expected.keys()
    assert freedom >= 3
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), f"{statistic} with {freedom}"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("blocks", [512, 40])
def test_a_grammar_is_kept_beside_a_draft_model(blocks: int) -> None:
    """The draft model knows nothing of grammars; what they forbid is no guess."""
    noisy = Noisy()
    asked = [
        *(noisy.ask(f"free {number}", temperature=0.8, min_tokens=3) for number in range(6)),
        *(
            noisy.ask(f"bound {number}", structured=Structured(regex="[a-z]{4,40}"), n=2)
            for number in range(4)
        ),
    ]
    whole = noisy.answers(*asked)
    sizes = {"rows": 64, "max_tokens": 512, "max_context": 2048}
    storage = KVStorage(LAYOUT, blocks)
    guesser = DraftModel(Noise(0), NativeOps(threads=1), storage, KVStorage(LAYOUT, 0), **sizes)
    guessing = Noisy(drafts=3, blocks=blocks, guesser=guesser)
    assert guessing.answers(*asked) == whole
    counters = guessing.engine.scheduler.counters
    assert 0 < counters.tokens_accepted < counters.tokens_drafted


def test_what_stands_in_a_block_is_known_by_position() -> None:
    filled, table = Filled(blocks=9, slots=1, block_size=4), np.array([3, 5, 8], np.int32)
    assert filled.reach(table, 11) == 0
    filled.fill(table, 0, 10)
    assert [filled.reach(table, upto) for upto in (3, 8, 10, 12)] == [3, 8, 10, 10]
    filled.cut(table, 6, 7)
    assert filled.reach(table, 12) == 6
    filled.fill(table, 6, 12)
    assert filled.reach(table, 12) == 12
    filled.cut(table, 4, 12)
    assert filled.reach(table, 12) == 4


def test_a_draft_model_guesses_within_its_own_context(tmp_path: Path, run_seed: int) -> None:
    """Where that is shorter than the model's it is silent beyond, and nothing else changes."""
    served = Served(write_network(tmp_path / "network", run_seed), BEST)
    ops, model = served.model(2)
    guesser = draft_model(model, ops, "bfloat16", 20, 0, 4)
    guesser._max_context = 12
    tables = RowTables(rows=4, width=16, groups=1)
    guesser.bind(0, Request(id="a", prompt=(5,) * 10, max_tokens=9), (5,) * 14)
    near, far = Span(0, 9, 10, (5,), True, 4), Span(0, 13, 14, (5,), True, 4)
    assert len(guesser.guess([near], tables)[0]) == 2
    assert guesser.guess([far], tables) == [()]
    assert guesser.rounds == ()
