"""Decisions of the scheduler, one by one, and the traces of the seed documents."""

from dataclasses import replace
from random import Random

import pytest
from tests.core.serving import Serving, Setup, constant_hash, prompt

from octavo.core.block_manager import BlockManager
from octavo.core.budget import AdmissionRule, Limits
from octavo.core.events import Admitted, Chunked, Deferred, Evicted, Finished, Preempted, Refused
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.simulate.oracle import OracleRunner, answer_alone
from octavo.units import ceil_div


def request(name: str, tokens: tuple[int, ...], max_tokens: int, **fields: object) -> Request:
    return Request(id=name, prompt=tokens, max_tokens=max_tokens, **fields)


def blocks_held(serving: Serving, name: str) -> int:
    (sequence,) = (s for s in serving.scheduler.running if s.id == name)
    return sum(len(table) for table in sequence.tables)


def cached_tokens(serving: Serving, name: str) -> int:
    admitted = serving.of(Admitted, name)[0]
    assert isinstance(admitted, Admitted)
    return admitted.cached_tokens


@pytest.fixture
def random(seed: int) -> Random:
    return Random(seed)


# --- the traces of the seeds, in blocks of 16


@pytest.mark.parametrize(("more", "cached"), [(0, 896), (40, 900)])
def test_a_prompt_of_1200_tokens_reuses_a_cached_preamble_of_900(
    random: Random, more: int, cached: int
) -> None:
    """56 whole blocks are found; the 57th, if it was filled, is copied for its first 4 tokens."""
    serving = Serving(Setup(blocks=200, block_size=16, tokens=2048))
    preamble = prompt(random, 900)
    serving.submit(request("before", (*preamble, *[90] * more), 1))
    serving.finish()
    serving.submit(request("chat", (*preamble, *prompt(random, 300)), 20))
    plan = serving.step()
    assert plan is not None
    (admitted,) = (d for d in plan.decisions if isinstance(d, Admitted))
    assert (admitted.blocks_found, admitted.blocks_allocated) == (56, 19)
    assert admitted.cached_tokens == cached
    assert len(plan.copies) == (cached > 896)
    (span,) = plan.spans
    assert (span.start, span.stop, span.samples) == (cached, 1200, True)
    (write,) = plan.writes
    assert len(write.blocks) == 75
    plan = serving.step()
    assert plan is not None
    assert plan.spans[0].start == 1200
    assert [(write.index, len(write.blocks)) for write in plan.writes] == [(75, 1)]
    assert blocks_held(serving, "chat") == 76
    serving.finish()


def test_a_prompt_of_300_tokens_takes_19_blocks(random: Random) -> None:
    serving = Serving(Setup(blocks=40, block_size=16, tokens=2048))
    serving.submit(request("a", prompt(random, 300), 8))
    serving.step()
    assert blocks_held(serving, "a") == 19
    serving.finish()


def test_50_tokens_hold_4_blocks(random: Random) -> None:
    serving = Serving(Setup(blocks=40, block_size=16))
    serving.submit(request("a", prompt(random, 1), 50))
    serving.finish()
    ending = serving.endings["a"]
    assert isinstance(ending, Finished)
    assert ending.receipt.peak_blocks == 4


def test_two_requests_share_the_blocks_of_a_prefix(random: Random) -> None:
    serving = Serving(Setup(blocks=60, block_size=16, tokens=2048))
    prefix = prompt(random, 304)
    serving.submit(request("first", (*prefix, 1), 30))
    serving.step()
    serving.submit(request("second", (*prefix, 2), 30))
    serving.step()
    first, second = (s.tables[0].blocks for s in serving.scheduler.running)
    assert first[:19] == second[:19]
    assert set(first[19:]).isdisjoint(second[19:])
    references = serving.scheduler.manager.pool.references
    assert [references(block) for block in first] == [2] * 19 + [1]
    serving.finish()


@pytest.mark.parametrize("groups", [1, 2])
def test_every_table_holds_its_length_over_the_block_size(random: Random, groups: int) -> None:
    setup = Setup(blocks=400, block_size=16, windows=(None,) * groups, tokens=100, sequences=6)
    serving = Serving(setup)
    for number in range(6):
        serving.submit(request(str(number), prompt(random, random.randint(1, 200)), 40))
    while not serving.scheduler.idle:
        serving.launch()
        for sequence in serving.scheduler.running:
            covered = max(sequence.scheduled, len(sequence.tokens) - (not sequence.demand))
            covered = min(covered, sequence.last_position)
            for table in sequence.tables:
                assert len(table) == ceil_div(covered, 16)
        if serving.in_flight:
            serving.land()


