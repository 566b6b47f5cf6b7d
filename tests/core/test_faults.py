"""Faults that other engines had, as cases: each test is named after its kind.

At rest means: every block free or cached, nothing waits or runs, one terminal event a request.
`Serving.finish` asserts that, and that each answer is the one the request gets alone.

Elsewhere: B012, B013 and B016 (what a key says) in `test_prefix_cache`, B021 (salts) in
`test_scheduler`, B049 and B179 (what a queue counts) also in `test_queue`, B062 and B174 (who else
is in the batch) in `tests/engine/test_same_tokens`, B111 (an observer that fails) in
`tests/engine/test_engine`. Drafts, beams, adapters and API keys bring their own.
"""

from copy import deepcopy
from dataclasses import replace
from itertools import permutations, product
from random import Random

import pytest
from tests.core.serving import DRAWN, Serving, Setup, prompt

from octavo.core.budget import AdmissionRule, Preemption
from octavo.core.events import Admitted, Deferred, Finished, Preempted, Refused
from octavo.core.invariants import check
from octavo.core.plan import RowFailed, Span, StepResult
from octavo.core.prefix_cache import Context, Fate, Prefix
from octavo.core.request import Request
from octavo.core.room import Room
from octavo.core.sequence import Sequence
from octavo.core.windows import Windows, longest_sequence
from octavo.errors import ConfigError
from octavo.simulate.oracle import WrongContent, answer_alone
from octavo.units import ceil_div


def request(name: str, tokens: tuple[int, ...], max_tokens: int, **fields: object) -> Request:
    return Request(id=name, prompt=tokens, max_tokens=max_tokens, **fields)


def finished(serving: Serving, name: str) -> Finished:
    ending = serving.endings[name]
    assert isinstance(ending, Finished)
    return ending


def spans_of(serving: Serving, name: str) -> list[Span]:
    """Every span computed for one request, found through the rows it was given."""
    rows: dict[int, str] = {}
    spans = []
    for plan in serving.plans:
        rows |= {bind.row: bind.request.id for bind in plan.binds}
        spans += [span for span in plan.spans if rows[span.row] == name]
    return spans


@pytest.fixture
def random(seed: int) -> Random:
    return Random(seed)


# --- blocks


