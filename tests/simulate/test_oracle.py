"""The oracle can fail: every way of breaking the core is found at the step that reads it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from random import Random

import pytest
from tests.core.serving import DRAWN, Setup

from octavo.core.block_manager import BlockManager, _Found
from octavo.core.block_pool import BlockPool, Shortage
from octavo.core.plan import Bind, RowFailed, Sampled, Span, StepPlan, TableWrite
from octavo.core.prefix_cache import Fate, Prefix, PrefixCache
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence
from octavo.simulate.oracle import OracleRunner, WrongContent, answer_alone

REQUEST = Request(id="a", prompt=(4, 5, 6), max_tokens=5)


def plan(number: int, *spans: Span, **parts: tuple) -> StepPlan:
    empty = {"binds": (), "writes": (), "copies": (), "decisions": ()}
    return StepPlan(id=number, spans=spans, **{**empty, **parts})


def first_step(**changes: tuple) -> StepPlan:
    parts = {"binds": (Bind(0, REQUEST),), "writes": (TableWrite(0, 0, 0, (2, 1)),)}
    return plan(0, Span(0, 0, 3, (4, 5, 6), True), **{**parts, **changes})


def test_a_request_gets_the_answer_of_alone() -> None:
    oracle, answer = OracleRunner(blocks=4, block_size=2), answer_alone(REQUEST, 97)
    result = oracle.execute(first_step())
    assert result.outcomes == (Sampled(0, answer[0], 0.0),)
    result = oracle.execute(plan(1, Span(0, 3, 4, (answer[0],), True)))
    assert result.outcomes == (Sampled(0, answer[1], 0.0),)


def test_a_token_not_known_yet_is_the_one_sampled_last() -> None:
    oracle, answer = OracleRunner(blocks=4, block_size=2), answer_alone(REQUEST, 97)
    oracle.execute(first_step())
    assert oracle.execute(plan(1, Span(0, 3, 4, (), True))).outcomes[0].token == answer[1]


@pytest.mark.parametrize("wrong", [(2, 3), (1, 2), (0, 1)])
def test_a_wrong_table_entry_is_found(wrong: tuple[int, int]) -> None:
    oracle = OracleRunner(blocks=4, block_size=2)
    oracle.execute(first_step())
    with pytest.raises(WrongContent, match="a: position"):
        oracle.execute(plan(1, Span(0, 3, 4, (), True), writes=(TableWrite(0, 0, 0, wrong),)))


@pytest.mark.parametrize("other", [replace(REQUEST, salt="x"), replace(REQUEST, prompt=(9, 5, 6))])
def test_cells_of_another_salt_or_prefix_are_found(other: Request) -> None:
    oracle = OracleRunner(blocks=4, block_size=2)
    oracle.execute(first_step())
    with pytest.raises(WrongContent):
        oracle.execute(
            plan(
                1,
                Span(0, 2, 3, (6,), True),
                binds=(Bind(0, other),),
                writes=(TableWrite(0, 0, 0, (2, 1)),),
            )
        )


def test_groups_must_not_swap_their_blocks() -> None:
    oracle = OracleRunner(blocks=4, block_size=4, groups=2)
    oracle.execute(first_step(writes=(TableWrite(0, 0, 0, (1,)), TableWrite(0, 1, 0, (2,)))))
    swapped = (TableWrite(0, 0, 0, (2,)), TableWrite(0, 1, 0, (1,)))
    with pytest.raises(WrongContent, match="group 0"):
        oracle.execute(plan(1, Span(0, 3, 4, (), True), writes=swapped))


def test_a_row_fails_from_a_position_on() -> None:
    oracle = OracleRunner(blocks=4, block_size=2)
    oracle.failing = {"a": 2}
    result = oracle.execute(
        plan(
            0,
            Span(0, 0, 2, (4, 5), False),
            binds=(Bind(0, REQUEST),),
            writes=(TableWrite(0, 0, 0, (2, 1)),),
        )
    )
    assert result.outcomes == ()
    (outcome,) = oracle.execute(plan(1, Span(0, 2, 3, (6,), True))).outcomes
    assert isinstance(outcome, RowFailed)


@pytest.mark.parametrize("emitted", range(6))
def test_the_answer_goes_on_from_what_was_emitted(emitted: int) -> None:
    answer = answer_alone(REQUEST, 97)
    assert answer_alone(replace(REQUEST, emitted=answer[:emitted]), 97) == answer
    stopping = replace(REQUEST, stop_token_ids=frozenset({answer[1]}))
    short = answer_alone(stopping, 97)
    assert short == answer[:2] or answer[0] == answer[1]
    assert answer_alone(replace(stopping, emitted=short), 97) == short


# --- broken cores. Each is one patch; the traffic is the same.


def serve(setup: Setup, seed: int, requests_served: int) -> None:
    """Much traffic with shared beginnings through a small pool; nobody audits but the oracle."""
    random = Random(seed)
    scheduler, oracle = Scheduler(setup.manager(), setup.limits()), setup.oracle()
    starts = [tuple(random.choices(range(1, 90), k=12)) for _ in range(3)]
    tokens: dict[tuple[str, int], list[int]] = {}
    requests: dict[str, Request] = {}
    while len(requests) < requests_served or not scheduler.idle:
        if len(requests) < requests_served:
            start = random.choice(starts)[: random.choice([8, 10, 12])]
            tail = tuple(random.choices(range(1, 90), k=random.choice([0, 0, 1, 2, 7])))
            one = Request(
                id=str(len(requests)),
                prompt=start + tail,
                max_tokens=random.randint(1, 16),
                salt=random.choice(["", "x"]),
                branches=random.choice([1, 1, 3]),
                sampling=DRAWN,
            )
            requests[one.id] = one
            tokens |= {(one.id, branch): [] for branch in range(one.branches)}
            scheduler.submit(one, 0.0)
        step = scheduler.plan(0.0)
        if step is not None:
            for event in scheduler.commit(step, oracle.execute(step), 0.0):
                if hasattr(event, "token"):
                    tokens[event.request_id, event.branch].append(event.token)
    for (name, branch), sent in tokens.items():
        if tuple(sent) != answer_alone(requests[name].split()[branch], setup.vocabulary):
            raise WrongContent(f"{name}: another answer than alone")


SETUP = Setup(blocks=18, block_size=4, sequences=6, tokens=10, groups=2)

Patch = Callable[[pytest.MonkeyPatch], None]


def shares_without_owning(patch: pytest.MonkeyPatch) -> None:
    """A hit does not count as an owner: the block is handed to another while it is read."""

    def release(pool: BlockPool, block: int, *, keep: bool, fenced: bool = False) -> None:
        if pool._references[block]:
            pool._references[block] = 0
            (pool._cached.update({block: None}) if keep else pool._free.append(block))

    patch.setattr(BlockPool, "release", release)


def forgets_evictions(patch: pytest.MonkeyPatch) -> None:
    """B002: a block taken for new content stays in the look-up."""

    def forget(cache: PrefixCache, block: int, fate: Fate) -> None:
        return None

    patch.setattr(PrefixCache, "forget", forget)


def skips_copies(patch: pytest.MonkeyPatch) -> None:
    cover = BlockManager._cover

    def uncopied(manager: BlockManager, *arguments: object) -> object:
        taken = cover(manager, *arguments)
        return taken if isinstance(taken, Shortage) else replace(taken, copies=())

    patch.setattr(BlockManager, "_cover", uncopied)


def copies_the_wrong_way(patch: pytest.MonkeyPatch) -> None:
    cover = BlockManager._cover

    def turned(manager: BlockManager, *arguments: object) -> object:
        taken = cover(manager, *arguments)
        if isinstance(taken, Shortage):
            return taken
        turned = [replace(c, source=c.target, target=c.source) for c in taken.copies]
        return replace(taken, copies=tuple(turned))

    patch.setattr(BlockManager, "_cover", turned)


def writes_to_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    """Nobody copies: the branches of a request write over each other."""
    patch.setattr(BlockManager, "_protects", lambda manager, table, position: False)


def forks_without_owning(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a parent are its child's too, but counted once."""
    share = BlockManager._share

    def uncounted(manager: BlockManager, sequence: Sequence, found: _Found) -> None:
        share(manager, sequence, found)
        if found.parent is not None:
            for block in chain.from_iterable(found.entries):
                manager.pool._references[block] -= 1

    def release(pool: BlockPool, block: int, *, keep: bool, fenced: bool = False) -> None:
        if pool._references[block] == 1:
            (pool._cached.update({block: None}) if keep else pool._free.append(block))
        pool._references[block] = max(0, pool._references[block] - 1)

    patch.setattr(BlockManager, "_share", uncounted)
    patch.setattr(BlockPool, "release", release)