# --- admission


def test_what_can_never_fit_is_refused_and_what_just_fits_is_served(random: Random) -> None:
    serving = Serving(Setup(blocks=5, block_size=4))
    serving.submit(
        request("fits", prompt(random, 11), 10), request("never", prompt(random, 11), 11)
    )
    refused = serving.endings["never"]
    assert isinstance(refused, Refused)
    assert refused.limit == "blocks"
    assert "6 KV blocks" in refused.message
    serving.finish()
    assert len(serving.tokens["fits"]) == 10


def test_a_slab_larger_than_the_pool_is_refused_and_one_that_fits_is_served(
    random: Random,
) -> None:
    """Refused at submit: it could never be admitted, and all would wait behind it."""
    for slab_tokens, expected in ((33, Refused), (32, Finished)):
        manager = BlockManager(blocks=8, block_size=4, slab_tokens=slab_tokens)
        scheduler = Scheduler(manager, Limits(sequences=2, tokens=64))
        oracle = OracleRunner(blocks=8, block_size=4)
        events = list(scheduler.submit(request("a", prompt(random, 5), 3), 0.0))
        while not scheduler.idle:
            plan = scheduler.plan(0.0)
            assert plan is not None
            assert manager.pool.owned == 8
            events += scheduler.commit(plan, oracle.execute(plan), 0.0)
        assert isinstance(events[-1], expected)


def test_an_id_that_is_live_is_refused(random: Random) -> None:
    serving = Serving()
    serving.submit(request("a", prompt(random, 3), 5))
    (refused,) = serving.scheduler.submit(request("a", prompt(random, 3), 5), 0.0)
    assert isinstance(refused, Refused)
    assert refused.limit == "id"
    serving.finish()
    assert serving.scheduler.submit(request("a", prompt(random, 3), 5), 0.0) == ()


def test_a_waiting_request_says_which_limit_it_waits_for(random: Random) -> None:
    serving = Serving(Setup(blocks=12, sequences=2, tokens=8, cached=False))
    serving.submit(*(request(name, prompt(random, 8), 4) for name in "abc"))
    serving.step()
    assert serving.of(Deferred)[-1] == Deferred("b", "tokens", 8)
    serving.step()
    assert serving.of(Chunked)[-1] == Chunked("b", 7, 8)
    serving.step()
    assert serving.of(Deferred)[-1] == Deferred("c", "rows", 1)
    serving.finish()


def test_a_request_short_of_blocks_waits_and_nobody_overtakes_it(random: Random) -> None:
    serving = Serving(Setup(blocks=8, watermark_blocks=2, cached=False))
    serving.submit(request("a", prompt(random, 8), 8))
    serving.step()
    serving.submit(request("big", prompt(random, 20), 4), request("small", prompt(random, 2), 2))
    serving.step()
    assert serving.of(Deferred)[-1] == Deferred("big", "blocks", 2)
    assert not serving.of(Admitted, "small")
    serving.finish()
    order = [decision.request_id for decision in serving.of(Admitted)]
    assert order == ["a", "big", "small"]


@pytest.mark.parametrize(("admission", "held"), [("full", 10), ("chunked", 2)])
def test_admission_reserves_for_the_whole_prompt_or_for_its_first_chunk(
    random: Random, admission: AdmissionRule, held: int
) -> None:
    serving = Serving(Setup(blocks=20, block_size=4, tokens=8, admission=admission))
    serving.submit(request("long", prompt(random, 40), 4))
    serving.step()
    assert blocks_held(serving, "long") == held
    (admitted,) = serving.of(Admitted, "long")
    assert isinstance(admitted, Admitted)
    assert admitted.blocks_allocated == held
    serving.finish()


def test_chunk_wise_admission_lets_two_long_prompts_begin(random: Random) -> None:
    """Which of them ends up with the blocks is decided as they grow. The rule holds from the next
    plan on."""
    serving = Serving(Setup(blocks=14, block_size=4, tokens=8, cached=False))
    serving.submit(request("first", prompt(random, 40), 4))
    for _ in range(4):
        serving.step()
    serving.submit(request("second", prompt(random, 40), 4))
    serving.step()
    assert serving.of(Deferred, "second")
    assert not serving.of(Admitted, "second")
    scheduler = serving.scheduler
    scheduler.limits = replace(scheduler.limits, admission="chunked")
    serving.step()
    assert serving.of(Admitted, "second")
    serving.finish()