def test_B002_a_block_that_is_written_again_is_no_longer_found(random: Random) -> None:
    """B002: evicted blocks stayed in the look-up, and a later prompt read what another wrote.

    A prompt is cached, another takes every block, the first comes again while that one runs.
    """
    serving = Serving(Setup(blocks=4, block_size=4, watermark_blocks=0))
    first = prompt(random, 8)
    serving.submit(request("A", first, 1))
    serving.finish()
    serving.submit(request("B", prompt(random, 12), 5))
    serving.step()
    serving.step()
    serving.submit(request("A again", first, 1))
    cache, pool = serving.scheduler.manager.cache, serving.scheduler.manager.pool
    assert cache is not None
    while not serving.scheduler.idle:
        serving.step()
        for sequence in serving.scheduler.running:
            writing = sequence.tables[0].blocks[sequence.computed // 4 :]
            assert not any(cache.publishes(block) for block in writing)
            assert all(pool.references(block) == 1 for block in writing)
    (admitted,) = serving.of(Admitted, "A again")
    assert isinstance(admitted, Admitted)
    assert admitted.cached_tokens == 0
    serving.assert_at_rest()


@pytest.mark.parametrize("windows", [(8,), (None, 8)])
@pytest.mark.parametrize("cached", [True, False])
def test_B001_branches_that_share_give_back_what_has_left_the_window_once(
    random: Random, windows: Windows, cached: bool
) -> None:
    """B001: a shared block was counted once a slot, and released again when both had ended.

    `Serving` audits after every call that each count is the number of distinct owners.
    """
    serving = Serving(Setup(blocks=40, block_size=4, windows=windows, cached=cached))
    for round_ in range(20):
        name = f"round {round_}"
        serving.submit(request(name, prompt(random, 6), 14, branches=2, sampling=DRAWN))
        serving.step()
        serving.step()
        one, two = serving.scheduler.running
        assert one.tables[0][0] == two.tables[0][0]
        assert serving.scheduler.manager.pool.references(one.tables[0][0]) == 2
        serving.finish()
        receipts = [finished(serving, branch).receipt for branch in (name, f"{name}#1")]
        bound = sum(5 if window is None else 4 for window in windows)
        assert all(receipt.peak_blocks <= bound for receipt in receipts)


@pytest.mark.parametrize("cached", [True, False])
def test_B007_a_request_that_is_not_cached_still_gets_on(random: Random, cached: bool) -> None:
    """B007: the no-store flag also skipped the record of progress: the first chunk for ever."""
    serving = Serving(Setup(block_size=4, tokens=16, cached=cached))
    serving.submit(request("a", prompt(random, 3 * 16 + 5), 3, use_cache=False))
    for _ in range(4):
        assert not serving.tokens["a"]
        serving.step()
    assert len(serving.tokens["a"]) == 1
    (sequence,) = serving.scheduler.running
    assert len(sequence.tables[0]) == ceil_div(53, 4)
    serving.finish()
    assert serving.scheduler.manager.pool.cached == 0


def test_B008_what_was_taken_goes_back_when_the_rest_is_short(random: Random) -> None:
    """B008: one resource was kept when taking the next one failed."""
    for sequences, blocks in ((1, 40), (9, 9)):
        serving = Serving(Setup(sequences=sequences, blocks=blocks, cached=False))
        serving.submit(request("long", prompt(random, 20), 12))
        serving.step()
        serving.submit(request("next", prompt(random, 20), 2))
        for _ in range(9):
            before = serving.scheduler.manager.pool.states()
            serving.step()
            grown = len(before[0]) - len(serving.scheduler.manager.pool.states()[0])
            assert grown in (0, 1)
            assert len(serving.scheduler.running) == 1
        serving.finish()


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("cached", [True, False])
def test_B006_positions_planned_beyond_the_end_are_given_back(
    random: Random, depth: int, cached: bool
) -> None:
    """B006: slots whose tokens came to nothing were counted neither as free nor as used.

    Here those are what plans in flight compute after a token that ends the answer.
    """
    serving = Serving(
        Setup(blocks=40, block_size=16, tokens=200, depth=depth, cached=cached, vocabulary=97)
    )
    stops = frozenset(random.sample(range(97), 9))
    requests = [
        request(str(n), prompt(random, 13 + n % 7), 40, stop_token_ids=stops, sampling=DRAWN)
        for n in range(8)
    ]
    serving.submit(*requests)
    pool = serving.scheduler.manager.pool
    while not serving.scheduler.idle:
        serving.step()
        held = {
            block for sequence in serving.scheduler.running for block in sequence.tables[0].blocks
        }
        assert pool.total - pool.available == pool.owned == len(held)
    useful = sum(len(r.prompt) + len(serving.tokens[r.id]) - 1 for r in requests)
    assert serving.scheduler.counters.tokens_computed > useful
    serving.assert_at_rest()


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 8)])
@pytest.mark.parametrize("admission", ["full", "chunked", "predicted"])
@pytest.mark.parametrize("host_blocks", [0, 20])
def test_B168_the_longest_request_that_is_taken_ends(
    random: Random, windows: Windows, admission: AdmissionRule, host_blocks: int
) -> None:
    """B168: a pool that cannot hold one request of the length that it accepts. With branches, and
    plans in flight."""
    longest = longest_sequence(windows, 4, 9, 200)
    for branches, depth, more in product((1, 3), (1, 3), (0, 1)):
        setup = Setup(
            blocks=9,
            block_size=4,
            windows=windows,
            admission=admission,
            host_blocks=host_blocks,
            depth=depth,
        )
        serving = Serving(setup)
        length = longest // 2
        serving.submit(
            request(
                "longest",
                prompt(random, length),
                longest + more - length + 1,
                branches=branches,
                sampling=DRAWN,
            )
        )
        if more and None in windows:
            refused = serving.endings["longest"]
            assert isinstance(refused, Refused)
            assert refused.limit == "blocks"
        else:
            serving.finish()
            assert finished(serving, "longest").reason == "length"


# --- the prefix cache


def test_B017_a_full_hit_computes_one_position_and_the_chain_goes_on(random: Random) -> None:
    """B017: after a full hit the recomputed token was rounded to a block, later hits were lost.

    The rule here: a full hit of n tokens counts n − 1 cached tokens.
    """
    serving = Serving(Setup(block_size=4))
    first = prompt(random, 16)
    for name in "abc":
        serving.submit(request(name, first, 9))
        serving.finish()
    assert finished(serving, "a").receipt.cached_tokens == 0
    assert finished(serving, "b").receipt.cached_tokens == 15
    assert finished(serving, "c").receipt.cached_tokens == 15
    answer = serving.tokens["a"]
    serving.submit(request("next turn", (*first, *answer, *prompt(random, 5)), 2))
    serving.finish()
    assert finished(serving, "next turn").receipt.cached_tokens == (16 + 9 - 1) // 4 * 4


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_B018_a_prompt_of_whole_blocks_that_is_all_cached_is_served(
    random: Random, blocks: int
) -> None:
    """B018: no token was left to compute, the step crashed. Alone, beside a decode, by threes."""
    serving = Serving(Setup(block_size=4))
    first = prompt(random, 4 * blocks)
    serving.submit(request("cold", first, 3))
    serving.finish()
    serving.submit(request("alone", first, 3))
    serving.finish()
    serving.submit(request("decoding", prompt(random, 5), 9))
    serving.step()
    serving.submit(request("beside", first, 3))
    serving.step()
    serving.submit(*(request(name, first, 3) for name in ("one", "two", "three")))
    serving.finish()
    for name in ("alone", "beside", "one", "two", "three"):
        assert finished(serving, name).receipt.cached_tokens == 4 * blocks - 1
        assert spans_of(serving, name)[0].samples


