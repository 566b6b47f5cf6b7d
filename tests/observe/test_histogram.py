"""Counting by more bounds than are shown gives what counting by those shown would have given."""

from random import Random

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Theirs

from octavo.observe import buckets
from octavo.observe.histogram import Counted, Histogram, cumulative, nothing


@pytest.mark.parametrize(
    ("ours", "shown"),
    [
        (buckets.REQUEST_S, buckets.VLLM_REQUEST_S),
        (buckets.FIRST_TOKEN_S, buckets.VLLM_FIRST_TOKEN_S),
        (buckets.TOKEN_S, buckets.VLLM_TOKEN_S),
        (buckets.STEP_TOKENS, buckets.VLLM_STEP_TOKENS),
        (buckets.PREEMPTIONS, buckets.VLLM_PREEMPTIONS),
    ],
)
def test_it_counts_as_the_client_library_does(
    ours: buckets.Bounds, shown: buckets.Bounds, seed: int
) -> None:
    random = Random(seed)
    mine = Histogram(ours)
    theirs = Theirs("x", "x", buckets=shown, registry=CollectorRegistry())
    values = [random.choice(shown) for _ in range(50)]  # bounds belong to the bucket below them
    values += [random.expovariate(1 / random.choice(shown)) for _ in range(200)]
    for value in values:
        mine.add(value)
        theirs.observe(value)
    expected = {
        sample.labels["le"]: sample.value
        for metric in theirs.collect()
        for sample in metric.samples
        if sample.name == "x_bucket"
    }
    assert dict(cumulative(mine.counted(), ours, shown)) == expected
    assert mine.counted().total == pytest.approx(sum(values))


def test_several_at_once_are_as_many_one_by_one() -> None:
    one, several = Histogram((1, 2)), Histogram((1, 2))
    for _ in range(3):
        one.add(1.5)
    several.add(1.5, times=3)
    assert one.counted() == several.counted() == Counted((0, 3, 0), 4.5)
    assert one.counted().plus(nothing((1, 2))) == one.counted()


def test_bounds_for_tokens_end_with_the_longest() -> None:
    assert buckets.one_two_five(8192)[-1] == 5000
    assert buckets.one_two_five(1) == (1,)
