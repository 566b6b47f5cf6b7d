"""Which branch of a request starts when, and from whose blocks."""

from octavo.core.policy import crowds
from octavo.core.prefix_cache import Context
from octavo.core.request import Request, Sampling
from octavo.core.sequence import Sequence
from octavo.core.siblings import Siblings


def siblings(count: int, prompt: tuple[int, ...] = (1, 2, 3)) -> Siblings:
    def sequence_of(request: Request, number: int) -> Sequence:
        return Sequence(
            request,
            order=0,
            context=Context(),
            block_size=4,
            groups=1,
            now=0.0,
            number=number,
        )

    sampling = Sampling(temperature=1.0, branch=5)
    request = Request(id="a", prompt=prompt, max_tokens=4, branches=count, sampling=sampling)
    return Siblings(request, sequence_of)


def run(sequence: Sequence, computed: int) -> None:
    sequence.admit(row=0, cached=computed, now=0.0)


def test_a_request_splits_into_one_a_branch() -> None:
    whole = Request(id="a", prompt=(1,), max_tokens=4, branches=3, sampling=Sampling(branch=2))
    parts = whole.split()
    assert [part.sampling.branch for part in parts] == [2, 3, 4]
    assert {part.branches for part in parts} == {1}
    assert parts[0].split() == parts[:1]


def test_they_are_named_and_ranked_in_order() -> None:
    family = list(siblings(3))
    assert [one.id for one in family] == ["a", "a#1", "a#2"]
    assert [one.rank for one in family] == sorted(one.rank for one in family)


def test_the_next_starts_when_all_that_started_have_the_prompt() -> None:
    family = siblings(3)
    first = family.next()
    assert first is not None
    assert family.next() is None
    run(first, computed=1)
    assert family.next() is None
    first.computed = 2
    second = family.next()
    assert second is not None
    assert family.next() is None
    family.remove(second)
    third = family.next()
    assert third is not None
    assert (third.number, list(family)) == (2, [first, third])
    first.preempt()
    assert family.next() is None


def test_when_the_first_has_gone_the_next_takes_its_place() -> None:
    family = siblings(2, prompt=(1,))
    first = family.next()
    assert first is not None
    assert family.next() is None
    family.remove(first)
    assert family.next() is not None
    assert family.next() is None


def test_the_parent_is_who_runs_and_has_most_in_common() -> None:
    family = siblings(4)
    first = family.next()
    assert first is not None
    assert family.parent_of(first) is None
    run(first, computed=2)
    second = family.next()
    assert second is not None
    assert family.parent_of(second) is first
    run(second, computed=0)
    assert family.parent_of(second) is first
    first.preempt()
    second.computed = 1
    assert family.parent_of(first) is second


def test_one_is_found_by_the_number_its_events_carry() -> None:
    family = siblings(3)
    family.next()
    assert [one.number for one in family.of(None)] == [0, 1, 2]
    assert [one.number for one in family.of(6)] == [1]
    assert family.of(0) == ()


def test_half_of_what_runs_is_a_crowd() -> None:
    assert not crowds(siblings=3, running=7)
    assert crowds(siblings=4, running=8)
    assert crowds(siblings=0, running=0)