@pytest.mark.parametrize("order", list(permutations("abcd")))
def test_B020_the_same_prefix_computed_at_once_is_kept_once(
    random: Random, order: tuple[str, ...]
) -> None:
    """B020: two blocks for one key, one of them unreachable. Ended in every order."""
    serving = Serving(Setup(blocks=40, block_size=4))
    first = prompt(random, 13)
    serving.submit(*(request(name, first, 20) for name in "abcd"))
    serving.step()
    for name in order:
        serving.cancel(name)
    serving.finish()
    manager = serving.scheduler.manager
    assert manager.cache is not None
    assert len(manager.cache) == manager.pool.cached == 3
    serving.submit(request("again", first, 1))
    serving.finish()
    assert finished(serving, "again").receipt.cached_tokens == 12
    serving.submit(request("evict", prompt(random, 159), 1, use_cache=False))
    serving.finish()
    assert len(manager.cache) == manager.pool.cached == 0


# --- branches


def block_copies(serving: Serving) -> int:
    return sum(len(plan.copies) for plan in serving.plans)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("cached", [True, False])
def test_B025_each_extra_branch_copies_one_block_and_never_again(
    random: Random, depth: int, cached: bool
) -> None:
    """B025: children were forked again at each step although their blocks were private.

    The prompt is computed once, its whole blocks are held once.
    """
    serving = Serving(Setup(block_size=4, depth=depth, cached=cached))
    serving.submit(request("a", prompt(random, 2 * 4 + 3), 3 * 4, branches=3, sampling=DRAWN))
    most = 0
    while not serving.scheduler.idle:
        serving.step()
        most = max(most, serving.scheduler.manager.pool.owned)
    assert block_copies(serving) == 2
    assert len({tuple(tokens) for tokens in serving.tokens.values()}) == 3
    assert serving.scheduler.counters.tokens_computed == 11 + 2 + 3 * 11
    own = ceil_div(11 + 11, 4) - 2
    assert 2 + 3 * (own - 1) < most <= 2 + 3 * own
    parents = [decision.parent for decision in serving.of(Admitted)]
    assert parents[0] is None
    assert all(parents[1:])
    serving.assert_at_rest()


@pytest.mark.parametrize(("length", "copies"), [(1, 0), (4, 2), (5, 0), (6, 2), (8, 2), (9, 0)])
def test_B025_no_block_is_copied_that_has_nothing_to_share(
    random: Random, length: int, copies: int
) -> None:
    """A branch computes the last prompt position itself: a block that holds others is copied."""
    serving = Serving(Setup(block_size=4))
    serving.submit(request("a", prompt(random, length), 9, branches=3, sampling=DRAWN))
    serving.finish()
    assert block_copies(serving) == copies


