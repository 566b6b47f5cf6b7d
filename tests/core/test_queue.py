"""The queue against a plain list, and what it turns away."""

from random import Random

import pytest
from tests.core.serving import Serving, Setup

from octavo.core.budget import Limits
from octavo.core.events import Refused
from octavo.core.prefix_cache import Context
from octavo.core.queue import Waiting, turned_away
from octavo.core.request import Request
from octavo.core.sequence import Sequence


def sequence(order: int, *, priority: int = 0, tenant: str = "", number: int = 0) -> Sequence:
    request = Request(
        id=str(order), prompt=(1, 2, 3), max_tokens=2, priority=priority, tenant=tenant
    )
    return Sequence(
        request,
        order=order,
        context=Context(),
        block_size=4,
        groups=1,
        now=0.0,
        number=number,
    )


def test_each_lane_is_in_order_whatever_comes_and_goes(seed: int) -> None:
    random, queue, kept = Random(seed), Waiting(), []
    for order in random.sample(range(1000), k=200):
        one = sequence(order, priority=random.choice([0, 1]), tenant=random.choice("ab"))
        if random.random() < 0.3:
            one.take_rank((0, order))
        queue.add(one)
        kept.append(one)
        if random.random() < 0.4:
            gone = kept.pop(random.randrange(len(kept)))
            assert gone in queue
            queue.remove(gone, 0.0)
            assert gone not in queue
        assert len(queue) == len(kept)
        assert set(queue) == set(kept)
        assert queue.tokens == 3 * len(kept)
        lanes = {(s.request.priority, s.request.tenant) for s in kept}
        assert queue.tenants() == {tenant for _, tenant in lanes}
        firsts = [
            min(
                (s for s in kept if (s.request.priority, s.request.tenant) == lane),
                key=lambda s: (s.ticket is None, s.order),
            )
            for lane in lanes
        ]
        assert set(queue.heads()) == set(firsts)


def test_an_equal_sequence_is_not_the_one_that_waits() -> None:
    queue = Waiting()
    queue.add(sequence(1))
    assert sequence(1) not in queue
    with pytest.raises(AssertionError, match="1 does not wait"):
        queue.remove(sequence(1), 0.0)


@pytest.mark.parametrize(
    ("answers", "tokens", "refused"),
    [
        (0, 0, None),
        (7, 90, None),
        (8, 0, "8 answers wait already and 3 come; at most 10 may wait"),
        (1, 91, "91 prompt tokens wait already and 10 come; at most 100 may wait"),
    ],
)
def test_a_request_counts_its_answers_and_its_prompt_once(
    answers: int, tokens: int, refused: str | None
) -> None:
    limits = Limits(sequences=1, tokens=1, waiting=10, waiting_tokens=100)
    request = Request(id="a", prompt=tuple(range(8)), max_tokens=1, branches=3)
    said = turned_away(request, limits, answers=answers, tokens=tokens)
    assert (None if said is None else said.message) == refused


def test_when_nobody_waits_any_request_is_taken() -> None:
    limits = Limits(sequences=1, tokens=1, waiting=1, waiting_tokens=1)
    request = Request(id="a", prompt=tuple(range(8)), max_tokens=1, branches=3)
    assert turned_away(request, limits, answers=0, tokens=0) is None


@pytest.mark.parametrize(("waiting", "tokens"), [(10, None), (None, 60)])
def test_siblings_that_are_held_count_as_waiting(waiting: int | None, tokens: int | None) -> None:
    """Only the first of them stood in the queue, so that a limit of 10 took hundreds of answers."""
    serving = Serving(Setup(sequences=1, tokens=99, waiting=waiting, waiting_tokens=tokens))
    for number in range(12):
        prompt = tuple(range(number, number + 9))
        serving.submit(Request(id=str(number), prompt=prompt, max_tokens=2, branches=4))
    refused = {e.limit for e in serving.endings.values() if isinstance(e, Refused)}
    assert refused == {"waiting" if tokens is None else "waiting_tokens"}
    roster = serving.scheduler.roster
    assert roster.unadmitted == len(roster.waiting) + len(roster.held)
    assert (roster.unadmitted, roster.unadmitted_tokens) == ((8, 24) if waiting else (20, 60))
    serving.finish()
    assert (roster.unadmitted, roster.unadmitted_tokens) == (0, 0)
