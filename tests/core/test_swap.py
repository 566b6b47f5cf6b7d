"""The host arena's books, and what the core does with it."""

from dataclasses import replace
from random import Random

import pytest
from tests.core.serving import Serving, Setup, prompt

from octavo.core import policy
from octavo.core.block_table import ABSENT
from octavo.core.events import Admitted, Deferred, Finished, Preempted
from octavo.core.grants import Admission
from octavo.core.plan import Move
from octavo.core.prefix_cache import Context
from octavo.core.request import Request
from octavo.core.sequence import Sequence
from octavo.core.swap import HostArena, SwapSetup

COSTS = SwapSetup(host_blocks=6, block_bytes=1000, bytes_per_s=1e6, tokens_per_s=100.0)


def request(name: str, length: int, max_tokens: int, **fields: object) -> Request:
    tokens = prompt(Random(name), length)
    return Request(id=name, prompt=tokens, max_tokens=max_tokens, **fields)


# --- the arena


def test_a_slot_for_each_block_at_the_index_where_it_was() -> None:
    arena = HostArena(COSTS)
    swapped = arena.put("a", 9, ((4, 5, 6), (ABSENT, ABSENT, 9)))
    assert swapped == arena.swapped("a")
    assert swapped.tokens == 9
    (first, second) = swapped.slots
    assert second[:2] == (ABSENT, ABSENT)
    assert len({*first, second[2]}) == 4 == len(swapped.live())
    assert (arena.used, arena.room, arena.total) == (4, 2, 6)


def test_slots_are_free_when_neither_a_sequence_nor_a_transfer_needs_them() -> None:
    arena = HostArena(COSTS)
    (slots,) = arena.put("a", 8, ((0, 1, 2, 3, 4, 5),)).slots
    assert arena.in_transfer("a") == 6
    for slot in slots:
        arena.lift(slot)
    assert (arena.in_transfer("a"), arena.used) == (0, 6)
    arena.take("a", slots[2:])
    assert (arena.swapped("a"), arena.used) == (None, 4)
    for slot in slots[2:]:
        arena.lift(slot)
    assert arena.used == 0


def test_one_that_ends_while_its_blocks_leave_frees_the_slots_when_they_have_left() -> None:
    arena = HostArena(COSTS)
    (slots,) = arena.put("a", 8, ((0, 1),)).slots
    arena.drop("a")
    arena.drop("a")
    assert arena.used == 2
    for slot in slots:
        arena.lift(slot)
    assert arena.used == 0


def test_who_lost_one_block_has_lost_all() -> None:
    arena = HostArena(COSTS)
    (slots,) = arena.put("a", 8, ((0, 1),)).slots
    arena.put("b", 8, ((2, 3),))
    arena.lose(slots[1:])
    assert arena.held().keys() == {"b"}


def test_a_block_leaves_and_comes_back() -> None:
    assert COSTS.seconds(3) == pytest.approx(0.006)


# --- the choice


@pytest.mark.parametrize(
    ("preemption", "swap_s", "recompute_s", "mode"),
    [
        ("auto", 1.0, 2.0, "swap"),
        ("auto", 2.0, 1.0, "recompute"),
        ("auto", 1.0, 1.0, "recompute"),
        ("auto", 1.0, None, "swap"),
        ("swap", 2.0, 1.0, "swap"),
        ("recompute", 1.0, 2.0, "recompute"),
        *((preemption, None, 1.0, "recompute") for preemption in ("auto", "swap", "recompute")),
    ],
)
def test_what_costs_less(
    preemption: str, swap_s: float | None, recompute_s: float | None, mode: str
) -> None:
    how = policy.swap_or_recompute(preemption, swap_s=swap_s, recompute_s=recompute_s)  # type: ignore[arg-type]
    assert (how.mode, how.estimates_s) == (mode, (swap_s, recompute_s))


# --- in the core


def crowded(**fields: object) -> Serving:
    """Two that grow, in a pool of six blocks of four: the younger one yields."""
    sizes = {"blocks": 6, "watermark_blocks": 0, "host_blocks": 6, "cached": False, **fields}
    serving = Serving(Setup(block_size=4, **sizes))
    serving.submit(request("old", 7, 17), request("young", 7, 10))
    while not serving.of(Preempted):
        assert not serving.scheduler.idle
        serving.step()
    return serving


