"""Misses: every block of a prompt has a reason, which is true, and asking changes nothing."""

from dataclasses import replace
from random import Random

import pytest
from tests.core.canonical import canonical
from tests.core.serving import Serving, Setup, random_run

from octavo.core.events import Admitted, Difference, Evicted, Explanation, Stretch
from octavo.core.request import Request

SETUP = Setup(blocks=16, block_size=4, watermark_blocks=0)
PROMPT = tuple(range(20, 32))


def asked(prompt: tuple[int, ...] = PROMPT, **fields: object) -> Request:
    return Request(id="asked", prompt=prompt, max_tokens=1, **fields)


def served(*requests: Request, setup: Setup = SETUP) -> Serving:
    serving = Serving(setup)
    for number, request in enumerate(requests):
        serving.submit(replace(request, id=f"r{number}"))
        serving.finish()
    return serving


def explained(serving: Serving, request: Request) -> tuple[Stretch, ...]:
    told = serving.scheduler.explain(request, serving.now)
    assert_covers(told)
    return told.stretches


def assert_covers(told: Explanation) -> None:
    """Each block once, in order, and the hits are the tokens found."""
    at = 0
    for stretch in told.stretches:
        assert stretch.start == at < stretch.stop
        at = stretch.stop
    assert at == -(-told.prompt_tokens // told.block_size)
    hits = sum(one.stop - one.start for one in told.stretches if one.why == "hit")
    alike = sum(one.alike for one in told.stretches)
    found = hits * told.block_size + alike
    assert told.cached_tokens in (found, told.prompt_tokens - 1)
    assert told.cached_tokens <= found


def test_what_was_never_there() -> None:
    assert explained(served(), asked()) == (Stretch(0, 3, "never_seen"),)
    assert explained(served(), asked(PROMPT[:3])) == (Stretch(0, 1, "not_full"),)


def test_a_prompt_that_is_there_to_its_end() -> None:
    serving = served(asked())
    told = serving.scheduler.explain(asked(), serving.now)
    assert told == Explanation(12, 11, 4, (Stretch(0, 3, "hit"),), serving.now)
    assert explained(serving, asked((*PROMPT, 1))) == (
        Stretch(0, 3, "hit"),
        Stretch(3, 4, "not_full"),
    )


def test_the_first_token_that_differs_is_told_with_that_of_the_closest_prompt() -> None:
    serving = served(asked((*PROMPT[:8], 1, 2, 3, 4)), asked((*PROMPT[:8], 28, 29, 3, 4)))
    assert explained(serving, asked()) == (
        Stretch(0, 2, "hit"),
        Stretch(2, 3, "partial", 2, Difference(10, 30, 3)),
    )
    assert explained(serving, asked((*PROMPT[:4], 9, 25, 26, 27, *PROMPT))) == (
        Stretch(0, 1, "hit"),
        Stretch(1, 5, "never_seen", 0, Difference(4, 9, 24)),
    )


def test_a_tail_that_begins_like_a_cached_block() -> None:
    assert explained(served(asked()), asked(PROMPT[:11])) == (
        Stretch(0, 2, "hit"),
        Stretch(2, 3, "partial", 2),
    )


def test_what_was_evicted_says_when_and_for_whom() -> None:
    serving = served(asked())
    flood = Request(id="flood", prompt=tuple(range(50, 96)), max_tokens=16)
    serving.submit(flood)
    serving.finish()
    plan = next(
        plan for plan in serving.plans if any(isinstance(d, Evicted) for d in plan.decisions)
    )
    (first, *rest) = explained(serving, asked())
    assert (first.why, first.by) == ("evicted", "flood")
    assert plan.id <= first.plan_id <= serving.plans[-1].id
    assert first.at_s is not None
    assert all(one.why == "evicted" for one in rest)


def test_what_was_flushed_or_given_up() -> None:
    serving = served(asked())
    serving.flush()
    (flushed,) = explained(serving, asked())
    assert (flushed.why, flushed.by, flushed.at_s) == ("flushed", "", serving.now)
    serving = served(asked())
    serving.oracle.failing = {"bad": 13}
    serving.submit(Request(id="bad", prompt=(*PROMPT, 1, 2), max_tokens=2))
    serving.finish()
    (given_up,) = explained(serving, asked())
    assert (given_up.why, given_up.by) == ("distrusted", "bad")


def test_the_same_tokens_under_another_salt() -> None:
    serving = served(asked(PROMPT[:8], salt="theirs"))
    assert explained(serving, asked(salt="ours")) == (
        Stretch(0, 2, "other_salt"),
        Stretch(2, 3, "never_seen"),
    )
    assert "theirs" not in repr(explained(serving, asked(salt="ours")))
    assert explained(serving, asked(salt="theirs"))[0] == Stretch(0, 2, "hit")


@pytest.mark.parametrize(("field", "value"), [("adapter", "x"), ("attachments", ("x",))])
def test_the_same_tokens_in_another_context(field: str, value: object) -> None:
    serving = served(asked())
    own = serving.scheduler._context
    serving.scheduler._context = replace(own, **{field: value})
    other = field.rstrip("s") if field == "adapter" else field
    assert explained(serving, asked()) == (Stretch(0, 3, f"other_{other}"),)


def test_without_the_cache_nothing_is_looked_for() -> None:
    off = (Stretch(0, 3, "cache_off"),)
    assert explained(served(asked()), asked(use_cache=False)) == off
    assert explained(served(asked(), setup=replace(SETUP, cached=False)), asked()) == off


def test_an_admission_says_why_its_hits_end() -> None:
    serving = served(asked(), asked((*PROMPT[:6], 1, 2)), asked(PROMPT[:8]), asked(use_cache=False))
    missed = [decision.missed for decision in serving.of(Admitted)]
    assert missed == [
        Stretch(0, 1, "never_seen"),
        Stretch(1, 2, "partial", 2),
        None,
        None,
    ]
    serving.flush()
    serving.submit(asked())
    serving.step()
    (last,) = [one.missed for one in serving.of(Admitted, "asked")]
    assert last is not None
    assert last.why == "flushed"


def test_asking_changes_nothing_and_is_right(seed: int) -> None:
    """After any traffic: as many tokens are said to be there as an admission finds."""
    random = Random(seed)
    runs = hits = 0
    while runs < 40 or (hits < 6 and runs < 400):
        runs += 1
        serving = random_run(random)
        request = random.choice(list(serving.requests.values()))
        again = replace(request, id="again", emitted=(), after=None, keep=False, pins=())
        before = canonical(serving.scheduler)
        told = serving.scheduler.explain(again, serving.now)
        assert canonical(serving.scheduler) == before
        assert_covers(told)
        serving.submit(again)
        serving.finish()
        for admitted in serving.of(Admitted, "again")[:1]:
            # To the token there are as many, unless the room is short for a copy.
            assert (
                told.cached_tokens >= admitted.cached_tokens > told.cached_tokens - told.block_size
            )
            hits += admitted.cached_tokens > 0
    assert hits > 5
