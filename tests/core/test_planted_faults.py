"""The harness can fail: of the bugs that paged engines have had, each one is found when planted."""

from dataclasses import fields, replace
from random import Random

import pytest
from tests.core.planted import WRONG_BOOKS, WRONG_CONTENT, Patch
from tests.core.serving import random_run
from tests.core.small_world import explore
from tests.core.worlds import GROUPS, PINS, SWAPS, TROUBLES

from octavo.core.block_manager import BlockManager
from octavo.core.prefix_cache import Context, PrefixCache
from octavo.core.request import Request
from octavo.core.sequence import Sequence

RUNS = 60
MORE_RUNS = 400
"""For a fault that shows in one of many: some show in one of thirty."""
WORLDS = (
    replace(PINS, requests=PINS.requests[:2], troubles=0),
    GROUPS,
    replace(SWAPS, cancels=False),
    TROUBLES,
)


def catches(seed: int, more_runs: int = 0) -> str | None:
    """What is found wrong with the core as it is now; None for nothing.

    Contexts that differ in one field, random traffic, then small worlds: the quickest first.
    """
    try:
        share_nothing_across_contexts()
        for run in range(RUNS):
            random_run(Random(f"{seed} {run}"))
        for world in WORLDS:
            explore(world, limit=10_000)
        for run in range(RUNS, RUNS + more_runs):
            random_run(Random(f"{seed} {run}"))
    except (TypeError, AttributeError):
        raise  # a patch that does not fit the core any more
    except Exception as found:
        return f"{type(found).__name__}: {found}"
    return None


def share_nothing_across_contexts() -> None:
    """What was computed in one context is found in that one, and in none that differs from it."""
    cache = PrefixCache(block_size=2)
    manager = BlockManager(blocks=8, block_size=2, cache=cache)
    first = Context(model="m", layout="l", adapter="a", salt="s", attachments=("t",))
    others = [
        replace(first, **{one.name: ("u",) if one.name == "attachments" else "u"})
        for one in fields(Context)
    ]
    for context, cached in ((first, 0), (first, 4), *((other, 0) for other in others)):
        sequence = Sequence(
            Request(id="a", prompt=(1, 2, 3, 4, 5), max_tokens=1),
            order=0,
            context=context,
            block_size=2,
            groups=1,
            now=0.0,
        )
        admission = manager.admit(sequence, 0, chunk=9, upto=5, headroom=0)
        assert admission.cached_tokens == cached, f"{context} after {first}"
        sequence.admit(row=0, cached=admission.cached_tokens, now=0.0)
        if context is first:
            sequence.computed = sequence.scheduled = 5
            manager.seal(sequence)
        manager.release(sequence)


def test_a_sound_core_is_found_sound(seed: int) -> None:
    assert catches(seed) is None


@pytest.mark.parametrize("fault", [*WRONG_CONTENT, *WRONG_BOOKS], ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Patch, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    fault(monkeypatch)
    found = catches(seed, MORE_RUNS)
    assert found is not None
    print(found.splitlines()[0])