def test_the_decisions_say_what_was_moved_and_what_either_way_costs() -> None:
    serving = crowded()
    (preempted,) = serving.of(Preempted)
    # 12 positions in 3 blocks of 20 ms; a token takes 10 ms
    assert preempted == Preempted(
        "young", "old", "swap", 3, 0, 3, pytest.approx(0.06), pytest.approx(0.12)
    )
    plan = serving.plans[-1]
    assert [move.kind for move in plan.moves] == ["out"] * 3
    assert serving.of(Deferred, "old")[-1] == Deferred("old", "in_transfer", 1)
    arena = serving.scheduler.manager.arena
    assert arena is not None
    assert arena.swapped("young").tokens == 12
    serving.finish()
    (_, back) = serving.of(Admitted, "young")
    assert isinstance(back, Admitted)
    assert (back.resumed, back.tokens, back.cached_tokens) == (True, 13, 0)
    assert (back.swapped_tokens, back.blocks_moved, back.blocks_allocated) == (12, 3, 4)
    ending = serving.endings["young"]
    assert isinstance(ending, Finished)
    assert (ending.receipt.swaps, ending.receipt.preemptions) == (1, 1)
    assert ending.receipt.recomputed_tokens == 0
    counters = serving.scheduler.counters
    assert (counters.preemptions_moved, counters.preemptions) == (1, 1)
    assert (counters.tokens_moved_out, counters.tokens_moved_in) == (12, 12)
    assert counters.tokens_computed == 7 + 16 + 7 + 9


@pytest.mark.parametrize("depth", [2, 3])
def test_what_plans_in_flight_compute_is_swapped_too(depth: int) -> None:
    """And the tokens that they promised are waited for."""
    serving = crowded(depth=depth)
    (preempted,) = serving.of(Preempted)
    arena = serving.scheduler.manager.arena
    assert arena is not None
    assert isinstance(preempted, Preempted)
    (young,) = serving.scheduler.waiting
    assert young.promised == depth - 2  # the oldest plan has been committed
    assert arena.swapped("young").tokens == len(young.tokens) + young.promised - 1
    serving.finish()
    assert serving.endings["young"].receipt.recomputed_tokens == 0


def test_nobody_returns_before_all_its_blocks_have_left() -> None:
    """The step that moves them may break yet, and then there is nothing to return with."""
    serving = Serving(
        Setup(
            blocks=20,
            block_size=4,
            sequences=1,
            depth=2,
            cached=False,
            host_blocks=8,
            preemption="swap",
        )
    )
    serving.submit(request("low", 18, 9, priority=1))
    serving.step()
    serving.step()
    serving.submit(request("high", 18, 9))
    while not (plan := serving.launch()).moves:
        serving.land()
    while len(serving.in_flight) > 1:
        serving.land()
    serving.cancel("high")
    assert serving.launch() is None
    assert len(serving.scheduler.waiting) == 1
    while serving.in_flight:
        serving.land()
    back = serving.launch()
    assert back is not None
    assert len([move for move in back.moves if move.kind == "in"]) == len(plan.moves)
    serving.finish()


def test_steps_with_moves_say_nothing_of_how_quickly_kv_is_computed() -> None:
    serving = crowded()
    pace = serving.scheduler.pace
    for _ in range(12):
        before = (pace.base_s, pace.token_s)
        plan = serving.launch()
        assert plan is not None
        serving.now += 1000.0 if plan.moves else 0.0
        serving.land()
        assert not plan.moves or (pace.base_s, pace.token_s) == before
    assert [move.kind for plan in serving.plans for move in plan.moves].count("in")