def test_predicted_admission_keeps_room_for_the_answers_that_are_expected(random: Random) -> None:
    """Each of four needs eight blocks in the end, and the pool has twenty. Until lengths are known
    two run; when answers were short all four start."""
    running, preemptions = {}, {}
    for admission, known in (("full", 0), ("predicted", 0), ("predicted", 12)):
        serving = Serving(
            Setup(blocks=20, block_size=4, watermark_blocks=0, cached=False, admission=admission)
        )
        for number in range(known):
            serving.submit(request(f"known {number}", prompt(random, 3), 2))
            serving.finish()
        serving.submit(*(request(name, prompt(random, 8), 24) for name in "abcd"))
        serving.step()
        running[admission, known] = len(serving.scheduler.running)
        waits = {decision.limit for decision in serving.of(Deferred)}
        assert waits == ({"predicted"} if running[admission, known] == 2 else set())
        serving.finish()
        preemptions[admission, known] = serving.scheduler.counters.preemptions
    assert running == {("full", 0): 4, ("predicted", 0): 2, ("predicted", 12): 4}
    assert preemptions["predicted", 0] == 0 < preemptions["full", 0]


def test_a_long_prompt_is_chunked_beside_decodes(random: Random) -> None:
    serving = Serving(Setup(blocks=64, tokens=16))
    serving.submit(request("short", prompt(random, 4), 12))
    serving.step()
    serving.submit(request("long", prompt(random, 40), 2))
    sizes = []
    for _ in range(3):
        plan = serving.step()
        assert plan is not None
        sizes.append([span.stop - span.start for span in plan.spans])
    assert sizes == [[1, 15], [1, 15], [1, 10]]
    assert [(c.granted, c.demand) for c in serving.of(Chunked)] == [(15, 40), (15, 25)]
    serving.finish()


def test_no_plan_when_there_is_nothing_to_do() -> None:
    serving = Serving()
    assert serving.scheduler.idle
    assert serving.launch() is None


# --- preemption


def test_the_youngest_yields_when_the_pool_is_dry(random: Random) -> None:
    serving = Serving(Setup(blocks=4, watermark_blocks=0, cached=False))
    serving.submit(request("old", prompt(random, 7), 8), request("young", prompt(random, 7), 8))
    serving.finish()
    first = serving.of(Preempted)[0]
    assert first == Preempted("young", "old", "recompute", 2, 8)
    resumed = [decision.resumed for decision in serving.of(Admitted, "young")]
    assert resumed == [False, True]
    ending = serving.endings["young"]
    assert isinstance(ending, Finished)
    assert (ending.receipt.preemptions, ending.receipt.recomputed_tokens) == (1, 8)


def test_a_higher_priority_takes_the_row_of_a_lower(random: Random) -> None:
    serving = Serving(Setup(sequences=1))
    serving.submit(request("low", prompt(random, 6), 9, priority=1))
    serving.step()
    serving.submit(request("high", prompt(random, 6), 3))
    serving.step()
    assert serving.of(Preempted)[-1].beneficiary == "high"
    serving.finish()
    assert list(serving.endings) == ["high", "low"]


def test_nobody_is_preempted_for_a_request_that_could_not_start(random: Random) -> None:
    """Found by the state machine: a row was cleared before the blocks were counted."""
    serving = Serving(Setup(blocks=8, sequences=2, cached=False, watermark_blocks=0))
    serving.submit(request("equal", prompt(random, 19), 8))
    serving.submit(request("low", prompt(random, 4), 8, priority=1))
    serving.step()
    serving.submit(request("high", prompt(random, 20), 4))
    serving.step()
    assert not serving.of(Preempted)
    assert serving.of(Deferred)[-1] == Deferred("high", "blocks", 4)
    serving.finish()


def test_the_fewest_yield(random: Random) -> None:
    serving = Serving(Setup(blocks=12, cached=False, watermark_blocks=0))
    serving.submit(*(request(name, prompt(random, 9), 3, priority=1) for name in "abcd"))
    serving.step()
    serving.submit(request("high", prompt(random, 17), 3))
    serving.step()
    assert [decision.request_id for decision in serving.of(Preempted)] == ["d", "c"]
    serving.finish()


# --- endings