def test_B025_the_audit_counts_a_copy_too_many(
    random: Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: every write in the middle of a block copies it."""
    monkeypatch.setattr(Sequence, "writable", property(lambda one: 0, lambda one, upto: None))
    monkeypatch.setattr(
        Room, "protects", lambda room, table, position: position % 4 and len(table) > 2
    )
    serving = Serving(Setup(block_size=4))
    serving.submit(request("a", prompt(random, 2 * 4 + 3), 3 * 4, branches=3, sampling=DRAWN))
    serving.finish()
    assert block_copies(serving) > 2


def test_B029_branches_that_leave_give_back_what_they_alone_own(random: Random) -> None:
    """B029: shared blocks were counted once for each branch. Cancelled in every order."""
    first = prompt(random, 19)
    for order in permutations(range(3)):
        serving = Serving(Setup(block_size=4, blocks=40))
        serving.submit(request("a", first, 9, branches=3, sampling=DRAWN))
        for _ in range(3):
            serving.step()
        pool = serving.scheduler.manager.pool
        for gone, branch in enumerate(order, 1):
            owned = pool.owned
            tables = {s.request.sampling.branch: s.tables[0] for s in serving.scheduler.running}
            serving.cancel("a", branch)
            left = {
                block
                for other, table in tables.items()
                if other != branch
                for block in table.blocks or ()
            }
            assert pool.owned == len(left), (order, gone, owned)
        serving.assert_at_rest()


def test_B049_every_branch_ends_once_whatever_its_length(random: Random) -> None:
    """B049: answers were lost, depending on which child ended first. n = 8, 200 runs under load."""
    for run in range(200):
        serving = Serving(
            Setup(blocks=40, block_size=4, sequences=random.choice([3, 8, 20]), tokens=24)
        )
        serving.submit(request("load", prompt(random, 9), 9))
        stops = frozenset(random.sample(range(97), k=random.choice([5, 30])))
        serving.submit(
            request("a", prompt(random, 10), 16, branches=8, sampling=DRAWN, stop_token_ids=stops)
        )
        serving.submit(request("more", prompt(random, 5), 9))
        serving.finish()
        endings = [finished(serving, f"a#{n}" if n else "a") for n in range(8)]
        assert [ending.branch for ending in endings] == list(range(8)), run
        assert sum(ending.receipt.prompt_tokens for ending in endings) == 10
        assert sum(ending.receipt.completion_tokens for ending in endings) == sum(
            len(tokens) for name, tokens in serving.tokens.items() if name.startswith("a")
        )


@pytest.mark.parametrize(("sequences", "blocks"), [(8, 400), (8, 2 + 5 * 3), (32, 5), (1, 30)])
@pytest.mark.parametrize("cached", [True, False])
def test_B050_more_branches_than_fit_run_in_turn(
    random: Random, sequences: int, blocks: int, cached: bool
) -> None:
    """B050: an n larger than a batch was never admitted. Others are served meanwhile."""
    setup = Setup(blocks=blocks, block_size=4, sequences=sequences, cached=cached)
    serving = Serving(setup)
    serving.submit(request("wide", prompt(random, 9), 11, branches=32, sampling=DRAWN))
    for _ in range(3):
        serving.step()
    serving.submit(request("other", prompt(random, 5), 4))
    serving.finish()
    ended = list(serving.endings)
    assert len(ended) == 33
    assert ended.index("other") < 32 or sequences == 32


# --- preemption


@pytest.mark.parametrize("admission", ["full", "chunked"])
def test_B030_a_preempted_request_returns_only_when_all_of_it_fits(
    random: Random, admission: AdmissionRule
) -> None:
    """B030: let in because its first chunk fitted, thrown out in the next step, again and again."""
    for watermark in (0, 1, 3):
        serving = Serving(
            Setup(
                blocks=20,
                block_size=4,
                tokens=12,
                watermark_blocks=watermark,
                admission=admission,
                cached=False,
            )
        )
        serving.submit(request("grows", prompt(random, 28), 50))
        for _ in range(4):
            serving.step()
        serving.submit(request("victim", prompt(random, 40), 8))
        serving.finish()
        assert finished(serving, "victim").receipt.preemptions <= 2
        useful = (28 + 50 - 1) + (40 + 8 - 1)
        assert serving.scheduler.counters.tokens_computed <= 2 * useful
        for again in serving.of(Admitted, "victim"):
            assert isinstance(again, Admitted)
            assert again.blocks_allocated >= 10 or not again.resumed


@pytest.mark.parametrize("host_blocks", [0, 8, 60])
@pytest.mark.parametrize("admission", ["full", "chunked"])
def test_B030_thrashing_is_bounded_among_many(
    random: Random, admission: AdmissionRule, host_blocks: int
) -> None:
    """B030: the same with twelve that all grow: tokens computed ≤ 2 × useful in sum. With room for
    all that yield nothing is computed twice."""
    for watermark in (0, 1, 2):
        setup = Setup(
            blocks=24,
            block_size=4,
            watermark_blocks=watermark,
            admission=admission,
            cached=False,
            host_blocks=host_blocks,
            preemption="swap",
        )
        serving = Serving(setup)
        requests = [request(str(n), prompt(random, random.randint(2, 12)), 36) for n in range(12)]
        serving.submit(*requests)
        serving.finish()
        useful = sum(len(r.prompt) + r.max_tokens - 1 for r in requests)
        assert serving.scheduler.counters.preemptions > 0
        assert serving.scheduler.counters.tokens_computed <= 2 * useful
        assert host_blocks < 60 or serving.scheduler.counters.tokens_computed == useful
        for r in requests:
            assert finished(serving, r.id).receipt.preemptions <= setup.blocks.bit_length()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("host_blocks", [0, 6, 40])
def test_B031_one_missing_block_takes_one_victim(
    random: Random, depth: int, host_blocks: int
) -> None:
    """B031: blocks freed behind a step in flight were not counted; everyone was preempted.

    Blocks that are swapped can be used when their plan is committed.
    """
    serving = Serving(
        Setup(
            blocks=18,
            block_size=4,
            depth=depth,
            watermark_blocks=0,
            cached=False,
            host_blocks=host_blocks,
            preemption="swap",
        )
    )
    serving.submit(*(request(str(n), prompt(random, 11), 8) for n in range(6)))
    pool, waited = serving.scheduler.manager.pool, 0
    while not serving.scheduler.idle:
        coming = pool.fenced
        plan = serving.step()
        if plan is not None:
            grown = sum(len(write.blocks) for write in plan.writes)
            waiting = [
                d for d in plan.decisions if isinstance(d, Deferred) and d.limit == "in_transfer"
            ]
            victims = sum(isinstance(d, Preempted) for d in plan.decisions)
            assert victims <= max(1, grown + len(waiting))
            if coming and sum(d.missing for d in waiting) <= coming:
                assert not victims
            waited += len(waiting)
    assert serving.scheduler.counters.preemptions > 0
    assert (waited > 0) == (host_blocks > 0)
    last = [bool(plan.spans) for plan in serving.plans]
    assert all(any(last[start : start + 10]) for start in range(len(last) - 9))
    serving.assert_at_rest()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_B031_no_more_yield_than_those_that_grow_are_short_of(
    random: Random, preemption: Preemption
) -> None:
    """B031: all of three need a block at once, and one of them gives up three."""
    serving = Serving(
        Setup(
            blocks=9,
            block_size=4,
            watermark_blocks=0,
            cached=False,
            host_blocks=9,
            preemption=preemption,
        )
    )
    serving.submit(*(request(name, prompt(random, 11), 6) for name in "abc"))
    while not serving.of(Preempted):
        serving.step()
    for _ in range(2):
        serving.step()
    assert [decision.request_id for decision in serving.of(Preempted)] == ["c"]
    serving.finish()


def test_B031_what_one_waits_for_goes_to_nobody_behind_it(random: Random) -> None:
    """One block is free and one on its way when the first needs two; the next needs one. It waits
    in place: if it took the free one, it would have to yield in the next step."""
    serving = Serving(
        Setup(
            blocks=7,
            block_size=4,
            tokens=10,
            watermark_blocks=0,
            admission="chunked",
            cached=False,
            host_blocks=9,
            preemption="swap",
        )
    )
    serving.submit(*(request(name, prompt(random, 2), 9, priority=1) for name in ("next", "last")))
    serving.step()
    serving.submit(request("first", prompt(random, 24), 1))
    while not serving.of(Preempted):
        serving.step()
    assert [(d.request_id, d.limit) for d in serving.of(Deferred)] == [
        ("first", "in_transfer"),
        ("next", "blocks"),
    ]
    serving.finish()
    assert [decision.request_id for decision in serving.of(Preempted)] == ["last"]


@pytest.mark.parametrize("host_blocks", [0, 40])
def test_B032_preemption_changes_neither_answer_nor_usage(random: Random, host_blocks: int) -> None:
    """B032: tokens generated before were folded into the prompt, answers came back short."""
    first, second = prompt(random, 7), prompt(random, 7)
    fields = {"stop_token_ids": frozenset(range(0, 97, 11)), "min_tokens": 12}
    seen = {}
    for blocks in (100, 6):
        serving = Serving(
            Setup(
                blocks=blocks,
                block_size=4,
                watermark_blocks=0,
                host_blocks=host_blocks,
                preemption="swap",
            )
        )
        serving.submit(request("a", first, 18, **fields), request("b", second, 18, **fields))
        serving.finish()
        endings = [finished(serving, name) for name in "ab"]
        seen[blocks] = [
            (e.reason, e.stop_id, e.receipt.prompt_tokens, e.receipt.completion_tokens)
            for e in endings
        ]
        assert serving.scheduler.counters.preemptions == (0 if blocks == 100 else 1)
    assert seen[100] == seen[6]


def test_B033_a_swapped_stream_has_no_repeat_and_no_gap(random: Random) -> None:
    """B033: the same, swapped twice: there is no refill."""
    serving = Serving(
        Setup(blocks=40, block_size=4, tokens=8, cached=False, host_blocks=40, preemption="swap")
    )
    low = request("low", prompt(random, 5), 60, priority=1)
    serving.submit(low)
    for round_ in (1, 2):
        while len(serving.tokens["low"]) < 37 + round_:
            serving.step()
        serving.submit(request(f"high {round_}", prompt(random, 150), 8))
        serving.step()
        assert len(serving.of(Preempted, "low")) == round_
    serving.finish()
    assert tuple(serving.tokens["low"]) == answer_alone(low, 97)
    assert [span.stop - span.start for span in spans_of(serving, "low")] == [5] + [1] * 59
    assert finished(serving, "low").receipt.swaps == 2


def test_B033_a_stream_has_no_repeat_and_no_gap_and_the_refill_is_chunked(random: Random) -> None:
    """B033: tokens sent twice on return, and a long refill taken for decoding. Preempted twice."""
    serving = Serving(Setup(blocks=40, block_size=4, tokens=8, cached=False))
    low = request("low", prompt(random, 5), 60, priority=1)
    serving.submit(low)
    for round_ in (1, 2):
        while len(serving.tokens["low"]) < 37 + round_:
            serving.step()
        serving.submit(request(f"high {round_}", prompt(random, 150), 8))
        serving.step()
        assert len(serving.of(Preempted, "low")) == round_
        sent = len(serving.tokens["low"])
        while not (serving.scheduler.running and serving.scheduler.running[-1].id == "low"):
            serving.step()
        refill = len(low.prompt) + sent
        (sequence,) = (s for s in serving.scheduler.running if s.id == "low")
        while sequence.computed < refill:
            assert len(serving.tokens["low"]) == sent
            serving.step()
        assert len(serving.tokens["low"]) == sent + 1
    serving.finish()
    assert tuple(serving.tokens["low"]) == answer_alone(low, 97)
    assert max(span.stop - span.start for span in spans_of(serving, "low")) <= 8


@pytest.mark.parametrize("host_blocks", [0, 4, 40])
@pytest.mark.parametrize("depth", [1, 2])
def test_B037_the_preempted_return_before_newer_arrivals_of_equal_rank(
    random: Random, host_blocks: int, depth: int
) -> None:
    """B037: once something had been put aside nothing was scheduled any more."""
    serving = Serving(
        Setup(
            blocks=16,
            block_size=4,
            watermark_blocks=0,
            cached=False,
            depth=depth,
            host_blocks=host_blocks,
            preemption="swap",
        )
    )
    serving.submit(*(request(name, prompt(random, 15), 20) for name in "abcd"))
    number = 0
    while not serving.of(Preempted, "d") or not serving.of(Preempted, "c"):
        serving.step()
    arena = serving.scheduler.manager.arena
    assert arena is None or arena.used > 0
    while len(serving.of(Admitted, "d")) < 2:
        serving.submit(request(f"small {number}", prompt(random, 2), 2))
        number += 1
        serving.step()
        assert number < 200
    order = [decision.request_id for decision in serving.of(Admitted)]
    back = max(i for i, name in enumerate(order) if name == "c")
    assert not any(name.startswith("small") for name in order[:back])
    serving.finish()
    assert arena is None or arena.used == 0


# --- transfers


def test_B135_a_reload_goes_where_a_step_in_flight_still_reads(random: Random) -> None:
    """B135: a reload wrote into a block that an earlier step was reading.

    Plans are carried out in their order. A runner that loads ahead is found out.
    """
    serving = Serving(
        Setup(blocks=8, block_size=4, depth=2, cached=False, host_blocks=20, preemption="swap")
    )
    serving.submit(request("low", prompt(random, 18), 9, priority=1))
    serving.step()
    serving.submit(request("high", prompt(random, 18), 9))
    while not serving.tokens["high"]:
        serving.step()
    while serving.in_flight:
        serving.land()
    reading = serving.launch()
    (high,) = serving.scheduler.running
    read = set(high.tables[0].blocks)
    serving.cancel("high")
    loading = serving.launch()
    assert loading is not None
    assert {move.block for move in loading.moves if move.kind == "in"} & read
    ahead = deepcopy(serving.oracle)
    ahead.execute(replace(loading, binds=(), writes=(), spans=()))
    with pytest.raises(WrongContent, match="high"):
        ahead.execute(reading)
    serving.finish()


@pytest.mark.parametrize("cached", [True, False])
def test_B136_a_block_that_is_being_moved_is_given_to_nobody(random: Random, cached: bool) -> None:
    """B136: one with a store under way went to a new request.

    Its owner yields, then ends, and all the rest of the pool is taken before the move is over.
    """
    serving = Serving(
        Setup(
            blocks=12,
            block_size=4,
            tokens=99,
            depth=2,
            watermark_blocks=0,
            cached=cached,
            host_blocks=20,
            preemption="swap",
        )
    )
    serving.submit(request("stored", prompt(random, 20), 9, priority=1))
    serving.step()
    serving.step()
    serving.land()
    serving.submit(request("high", prompt(random, 24), 9))
    while not (plan := serving.launch()).moves:
        serving.land()
    moving = {move.block for move in plan.moves}
    serving.cancel("stored")
    pool = serving.scheduler.manager.pool
    assert pool.fences() == moving
    serving.submit(request("all", prompt(random, 4 * pool.available), 1))
    serving.launch()
    taken = {b for s in serving.scheduler.running for b in s.tables[0].blocks}
    assert not pool.available
    assert not taken & moving
    assert len(taken) + len(moving) == pool.total
    serving.land()
    assert not pool.fenced
    assert pool.available == len(moving)
    serving.finish()


def whereabouts(serving: Serving, name: str) -> set[str]:
    """Where the branches of a request are."""
    scheduler, arena = serving.scheduler, serving.scheduler.manager.arena
    assert arena is not None
    aside = {follower for _, _, follower in scheduler.followers}
    places = {"held" for one in scheduler.held if one.request.id == name}
    for one in scheduler.waiting:
        if one.request.id != name:
            continue
        if one in aside:
            places.add("follows")
        elif arena.swapped(one.id):
            places.add("moves out" if arena.in_transfer(one.id) else "swapped")
        else:
            places.add("preempted" if one.preemptions else "queued")
    for one in scheduler.running:
        if one.request.id == name:
            if one.computed < one.restored:
                places.add("moves in")
            else:
                places.add("prefill" if one.computed < len(one.request.prompt) else "decode")
    return places


def test_B107_who_goes_is_gone_at_once_wherever_it_is(random: Random) -> None:
    """B107: after the client had gone the engine went on for it. With four answers, at any step."""
    beginning, tails = prompt(random, 20), [prompt(random, 5) for _ in range(3)]
    setup = Setup(
        blocks=26,
        block_size=4,
        tokens=16,
        depth=2,
        sequences=5,
        host_blocks=9,
        preemption="swap",
    )
    seen: set[str] = set()
    for steps in range(40):
        serving = Serving(setup)
        serving.submit(request("first", (*beginning, *tails[0]), 9))
        serving.submit(
            request("gone", (*beginning, *tails[1]), 12, branches=4, priority=1, sampling=DRAWN)
        )
        for step in range(steps + 1):
            if step in (8, 20):
                serving.submit(request(f"high {step}", prompt(random, 50), 4))
            if step < steps:
                serving.step()
        serving.launch()
        seen |= whereabouts(serving, "gone")
        serving.cancel("gone")
        assert not whereabouts(serving, "gone")
        serving.finish()
        assert not whereabouts(serving, "gone")
    assert seen == {
        "queued",
        "follows",
        "held",
        "prefill",
        "decode",
        "moves out",
        "swapped",
        "preempted",
        "moves in",
    }


# --- chunks and budgets


@pytest.mark.parametrize("length", [33, 65])
def test_B040_the_tail_of_a_prompt_is_not_a_decode(random: Random, length: int) -> None:
    """B040: one token scheduled was taken for a decode although it was the end of a prompt."""
    serving = Serving(Setup(blocks=99, block_size=4, tokens=35, cached=False))
    serving.submit(*(request(f"decode {n}", prompt(random, 5), 20) for n in range(3)))
    serving.step()
    serving.submit(
        request("tail", prompt(random, length), 4), request("more", prompt(random, 40), 4)
    )
    serving.finish()
    spans = spans_of(serving, "tail")
    assert (spans[length // 32].start, spans[length // 32].stop) == (length - 1, length)
    assert [span.samples for span in spans] == [False] * (length // 32) + [True] * 4


def test_B042_no_limits_accepted_at_start_can_stop_the_loop(random: Random) -> None:
    """B042: two limits were combined in one place and not in another."""
    served = 0
    for sequences, tokens, watermark, waiting, blocks in product(
        (-1, 0, 1, 3), (-1, 0, 1, 64, 96), (-1, 0, 1, 50), (None, 0, 2), (1, 5, 21)
    ):
        setup = Setup(
            blocks=blocks,
            sequences=sequences,
            tokens=tokens,
            watermark_blocks=watermark,
            waiting=waiting,
        )
        try:
            serving = Serving(setup)
        except ConfigError:
            continue
        serving.submit(*(request(str(n), prompt(random, 80 // (1 + n)), 4) for n in range(3)))
        serving.finish()
        served += any(isinstance(ending, Finished) for ending in serving.endings.values())
    assert served


def test_B047_more_decodes_than_the_budget_take_turns(random: Random) -> None:
    """B047: the running batch grew past the allowed size. Budget 4, 6 rows, 9 requests."""
    serving = Serving(Setup(blocks=99, block_size=4, tokens=4, sequences=6))
    serving.submit(*(request(str(n), prompt(random, 2), 30) for n in range(8)))
    serving.submit(request("waiting", prompt(random, 21), 3))
    while not serving.scheduler.idle:
        plan = serving.step()
        assert len(serving.scheduler.running) <= 6
        if plan is None:
            continue
        assert sum(span.stop - span.start for span in plan.spans) <= 4
        for sequence in serving.scheduler.running:
            if sequence.demand == 1 and sequence.last_served >= 0:
                assert plan.id - sequence.last_served <= 3
    serving.assert_at_rest()


# --- limits and bad input


def test_B085_an_empty_prompt_is_refused_and_the_others_go_on(random: Random) -> None:
    """B085: no token to compute killed the engine for everybody."""
    serving = Serving()
    serving.submit(*(request(f"good {n}", prompt(random, 6), 6) for n in range(4)))
    serving.step()
    serving.submit(request("empty", (), 5), request("nothing", prompt(random, 3), 0))
    for name, limit in (("empty", "prompt"), ("nothing", "max_tokens")):
        refused = serving.endings[name]
        assert isinstance(refused, Refused)
        assert refused.limit == limit
    serving.finish()
    assert serving.scheduler.counters.finished == {"length": 4}


@pytest.mark.parametrize("length", [17, 18, 19, 20])
def test_B089_a_prompt_that_leaves_room_for_one_token_gets_one(random: Random, length: int) -> None:
    """B089: at the length limit the window was shifted for ever."""
    serving = Serving(Setup(blocks=5, block_size=4))
    serving.submit(request("a", prompt(random, length), 21 - length))
    serving.finish()
    assert len(serving.tokens["a"]) == 21 - length
    assert finished(serving, "a").reason == "length"


# --- priorities and queues


def test_B176_a_sequence_preempted_while_planning_leaves_the_plan(random: Random) -> None:
    """B176: one planned first was preempted in the same step and stayed in the plan."""
    serving = Serving(Setup(blocks=6, block_size=4, tokens=99, watermark_blocks=0, cached=False))
    serving.submit(request("low", prompt(random, 11), 9, priority=1))
    serving.step()
    serving.submit(request("high", prompt(random, 11), 9))
    while not serving.of(Preempted):
        serving.step()
    plan = serving.plans[-1]
    (span,) = plan.spans
    assert {write.row for write in plan.writes} <= {span.row}
    serving.finish()
    assert list(serving.endings) == ["high", "low"]


def test_B177_equal_times_and_priorities_have_one_order(random: Random) -> None:
    """B177: entries equal in priority and arrival were compared by themselves, and crashed."""
    serving = Serving(Setup(blocks=400, sequences=1, tokens=99))
    priorities = {str(n): random.choice([-3, 0, 0, 2]) for n in range(100)}
    for name, priority in priorities.items():
        serving.submit(request(name, prompt(random, 3), 1, priority=priority))
    serving.finish()
    expected = sorted(priorities, key=lambda name: (priorities[name], int(name)))
    assert list(serving.endings) == expected


def test_B179_a_full_queue_refuses_at_once(random: Random) -> None:
    """B179: the queue had no bound; work of clients long gone was done."""
    serving = Serving(Setup(waiting=10, sequences=2))
    serving.submit(*(request(str(n), prompt(random, 4), 4) for n in range(50)))
    refused = [e for e in serving.endings.values() if isinstance(e, Refused)]
    assert len(refused) == 40
    assert {e.limit for e in refused} == {"waiting"}
    gone = [str(n) for n in range(0, 10, 2)]
    for name in gone:
        serving.cancel(name)
    serving.submit(request("late", prompt(random, 4), 4))
    serving.finish()
    assert not any(serving.of(Admitted, name) for name in gone)
    assert finished(serving, "late").reason == "length"
    assert not [d for d in serving.of(Deferred) if d.request_id in gone]


@pytest.mark.parametrize(("groups", "when"), list(product((1, 2), (1, 2, 5))))
def test_the_prefix_of_a_request_that_failed_is_not_found_again(
    random: Random, groups: int, when: int
) -> None:
    """A damaged block stayed in the prefix cache, and every request that found it failed too."""
    serving = Serving(Setup(block_size=4, windows=(None,) * groups, tokens=8))
    start = prompt(random, 8)
    bad = request("bad", start + prompt(random, 9), 6)
    serving.submit(request("neighbour", start + prompt(random, 5), 12))
    serving.step()
    serving.submit(bad)
    for _ in range(when):
        serving.step()
    scheduler, cache = serving.scheduler, serving.scheduler.manager.cache
    (sequence,) = (s for s in scheduler.running if s.id == "bad")
    plan = scheduler.plan(serving.now)
    assert plan is not None
    result = serving.oracle.execute(plan)
    failed = RowFailed(sequence.row, "not finite")
    others = tuple(outcome for outcome in result.outcomes if outcome.row != sequence.row)
    serving._take(scheduler.commit(plan, StepResult(plan.id, (*others, failed)), serving.now))
    check(scheduler)
    assert cache is not None
    cache.extend(sequence.prefixes, sequence.context, bad.prompt, len(bad.prompt))
    assert cache.match(sequence.prefixes, len(sequence.prefixes)) == 0
    serving.submit(request("again", bad.prompt, 6))
    serving.finish()
    (admitted,) = serving.of(Admitted, "again")
    assert isinstance(admitted, Admitted)
    assert admitted.cached_tokens == 0


def fates_of(serving: Serving, tokens: tuple[int, ...]) -> list[Fate | None]:
    """What the cache tells of each full block of a prompt."""
    cache = serving.scheduler.manager.cache
    assert cache is not None
    nodes: list[Prefix] = []
    cache.extend(nodes, Context(model="oracle"), tokens, len(tokens))
    return [cache.fate(node.key) for node in nodes]


def test_the_cache_says_for_whom_a_prefix_was_evicted_and_when(random: Random) -> None:
    serving = Serving(Setup(blocks=4, block_size=4, watermark_blocks=0))
    first = prompt(random, 12)
    serving.submit(request("a", first, 1))
    serving.finish()
    assert fates_of(serving, first) == [None] * 3
    serving.submit(request("b", prompt(random, 9), 1))
    plan = serving.launch()
    assert plan is not None
    evicted = Fate("evicted", "b", serving.now, plan.id)
    assert fates_of(serving, first) == [None, evicted, evicted]
    serving.finish()


def test_the_cache_says_whose_failure_took_a_prefix(random: Random) -> None:
    serving = Serving(Setup(block_size=4))
    tokens = prompt(random, 8)
    serving.oracle.failing = {"bad": 8}
    serving.submit(request("bad", tokens, 4))
    serving.step()
    assert fates_of(serving, tokens) == [None, None]
    serving.step()
    distrusted = Fate("distrusted", "bad", serving.now, serving.plans[-1].id + 1)
    assert fates_of(serving, tokens) == [distrusted, distrusted]