def test_blocks_that_are_still_cached_are_shared_and_not_moved_back() -> None:
    serving = crowded(cached=True, blocks=7, preemption="swap")
    serving.finish()
    back = serving.of(Admitted, "young")[-1]
    assert isinstance(back, Admitted)
    assert back.cached_tokens % 4 == 0
    assert 0 < back.cached_tokens < back.cached_tokens + back.swapped_tokens
    assert back.blocks_moved == -(-back.swapped_tokens // 4)


def test_what_the_cache_has_in_full_needs_no_move() -> None:
    """Another request computes all that was swapped before its owner comes back."""
    serving = Serving(Setup(blocks=8, block_size=4, host_blocks=8, sequences=1, preemption="swap"))
    low = request("low", 8, 9, priority=1)
    serving.submit(low)
    for _ in range(3):
        serving.step()
    tokens = tuple(serving.tokens["low"])
    serving.submit(replace(low, id="high", prompt=(*low.prompt, *tokens, 1), priority=0))
    serving.finish()
    back = serving.of(Admitted, "low")[-1]
    assert isinstance(back, Admitted)
    assert (back.swapped_tokens, back.blocks_moved) == (0, 0)
    assert back.cached_tokens >= 10


@pytest.mark.parametrize("host_blocks", [0, 1, 2])
def test_what_does_not_fit_the_arena_is_computed_again(host_blocks: int) -> None:
    serving = crowded(host_blocks=host_blocks, preemption="swap")
    (preempted,) = serving.of(Preempted)
    assert isinstance(preempted, Preempted)
    assert (preempted.mode, preempted.swap_s, preempted.blocks_moved) == ("recompute", None, 0)
    serving.finish()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_who_is_cancelled_gives_its_slots_back(steps: int) -> None:
    serving = crowded(depth=2)
    for _ in range(steps):
        serving.step()
    serving.cancel("young")
    serving.finish()


def test_a_step_that_broke_moved_nothing() -> None:
    """Whoever's blocks were to leave in it computes them again; nobody else notices."""
    serving = Serving(
        Setup(blocks=6, block_size=4, watermark_blocks=0, host_blocks=6, cached=False)
    )
    serving.submit(request("old", 7, 17), request("young", 7, 10))
    while not (plan := serving.launch()).moves:
        serving.land()
    serving.in_flight.clear()
    result = replace(serving.oracle.execute(plan), moved=1)
    serving._take(serving.scheduler.commit(plan, result, serving.now))
    arena = serving.scheduler.manager.arena
    assert arena is not None
    assert arena.used == 0
    serving.finish()
    assert serving.endings["young"].receipt.recomputed_tokens > 0


def test_what_plans_in_flight_computed_and_a_broken_step_lost_counts_as_recomputed() -> None:
    serving = Serving(
        Setup(blocks=6, block_size=4, depth=2, watermark_blocks=0, host_blocks=6, cached=False)
    )
    serving.submit(request("old", 7, 17), request("young", 7, 10))
    while not (plan := serving.launch()).moves:
        if len(serving.in_flight) == 2:
            serving.land()
    arena = serving.scheduler.manager.arena
    assert arena is not None
    swapped = arena.swapped("young").tokens
    (young,) = serving.scheduler.waiting
    assert young.promised == 1, "the last of them is in flight"
    serving.land()
    serving.in_flight.remove(plan)
    result = replace(serving.oracle.execute(plan), moved=0)
    serving._take(serving.scheduler.commit(plan, result, serving.now))
    serving.finish()
    assert serving.endings["young"].receipt.recomputed_tokens == swapped


def test_what_is_not_intact_is_not_swapped() -> None:
    """A block that the plan in the making was to copy will not be copied: it holds nothing."""
    manager = Setup(blocks=9, block_size=4, host_blocks=20).manager()
    sequence = Sequence(
        request("a", 9, 4), order=0, context=Context(), block_size=4, groups=1, now=0.0
    )
    admission = manager.admit(sequence, 0, chunk=9, upto=9, headroom=0)
    assert isinstance(admission, Admission)
    sequence.admit(row=0, cached=0, now=0.0)
    sequence.scheduled = 9
    yielded = manager.preempt(sequence, "swap", recompute_s=9.0, intact=False)
    assert (yielded.how.mode, yielded.moves, yielded.blocks) == ("recompute", (), 3)
    assert yielded.how.estimates_s == (None, 9.0)


def test_moves_out_come_before_moves_in() -> None:
    """One comes back while another, of lower priority, yields to a third."""
    for seed in range(40):
        random = Random(seed)
        serving = Serving(
            Setup(blocks=10, block_size=2, host_blocks=20, preemption="swap", watermark_blocks=0)
        )
        for number in range(12):
            priority = random.choice([0, 1, 2])
            length = random.randint(2, 9)
            serving.submit(request(f"{seed} {number}", length, 8, priority=priority))
            serving.step()
        serving.finish()
        for plan in serving.plans:
            kinds = [move.kind for move in plan.moves]
            assert kinds == sorted(kinds, reverse=True)
            assert len({move.slot for move in plan.moves}) == len(kinds)


def test_a_move_is_a_value() -> None:
    assert Move("out", 3, 4) == Move("out", 3, 4) != Move("in", 3, 4)


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_grows_into_what_victims_gave_up_for_another(depth: int) -> None:
    """The blocks that one gave up came back a plan later; the others grew into them, and the next
    one had to go."""
    setup = Setup(blocks=6, block_size=4, watermark_blocks=0, host_blocks=6, preemption="swap")
    serving = Serving(replace(setup, depth=depth, cached=False))
    serving.submit(*(request(name, 7, 9, priority=1) for name in ("a", "b", "c")))
    serving.step()
    serving.submit(request("urgent", 7, 3))
    while not serving.of(Admitted, "urgent"):
        assert not serving.scheduler.idle
        serving.step()
    preempted = [said.request_id for said in serving.of(Preempted)]
    assert preempted == ["c"]
    serving.finish()