def tells_the_runner_a_wrong_block(patch: pytest.MonkeyPatch) -> None:
    reserve = BlockManager.reserve

    def off_by_one(manager: BlockManager, sequence: Sequence, upto: int) -> object:
        result = reserve(manager, sequence, upto)
        if isinstance(result, Shortage):
            return result
        wrong = [
            replace(write, blocks=tuple(max(0, block - 1) for block in write.blocks))
            for write in result.writes
        ]
        return replace(result, writes=tuple(wrong))

    patch.setattr(BlockManager, "reserve", off_by_one)


def counts_a_cached_token_too_many(patch: pytest.MonkeyPatch) -> None:
    admit = Sequence.admit

    def greedy(sequence: Sequence, *, row: int, cached: int, now: float) -> None:
        admit(sequence, row=row, cached=min(cached + 1, len(sequence.tokens) - 1), now=now)

    patch.setattr(Sequence, "admit", greedy)


def publishes_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    seal = BlockManager.seal

    def early(manager: BlockManager, sequence: Sequence) -> None:
        computed, sequence.computed = sequence.computed, len(sequence.tokens)
        seal(manager, sequence)
        sequence.computed = computed

    patch.setattr(BlockManager, "seal", early)


def ignores_the_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_context_of", lambda scheduler, request: scheduler._context)


