"""What requests write to their logits: penalties and biases, by their definitions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.runtime.test_runner import Successor, make_runner, plan
from tests.runtime.test_sampler import deviation, softmax

from octavo.core.plan import Bind, RowFailed, Sampled, Span, TableWrite
from octavo.core.request import Penalty, Request, Sampling
from octavo.ops.native import NativeOps
from octavo.ops.reference import ReferenceOps
from octavo.runtime.edits import Edits, History
from octavo.runtime.sampler import Draw, Sampler

VOCABULARY = 40


def asking(prompt: Sequence[int] = (1, 2), **sampling: object) -> Request:
    return Request(id="r", prompt=tuple(prompt), max_tokens=99, sampling=Sampling(**sampling))  # type: ignore[arg-type]


def draw(request: Request, answered: Sequence[int] = (), row: int = 0) -> Draw:
    edits = Edits.of(Bind(row, request, tuple(answered)))
    return Draw(row, len(request.prompt) + len(answered), request, edits)


def sampled(logits: np.ndarray, draws: Sequence[Draw]) -> list[Sampled]:
    outcomes = Sampler(ReferenceOps(), max_rows=64).sample(logits, draws)
    assert all(isinstance(outcome, Sampled) for outcome in outcomes)
    return [outcome for outcome in outcomes if isinstance(outcome, Sampled)]


def penalised(logits: np.ndarray, request: Request, answered: Sequence[int]) -> np.ndarray:
    """The definitions of vLLM and transformers, token by token."""
    penalty, out = request.sampling.penalty or Penalty(), logits.astype(np.float64)
    for token, bias in request.sampling.logit_bias:
        out[token] += bias
    for token in {*request.prompt, *answered}:
        out[token] = (
            out[token] / penalty.repetition if out[token] > 0 else out[token] * penalty.repetition
        )
    for token, count in Counter(answered).items():
        out[token] -= penalty.frequency * count + penalty.presence
    return out


PENALTIES = (
    Penalty(repetition=1.5),
    Penalty(repetition=0.6),
    Penalty(presence=1.2),
    Penalty(presence=-1.2),
    Penalty(frequency=0.4),
    Penalty(frequency=-0.4),
    Penalty(repetition=1.2, presence=0.5, frequency=0.3),
)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_likeliest_is_that_of_the_penalised_logits(
    rng: np.random.Generator, penalty: Penalty
) -> None:
    changed = 0
    for _ in range(30):
        logits = (rng.standard_normal(VOCABULARY) * 2).astype(np.float32)
        prompt = rng.integers(VOCABULARY, size=rng.integers(1, 30)).tolist()
        answered = rng.integers(VOCABULARY, size=rng.integers(0, 30)).tolist()
        bias = tuple((int(token), float(rng.uniform(-3, 3))) for token in rng.permutation(40)[:4])
        request = asking(prompt, penalty=penalty, logit_bias=bias)
        expected = int(penalised(logits, request, answered).argmax())
        (outcome,) = sampled(logits[None].copy(), [draw(request, answered)])
        assert outcome.token == expected
        exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
        assert outcome.logprob == pytest.approx(exact[outcome.token], abs=1e-4)
        changed += expected != logits.argmax()
    assert changed


def test_draws_follow_the_softmax_of_the_penalised_logits(rng: np.random.Generator) -> None:
    logits = rng.standard_normal(50).astype(np.float32)
    request = asking(
        (1, 2, 3), temperature=1.0, seed=3, penalty=Penalty(repetition=1.8, frequency=0.7)
    )
    answered = [7, 8, 7, 7, 9]
    draws = [replace(draw(request, answered), position=8 + index) for index in range(4000)]
    for one in draws:  # each at a position of its own, as if it were the next
        assert one.edits is not None
        one.edits.length = one.position
    outcomes = Sampler(ReferenceOps(), max_rows=4000).sample(np.tile(logits, (4000, 1)), draws)
    tokens = [outcome.token for outcome in outcomes if isinstance(outcome, Sampled)]
    counts = np.bincount(tokens, minlength=50)
    assert deviation(counts, softmax(penalised(logits, request, answered))) < 5


def test_B086_a_bias_of_100_decides(rng: np.random.Generator) -> None:
    logits = (rng.standard_normal(VOCABULARY) * 2).astype(np.float32)
    best, worst = int(logits.argmax()), int(logits.argmin())
    for sampling in ({}, {"temperature": 1.0, "seed": 5}):
        forced = asking(logit_bias=((worst, 100.0),), **sampling)
        assert sampled(logits[None].copy(), [draw(forced)])[0].token == worst
        banned = asking(logit_bias=((best, -100.0),), **sampling)
        draws = [draw(replace(banned, prompt=tuple(range(1, n)))) for n in range(2, 50)]
        outcomes = sampled(np.tile(logits, (len(draws), 1)), draws)
        assert best not in {outcome.token for outcome in outcomes}


def test_a_history_counts_each_token(rng: np.random.Generator) -> None:
    prompt = rng.integers(300, size=500).tolist()
    answer = rng.integers(300, size=700).tolist()
    for penalty in (Penalty(repetition=2.0), Penalty(presence=1.0)):
        history, known = History(penalty, prompt, answer[:200]), len(answer[:200])
        for token in answer[known:]:
            history.append(token)
        counts = Counter(answer)
        seen = {*answer, *(prompt if penalty.repetition != 1 else ())}
        assert dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True)) == {
            token: counts[token] for token in seen
        }
        assert all(history.ids[history.slot(token)] == token for token in seen)
        assert history.slot(999) is None


def test_a_draw_out_of_step_with_its_history_is_an_error() -> None:
    one = draw(asking(penalty=Penalty(presence=1.0)))
    with pytest.raises(AssertionError, match="2 tokens before position 5"):
        sampled(np.zeros((1, VOCABULARY), np.float32), [replace(one, position=5)])


@pytest.mark.parametrize("native", [False, True])
def test_B065_neighbours_do_not_matter(rng: np.random.Generator, native: bool) -> None:
    """Rows with and without, in any order: to each what it gets alone, and no bit of the logits of
    those that ask for nothing changes."""
    ops = NativeOps(threads=2) if native else ReferenceOps()
    logits = (rng.standard_normal((12, VOCABULARY)) * 2).astype(np.float32)
    requests = [
        asking(
            rng.integers(VOCABULARY, size=9).tolist(),
            temperature=float(rng.choice([0.0, 1.0])),
            seed=number,
            penalty=PENALTIES[number % 7] if number % 3 else None,
            logit_bias=((number, 2.0),) if number % 2 else (),
        )
        for number in range(12)
    ]
    draws = [draw(one, [3, 4, 3], row) for row, one in enumerate(requests)]
    alone = [
        Sampler(ops, max_rows=1).sample(logits[[row]].copy(), [draws[row]])[0] for row in range(12)
    ]
    order = rng.permutation(12)
    mixed = logits[order].copy()
    together = Sampler(ops, max_rows=12).sample(mixed, [draws[row] for row in order])
    assert list(together) == [alone[row] for row in order]
    for place, row in enumerate(order):
        same = (mixed[place] == logits[row]).all()
        assert same or requests[row].sampling.penalty or requests[row].sampling.logit_bias


def test_only_allowed_tokens_are_drawn(rng: np.random.Generator) -> None:
    logits = (rng.standard_normal(VOCABULARY) * 2).astype(np.float32)
    order = np.argsort(-logits).tolist()
    allowed = (order[20], order[9], order[30])
    bias = ((order[30], 0.5),)
    greedy = asking(allowed_token_ids=allowed)
    (outcome,) = sampled(logits[None].copy(), [draw(greedy)])
    assert outcome.token == order[9]
    assert outcome.logprob == pytest.approx(float(np.log(softmax(logits)[order[9]])), abs=1e-4)
    asked = [
        draw(asking(allowed_token_ids=allowed, temperature=1.0, seed=seed, logit_bias=bias))
        for seed in range(3000)
    ]
    outcomes = Sampler(ReferenceOps(), max_rows=3000).sample(np.tile(logits, (3000, 1)), asked)
    counts = np.bincount([one.token for one in outcomes], minlength=VOCABULARY)  # type: ignore[union-attr]
    expected = np.zeros(VOCABULARY)
    expected[list(allowed)] = softmax(penalised(logits, greedy, [])[list(allowed)] + [0, 0, 0.5])
    assert deviation(counts, expected) < 5


def test_a_bad_word_is_never_completed() -> None:
    """Of several tokens only the last is banned, and only after the others, in the answer."""
    logits = np.zeros(VOCABULARY, np.float32)
    logits[7], logits[8] = 5.0, 4.0
    request = asking((1, 5, 6), bad_words=((9,), (5, 6, 7), (6, 6, 7), (6, 8)))
    for answered, expected in (
        ([], 7),  # what stands in the prompt does not count
        ([6], 7),
        ([5], 7),
        ([5, 6], 0),  # 8 too
        ([4, 6], 7),
        ([6, 6], 0),
        ([5, 6, 0], 7),
    ):
        (outcome,) = sampled(logits[None].copy(), [draw(request, answered)])
        assert outcome.token == expected, answered
    logits[9] = 9.0
    assert sampled(logits[None].copy(), [draw(request)])[0].token == 7


def test_a_bad_word_is_followed_while_it_is_answered(rng: np.random.Generator) -> None:
    words = tuple(tuple(rng.integers(4, size=n).tolist()) for n in (2, 3, 3, 4))
    edits = Edits.of(Bind(0, asking(bad_words=words)))
    assert edits is not None
    answer: list[int] = []
    for token in rng.integers(4, size=500).tolist():
        fresh = Edits.of(Bind(0, asking(bad_words=words), tuple(answer)))
        assert fresh is not None
        expected = sorted(
            word[-1] for word in words if tuple(answer[-len(word) + 1 :]) == word[:-1]
        )
        for one in (edits, fresh):
            assert one.bad_words is not None
            assert sorted(one.bad_words.banned()) == expected
        edits.append(token)
        answer.append(token)


def test_B064_what_pads_a_row_is_no_token_of_it() -> None:
    """Rows of 3 and of 50 tokens, penalties in one only, and the tokens 0 and the last likely."""
    logits = np.zeros((2, VOCABULARY), np.float32)
    logits[:, 0], logits[:, VOCABULARY - 1] = 3.0, 2.9
    short = draw(asking((1, 2, 3), penalty=Penalty(repetition=9.0, presence=2.0)), row=0)
    long = draw(Request(id="l", prompt=(0, VOCABULARY - 1) * 25, max_tokens=9), row=1)
    for order in ([short, long], [long, short]):
        assert [outcome.token for outcome in sampled(logits.copy(), order)] == [0, 0]


def test_B067_whoever_leaves_takes_nothing_along(rng: np.random.Generator) -> None:
    """Rows come and go between the steps of one with a penalty."""
    logits = (rng.standard_normal((6, 4, VOCABULARY)) * 2).astype(np.float32)
    request = asking((1, 2), penalty=Penalty(repetition=1.3, frequency=1.0))
    alone, answered = [], list[int]()
    for step in range(6):
        answered.append(sampled(logits[step, :1].copy(), [draw(request, answered)])[0].token)
    kept = draw(request)
    for step, others in enumerate((3, 1, 0, 2, 0, 3)):
        one = replace(kept, position=2 + step)
        more = [draw(asking((step,), penalty=PENALTIES[n]), row=n + 1) for n in range(others)]
        token = sampled(logits[step, : 1 + others].copy(), [one, *more])[0].token
        alone.append(token)
        assert kept.edits is not None
        kept.edits.append(token)
    assert alone == answered


def greedy_alone(request: Request, count: int) -> list[int]:
    """What `Successor` is followed by under the request's penalties."""
    answered: list[int] = []
    for _ in range(count):
        last = (*request.prompt, *answered)[-1]
        logits = np.zeros(32)
        logits[(last + 1) % 32] = 5.0
        answered.append(int(penalised(logits, request, answered).argmax()))
    return answered