def test_a_cancelled_request_gives_everything_back_wherever_it_is(random: Random) -> None:
    for steps in range(5):
        serving = Serving(Setup(blocks=20, tokens=8, depth=3, sequences=1))
        serving.submit(request("a", prompt(random, 12), 6), request("b", prompt(random, 5), 6))
        for _ in range(steps):
            serving.launch()
        serving.cancel("a")
        serving.cancel("a")
        serving.cancel("nobody")
        serving.finish()
        ending = serving.endings["a"]
        assert isinstance(ending, Finished)
        assert ending.reason == "abort"


@pytest.mark.parametrize("position", [0, 3, 11, 12, 14])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_row_that_fails_ends_its_request_only(random: Random, position: int, depth: int) -> None:
    serving = Serving(Setup(tokens=8, depth=depth))
    serving.oracle.failing = {"bad": position}
    serving.submit(*(request(name, prompt(random, 12), 6) for name in ("one", "bad", "two")))
    serving.finish()
    ending = serving.endings["bad"]
    assert isinstance(ending, Finished)
    assert (ending.reason, bool(ending.message)) == ("error", True)
    assert serving.scheduler.counters.finished == {"error": 1, "length": 2}


def test_a_restarted_engine_goes_on_where_the_first_was_killed(random: Random) -> None:
    whole = request("a", prompt(random, 9), 12)
    answer = answer_alone(whole, 97)
    for sent in range(13):
        serving = Serving()
        serving.submit(request("a", whole.prompt, 12, emitted=answer[:sent]))
        serving.finish()
        assert tuple(serving.tokens["a"]) == answer


def test_a_resumed_request_counts_only_its_prompt_as_cached(random: Random) -> None:
    """Else usage said that more prompt tokens were cached than there were."""
    serving = Serving()
    whole = request("a", prompt(random, 8), 12)
    serving.submit(whole)
    serving.finish()
    serving.submit(request("b", whole.prompt, 12, emitted=tuple(serving.tokens["a"][:9])))
    serving.finish()
    assert cached_tokens(serving, "b") == 16
    ending = serving.endings["b"]
    assert isinstance(ending, Finished)
    assert ending.receipt.cached_tokens == ending.receipt.prompt_tokens == 8


# --- the prefix cache, seen from outside


def test_another_salt_hits_nothing_and_the_same_one_does(random: Random) -> None:
    serving = Serving()
    tokens = prompt(random, 20)
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one"), ("d", ""), ("e", "two")):
        serving.submit(request(name, tokens, 2, salt=salt))
        serving.finish()
    assert [cached_tokens(serving, name) for name in "abcde"] == [0, 0, 19, 0, 19]


def test_a_constant_hash_is_slower_and_never_wrong(seed: int) -> None:
    hits = {}
    for setup in (Setup(tokens=200), Setup(tokens=200, hash_function=constant_hash)):
        random, serving = Random(seed), Serving(setup)
        starts = [prompt(random, 20) for _ in range(3)]
        for number in range(9):
            tail = prompt(random, random.randint(1, 9))
            serving.submit(request(str(number), (*starts[number % 3], *tail), 5))
            serving.finish()
        hits[setup.hash_function] = serving.scheduler.counters.prefix_tokens_hit
    assert 0 < hits.pop(constant_hash) < hits.popitem()[1]


def test_an_evicted_prefix_is_announced_with_its_beneficiary(random: Random) -> None:
    serving = Serving(Setup(blocks=6))
    serving.submit(request("a", prompt(random, 16), 1))
    serving.finish()
    serving.submit(request("b", prompt(random, 17), 1))
    serving.finish()
    evicted = serving.of(Evicted)
    assert len(evicted) == serving.scheduler.counters.evictions == 3
    assert {decision.beneficiary for decision in evicted} == {"b"}


# --- plans in flight


def test_plans_go_ahead_of_tokens_that_are_not_known_yet(random: Random) -> None:
    serving = Serving(Setup(depth=3))
    serving.submit(request("a", prompt(random, 5), 6))
    spans = [span for _ in range(3) for span in serving.launch().spans]
    assert [(span.start, span.stop, len(span.tokens)) for span in spans] == [
        (0, 5, 5),
        (5, 6, 0),
        (6, 7, 0),
    ]
    serving.finish()


def test_plans_are_committed_in_the_order_they_were_made(random: Random) -> None:
    serving = Serving(Setup(depth=2))
    serving.submit(request("a", prompt(random, 5), 6))
    first, second = serving.launch(), serving.launch()
    results = [serving.oracle.execute(plan) for plan in (first, second)]
    with pytest.raises(AssertionError, match="not the oldest"):
        serving.scheduler.commit(second, results[1], 0.0)