def matches_by_tokens_of_one_block(patch: pytest.MonkeyPatch) -> None:
    """The key does not say what came before."""

    def key(cache: PrefixCache, parent: object, tokens: tuple[int, ...]) -> bytes:
        return repr(tokens).encode()

    def holds(node: Prefix, parent: object, tokens: tuple[int, ...]) -> bool:
        return node.tokens == tokens

    patch.setattr(PrefixCache, "_key", key)
    patch.setattr(Prefix, "holds", holds)


def keeps_progress_over_preemption(patch: pytest.MonkeyPatch) -> None:
    admit = Sequence.admit

    def stale(sequence: Sequence, *, row: int, cached: int, now: float) -> None:
        kept = max(cached, len(sequence.tokens) - 1) if sequence.preemptions else cached
        admit(sequence, row=row, cached=kept, now=now)

    patch.setattr(Sequence, "admit", stale)


def takes_what_begins_alike_for_longer(patch: pytest.MonkeyPatch) -> None:
    begins_like = PrefixCache.begins_like

    def longer(cache: PrefixCache, parent: object, tokens: tuple[int, ...]) -> object:
        found = begins_like(cache, parent, tokens)
        return found and (found[0], min(found[1] + 1, len(tokens)))

    patch.setattr(PrefixCache, "begins_like", longer)


def finds_what_begins_alike_anywhere(patch: pytest.MonkeyPatch) -> None:
    """The tokens are the same, but not those before them."""
    begins_like = PrefixCache.begins_like

    def anywhere(cache: PrefixCache, parent: object, tokens: tuple[int, ...]) -> object:
        found = [begins_like(cache, other, tokens) for other in list(cache._children)]
        return max(filter(None, found), key=lambda one: one[1], default=None)

    patch.setattr(PrefixCache, "begins_like", anywhere)


def swaps_layer_groups(patch: pytest.MonkeyPatch) -> None:
    publish = PrefixCache.publish

    def crossed(cache: PrefixCache, node: Prefix, group: int, block: int) -> bool:
        return publish(cache, node, 1 - group, block)

    patch.setattr(PrefixCache, "publish", crossed)


BROKEN: list[Patch] = [
    shares_without_owning,
    forgets_evictions,
    skips_copies,
    copies_the_wrong_way,
    writes_to_shared_blocks,
    forks_without_owning,
    tells_the_runner_a_wrong_block,
    counts_a_cached_token_too_many,
    publishes_before_it_is_computed,
    ignores_the_salt,
    matches_by_tokens_of_one_block,
    keeps_progress_over_preemption,
    swaps_layer_groups,
    takes_what_begins_alike_for_longer,
    finds_what_begins_alike_anywhere,
]


def test_a_sound_core_is_found_sound(seed: int) -> None:
    serve(SETUP, seed, requests_served=200)


@pytest.mark.parametrize("breaks", BROKEN)
def test_a_broken_core_is_found(breaks: Patch, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    breaks(monkeypatch)
    with pytest.raises(WrongContent):
        serve(SETUP, seed, requests_served=600)
