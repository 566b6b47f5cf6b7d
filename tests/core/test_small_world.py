"""Small worlds, searched whole: in no state is an invariant broken, and every request ends.

`make soak` searches each world in many sizes; here each is searched in one.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from tests.core.small_world import Broken, World, explore
from tests.core.soak import SOAK
from tests.core.worlds import GROUPS, PRIORITIES, WORLDS

from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence

LIMIT = 20_000
"""States of one world; one that grows beyond has something in its state that has no end."""


def sizes_of(world: World) -> Iterator[World]:
    """The same world with other pools, budgets and numbers of plans in flight."""
    for change, tokens, depth in product((-1, 0, 1), (1, 4), (1, 2)):
        limits = replace(world.setup.limits, tokens=tokens)
        setup = replace(world.setup, blocks=world.setup.blocks + change, limits=limits)
        yield replace(world, setup=setup, depth=depth, cancels=True)


@pytest.mark.parametrize("name", WORLDS)
def test_a_small_world_has_no_bad_state(name: str) -> None:
    """Audited in every state; nothing is left of a request that has ended; plans and commits alone
    lead from every state to the end of every request, whichever way the steps go."""
    worlds = list(sizes_of(WORLDS[name])) if SOAK else [WORLDS[name]]
    for world in worlds:
        explored = explore(world, limit=100 * LIMIT if SOAK else LIMIT)
        print(f"{name}: {explored} of {world.setup}, {world.depth} plans in flight", flush=True)
        assert explored.states > 100 or SOAK, "the world is too small to say anything"
        work = sum(len(one.prompt) + one.max_tokens * one.branches for one in world.requests)
        assert explored.steps <= 4 * work


def test_a_search_tells_the_calls_that_lead_to_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "preempt", lambda sequence, kept: None)
    with pytest.raises(Broken, match="after:\n  Submit.*\n(  .*\n)*  Plan"):
        explore(PRIORITIES)


def test_a_search_finds_steps_that_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step has computed is not taken in: the same step again, and again."""

    def ignores(scheduler: Scheduler, sequence: Sequence, *about: object) -> tuple[object, ...]:
        sequence.scheduled, sequence.length = sequence.computed, len(sequence.tokens)
        sequence.demand = sequence.length - sequence.scheduled
        return ()

    monkeypatch.setattr(Scheduler, "_take_in", ignores)
    with pytest.raises(Broken, match="never end"):
        explore(replace(GROUPS, depth=1), limit=LIMIT)


def test_two_searches_find_the_same() -> None:
    small = replace(PRIORITIES, requests=PRIORITIES.requests[:2])
    assert explore(small) == explore(small)