def test_the_runner_keeps_the_history_of_each_row() -> None:
    """Two rows, one with a penalty; it leaves, comes back to another row, and goes on."""
    runner, _, _ = make_runner()
    penalty = Penalty(presence=2.0, repetition=1.9)
    asked = asking((4, 5, 3), penalty=penalty, logit_bias=((20, 4.0),))
    plain = Request(id="p", prompt=(8,), max_tokens=99)
    expected = greedy_alone(asked, 6)
    assert expected[:2] == [20, 21]  # not 4, which the prompt has
    tables = [TableWrite(row, 0, 0, (row,)) for row in range(3)]
    answers: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def step(number: int, binds: Sequence[Bind], *spans: Span) -> None:
        for outcome in runner.execute(
            plan(number, binds=binds, writes=tables, spans=spans)
        ).outcomes:
            assert isinstance(outcome, Sampled)
            answers[outcome.row].append(outcome.token)

    step(
        0, [Bind(0, plain), Bind(1, asked)], Span(0, 0, 1, (8,), True), Span(1, 0, 2, (4, 5), False)
    )
    step(1, [], Span(1, 2, 3, (3,), True), Span(0, 1, 2, (9,), True))
    step(2, [], Span(1, 3, 4, (), True))
    step(3, [], Span(1, 4, 5, (answers[1][-1],), True))
    assert answers == {0: [9, 10], 1: expected[:3], 2: []}
    back = Bind(2, asked, tuple(answers[1]))
    step(4, [back, Bind(1, plain)], Span(2, 5, 6, (expected[2],), True), Span(1, 0, 1, (8,), True))
    step(5, [], Span(1, 1, 2, (9,), True), Span(2, 6, 7, (expected[3],), True))
    assert answers[2] == expected[3:5]
    assert answers[1] == [*expected[:3], 9, 10]


def test_a_row_that_fails_leaves_the_history_of_others() -> None:
    runner, network, _ = make_runner()
    assert isinstance(network, Successor)
    asked = asking((1, 2, 3), penalty=Penalty(presence=9.0))
    network.broken_token = 8
    binds = [Bind(0, asked), Bind(1, replace(asked, id="b", prompt=(8,)))]
    tables = [TableWrite(row, 0, 0, (row,)) for row in range(2)]
    result = runner.execute(
        plan(
            0,
            binds=binds,
            writes=tables,
            spans=[Span(1, 0, 1, (8,), True), Span(0, 0, 3, (1, 2, 3), True)],
        )
    )
    assert [type(outcome) for outcome in result.outcomes] == [RowFailed, Sampled]
    (second,) = runner.execute(plan(1, spans=[Span(0, 3, 4, (4,), True)])).outcomes
    assert isinstance(second, Sampled)
    assert second.token == 5
