"""Beams: what the search finds, whatever the pool is like and whoever else is served."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tests.core.beams import beams_alone, enumerated, oracle_scores
from tests.core.serving import Serving, Setup, random_request, random_setup

from octavo.core.events import Finished, Preempted, Refused
from octavo.core.request import Beams, Penalty, Request, Sampling
from octavo.units import ceil_div

VOCABULARY = 5
PROMPT = (1000, 1001, 1002, 1003, 1004, 1005)


def random_beams(random: Random) -> Beams:
    groups = random.choice([1, 1, 2, 3])
    return Beams(
        width=groups * random.randint(1, 4),
        length_penalty=random.choice([1.0, 0.0, 2.0, -1.0, 0.5]),
        early_stopping=random.choice([False, True, "never"]),
        groups=groups,
        diversity_penalty=random.choice([0.0, 0.3, 5.0]) if groups > 1 else 0.0,
    )


def searching(request: Request, beams: Beams) -> Request:
    """The same request, which asks for beams."""
    looks_back = request.sampling.penalty is not None
    return replace(
        request,
        beams=beams,
        branches=beams.width,
        sampling=Sampling(penalty=Penalty(presence=1.0) if looks_back else None),
        keep=False,
    )


def random_search(random: Random, name: str, vocabulary: int) -> Request:
    request = searching(random_request(random, name), random_beams(random))
    ends = frozenset(random.choices(range(vocabulary), k=random.randint(0, 2)))
    return replace(request, stop_token_ids=ends)


def disturb(random: Random, serving: Serving) -> None:
    """Something that may happen between two steps."""
    names = sorted({own.id for own in serving.requests.values()})
    what = random.randrange(8)
    if what == 0:
        serving.cancel(random.choice(names), random.choice([None, 0, 1]))
    elif what == 1:
        serving.flush()
    elif what == 2:
        serving.set_limits(sequences=random.randint(1, serving.setup.ceilings().sequences))
    elif what == 3 and not serving.in_flight:
        serving.break_step()
    elif what == 4 and serving.scheduler.running:
        row = random.choice(serving.scheduler.running)
        serving.oracle.failing = {row.request.id: row.length + random.randint(0, 3)}


@pytest.mark.parametrize("seed", range(60))
def test_beams_are_found_in_any_pool_among_any_others(seed: int) -> None:
    random = Random(seed)
    serving = Serving(random_setup(random))
    for number in range(random.randint(2, 6)):
        if random.random() < 0.6:
            serving.submit(random_search(random, f"r{number}", serving.setup.vocabulary))
        else:
            serving.submit(random_request(random, f"r{number}"))
        for _ in range(random.choice([0, 1, 5, 30])):
            if not serving.scheduler.idle:
                serving.step()
            if seed % 3 == 0 and random.random() < 0.1:
                disturb(random, serving)
    serving.finish()


def asking(beams: Beams, **fields: Any) -> Request:
    request = Request(id="a", prompt=PROMPT, max_tokens=6, branches=beams.width, beams=beams)
    return replace(request, **fields)


def found(serving: Serving, request: Request) -> list[tuple[int, ...]]:
    """The answers of a request, the best first."""
    names = [request.id, *(f"{request.id}#{number}" for number in range(1, request.branches))]
    return [tuple(serving.tokens[name]) for name in names]


def served(request: Request, **sizes: Any) -> Serving:
    serving = Serving(Setup(**{"vocabulary": VOCABULARY, "sequences": 200, "tokens": 999} | sizes))
    serving.submit(request)
    serving.finish()
    return serving


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("ends", [frozenset(), frozenset({3})])
def test_a_search_as_wide_as_all_there_is_finds_the_best(
    penalty: float, ends: frozenset[int]
) -> None:
    """As wide as there are prefixes, it leaves nothing out: by enumeration of all answers."""
    beams = Beams(width=125, length_penalty=penalty, early_stopping="never")
    request = asking(beams, max_tokens=3, stop_token_ids=ends)
    serving = served(request, blocks=400)
    best = enumerated(beams, oracle_scores(request, VOCABULARY), ends=ends, max_tokens=3)
    if penalty <= 0 and ends:  # later answers were not looked for once there were enough
        best = best[:1]
    answers = found(serving, request)[: len(best)]
    scores = {tokens: score for score, tokens in best}
    assert len(set(answers)) == len(answers) == min(125, len(best))
    assert [scores.get(one) for one in answers] == [score for score, _ in best]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("width", 1),
        ("length_penalty", 4.0),
        ("early_stopping", True),
        ("early_stopping", "never"),
        ("groups", 2),
    ],
)
def test_each_parameter_changes_what_is_found(field: str, value: Any) -> None:
    changed = 0
    for prompt in range(12):
        plain = asking(
            Beams(width=4), prompt=(2000 + prompt,), stop_token_ids=frozenset({1}), max_tokens=8
        )
        fields = {field: value} | ({"diversity_penalty": 0.7} if field == "groups" else {})
        beams = replace(Beams(width=4), **fields)
        other = replace(plain, beams=beams, branches=beams.width)
        changed += found(served(plain), plain)[0] != found(served(other), other)[0] or (
            found(served(plain), plain)[-1] != found(served(other), other)[-1]
        )
    assert changed


def test_the_length_of_the_prompt_has_no_part_in_a_score() -> None:
    """B052: scores depend on the answer alone. The last token of a prompt is all that differs."""
    beams = Beams(width=3, length_penalty=2.0)
    for length in (1, 500):
        request = asking(beams, prompt=tuple(range(1000, 1000 + length)), max_tokens=5)
        scored = beams_alone(request, VOCABULARY)
        scores_of = oracle_scores(request, VOCABULARY)
        for score, tokens in scored:
            total = sum(scores_of(tokens[:at])[tokens[at]] for at in range(len(tokens)))
            assert score == pytest.approx(total / len(tokens) ** 2)
        assert found(served(request, blocks=999), request) == [tokens for _, tokens in scored]


@pytest.mark.parametrize("block_size", [1, 4])
def test_what_beams_have_in_common_is_there_once(block_size: int) -> None:
    """Never more blocks than the prompt takes once, and each beam for its answer, with the one in
    which that begins."""
    request = asking(Beams(width=6), prompt=tuple(range(1000, 1041)), max_tokens=12)
    serving = Serving(Setup(blocks=300, block_size=block_size, vocabulary=VOCABULARY, tokens=99))
    serving.submit(request)
    common = len(request.prompt) // block_size
    most = 0
    while not serving.scheduler.idle:
        serving.step()
        running = serving.scheduler.running
        length = max((one.length for one in running), default=0)
        tail = ceil_div(length, block_size) - common
        most = max(most, serving.scheduler.manager.pool.owned)
        assert serving.scheduler.manager.pool.owned <= common + len(running) * tail
    serving.assert_at_rest()
    apart = 6 * ceil_div(41 + 11, block_size)
    assert common < most < apart


def test_a_pool_for_one_beam_serves_them_in_turns() -> None:
    """They yield to each other, and find what they find with room for all."""
    request = asking(Beams(width=4), max_tokens=10)
    wide = served(request)
    narrow = served(request, blocks=4, sequences=2, watermark_blocks=0)
    assert found(narrow, request) == found(wide, request)
    assert narrow.of(Preempted)
    assert not wide.of(Preempted)


def test_who_can_never_fit_is_refused() -> None:
    serving = Serving(Setup(blocks=3))
    serving.submit(asking(Beams(width=4), max_tokens=10))
    assert {type(one) for one in serving.endings.values()} == {Refused}


def test_neighbours_get_what_they_get_alone() -> None:
    """The harness compares every answer with the one alone; here with plans in flight."""
    serving = Serving(Setup(blocks=40, depth=3, vocabulary=VOCABULARY))
    serving.submit(asking(Beams(width=4)), Request(id="b", prompt=PROMPT[:5], max_tokens=9))
    serving.submit(asking(Beams(width=2, groups=2, diversity_penalty=1.0), id="c"))
    serving.finish()
    assert len(serving.tokens["b"]) == 9


def test_a_search_ends_as_a_whole() -> None:
    """One of its branches cannot be given up alone, and the failure of a row ends all."""
    for end in ("cancel", "fail"):
        serving = Serving(Setup(vocabulary=VOCABULARY))
        serving.submit(asking(Beams(width=3)))
        for _ in range(3):
            serving.step()
        if end == "cancel":
            serving.cancel("a", 1)
        else:
            serving.oracle.failing = {"a": len(PROMPT)}
        serving.finish()
        reason = "abort" if end == "cancel" else "error"
        assert [one.reason for one in serving.endings.values()] == [reason] * 3  # type: ignore[union-attr]


def test_there_may_be_fewer_answers_than_were_asked_for() -> None:
    serving = served(asking(Beams(width=8), max_tokens=1))
    ends = list(serving.endings.values())
    assert [one.reason for one in ends if isinstance(one, Finished)] == ["length"] * 5 + [
        "error"
    ] * 3
    assert ends[-1].message == "the search has found only 5 different answers"


def test_a_penalty_knows_what_each_beam_has_answered() -> None:
    """The row of a beam is bound again with its own past at each choice: the oracle checks it."""
    request = asking(Beams(width=4), sampling=Sampling(penalty=Penalty(presence=1.0)))
    assert found(served(request), request) == found(served(asking(Beams(width=4))), request)


def test_no_drafts_are_made_for_beams() -> None:
    serving = served(asking(Beams(width=4)), drafts=9)
    assert not serving.scheduler.counters.tokens_drafted
