"""Faults to plant in the core, each one patch: bugs that paged engines have had.

`WRONG_CONTENT` lead a runner to read what it must not: the oracle alone finds those. `WRONG_BOOKS`
are found by an audit, by the answers, or because a request does not end.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import chain

import pytest

from octavo.core import block_manager, policy
from octavo.core.admission import Admissions
from octavo.core.block_manager import BlockManager
from octavo.core.block_pool import BlockPool, Shortage, Taken
from octavo.core.budget import Budget
from octavo.core.events import Event, Finished, Token
from octavo.core.following import Followers
from octavo.core.hits import Found
from octavo.core.holds import Holds
from octavo.core.plan import Move, RowFailed, Sampled, Span
from octavo.core.prefix_cache import Context, Fate, Prefix, PrefixCache
from octavo.core.room import Room
from octavo.core.roster import Roster
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence, State
from octavo.core.swap import HostArena, Swapped
from octavo.core.transfers import Transfers
from octavo.core.windows import first_held

Patch = Callable[[pytest.MonkeyPatch], None]


def shares_without_owning(patch: pytest.MonkeyPatch) -> None:
    """A hit does not count as an owner: the block is handed to another while it is read."""

    def release(pool: BlockPool, block: int, *, keep: bool, **how: bool) -> None:
        if pool._references[block]:
            pool._references[block] = 0
            (pool._cached.update({block: None}) if keep else pool._free.append(block))

    patch.setattr(BlockPool, "share", _own)
    patch.setattr(BlockPool, "release", release)
    _fence_nothing(patch)


def _own(pool: BlockPool, block: int) -> None:
    """Whatever state it is in: it may have been given to two."""
    pool._cached.pop(block, None)
    pool._references[block] += 1


def _fence_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "fence", lambda pool, block: None)
    patch.setattr(BlockPool, "lift", lambda pool, block, keep: None)


def forgets_evictions(patch: pytest.MonkeyPatch) -> None:
    """B002: a block taken for new content stays in the look-up."""

    def forget(cache: PrefixCache, block: int, fate: Fate) -> None:
        return None

    patch.setattr(PrefixCache, "forget", forget)


def skips_copies(patch: pytest.MonkeyPatch) -> None:
    cover = BlockManager._cover

    def uncopied(manager: BlockManager, *arguments: object) -> object:
        taken = cover(manager, *arguments)
        return taken if isinstance(taken, Shortage) else taken._replace(copies=())

    patch.setattr(BlockManager, "_cover", uncopied)


def copies_the_wrong_way(patch: pytest.MonkeyPatch) -> None:
    cover = BlockManager._cover

    def turned(manager: BlockManager, *arguments: object) -> object:
        taken = cover(manager, *arguments)
        if isinstance(taken, Shortage):
            return taken
        turned = [replace(c, source=c.target, target=c.source) for c in taken.copies]
        return taken._replace(copies=tuple(turned))

    patch.setattr(BlockManager, "_cover", turned)


def writes_to_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    """Nobody copies: the branches of a request write over each other."""
    patch.setattr(Room, "protects", lambda room, table, position: False)
    patch.setattr(BlockPool, "share", _own)


def forks_without_owning(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a parent are its child's too, but counted once."""
    share = BlockManager._share

    def uncounted(manager: BlockManager, sequence: Sequence, found: Found, start: int) -> None:
        share(manager, sequence, found, start)
        if found.parent is not None:
            for block in chain.from_iterable(found.entries):
                manager.pool._references[block] -= 1

    def release(pool: BlockPool, block: int, *, keep: bool, **how: bool) -> None:
        if pool._references[block] == 1:
            (pool._cached.update({block: None}) if keep else pool._free.append(block))
        pool._references[block] = max(0, pool._references[block] - 1)

    patch.setattr(BlockManager, "_share", uncounted)
    patch.setattr(BlockPool, "share", _own)
    patch.setattr(BlockPool, "release", release)
    _fence_nothing(patch)


def tells_the_runner_a_wrong_block(patch: pytest.MonkeyPatch) -> None:
    reserve = BlockManager.reserve

    def off_by_one(manager: BlockManager, sequence: Sequence, *rest: int) -> object:
        result = reserve(manager, sequence, *rest)
        if isinstance(result, Shortage):
            return result
        wrong = [
            replace(write, blocks=tuple(max(0, block - 1) for block in write.blocks))
            for write in result.writes
        ]
        return result._replace(writes=tuple(wrong))

    patch.setattr(BlockManager, "reserve", off_by_one)


def counts_a_cached_token_too_many(patch: pytest.MonkeyPatch) -> None:
    admit = Sequence.admit

    def greedy(sequence: Sequence, *, row: int, cached: int, **rest: float) -> None:
        admit(sequence, row=row, cached=min(cached + 1, len(sequence.tokens) - 1), **rest)

    patch.setattr(Sequence, "admit", greedy)


def publishes_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    seal = BlockManager.seal

    def early(manager: BlockManager, sequence: Sequence) -> None:
        granted = min(len(sequence.tokens), sequence.writable)
        computed, sequence.computed = sequence.computed, granted
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

    def stale(sequence: Sequence, *, row: int, cached: int, **rest: float) -> None:
        kept = max(cached, len(sequence.tokens) - 1) if sequence.preemptions else cached
        admit(sequence, row=row, cached=kept, **rest)

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


def gives_back_too_early(patch: pytest.MonkeyPatch) -> None:
    """A block leaves as soon as one of its positions is out of the window."""

    def early(window: int | None, computed: int, block_size: int) -> int:
        return first_held(window, computed + block_size - 1, block_size)

    patch.setattr(block_manager, "first_held", early)


def finds_a_prefix_without_its_window(patch: pytest.MonkeyPatch) -> None:
    """Hits ask the groups that see all positions only."""
    patch.setattr(PrefixCache, "_gap", lambda cache, chain, count, most: None)


def overwrites_what_is_being_moved(patch: pytest.MonkeyPatch) -> None:
    """No fence: the blocks of a victim are given away before they have left."""
    _fence_nothing(patch)


def brings_nothing_back(patch: pytest.MonkeyPatch) -> None:
    bring_back = Transfers.bring_back

    def forgotten(transfers: Transfers, sequence: Sequence, found: int) -> tuple[Move, ...]:
        bring_back(transfers, sequence, found)
        return ()

    patch.setattr(Transfers, "bring_back", forgotten)


def brings_back_one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    put = HostArena.put

    def more(arena: HostArena, name: str, tokens: int, blocks: Items[Items[int]]) -> Swapped:
        return put(arena, name, tokens + 1, blocks)

    patch.setattr(HostArena, "put", more)


def moves_to_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    """What comes back goes to the blocks of the other layer group."""
    bring_back = Transfers.bring_back

    def crossed(transfers: Transfers, sequence: Sequence, found: int) -> tuple[Move, ...]:
        moves = bring_back(transfers, sequence, found)
        turned = (*moves[len(moves) // 2 :], *moves[: len(moves) // 2])
        return tuple(replace(a, block=b.block) for a, b in zip(moves, turned, strict=True))

    patch.setattr(Transfers, "bring_back", crossed)


WRONG_CONTENT: list[Patch] = [
    gives_back_too_early,
    finds_a_prefix_without_its_window,
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
    overwrites_what_is_being_moved,
    brings_nothing_back,
    brings_back_one_token_too_many,
    moves_to_the_neighbour,
]


# --- the books


def takes_any_epoch(patch: pytest.MonkeyPatch) -> None:
    """What a step in flight computed before a preemption counts for the blocks after it."""
    take_in = Scheduler._take_in

    def unchecked(
        scheduler: Scheduler, sequence: Sequence, epoch: int, *rest: object
    ) -> Iterable[Event]:
        return take_in(scheduler, sequence, sequence.epoch, *rest)

    patch.setattr(Scheduler, "_take_in", unchecked)


def leaves_the_adapter_out(patch: pytest.MonkeyPatch) -> None:
    encode = Context.encode
    patch.setattr(Context, "encode", lambda context: encode(replace(context, adapter="")))
    patch.setattr(Prefix, "holds", lambda node, parent, tokens: node.tokens == tokens)


def leaks_what_it_found_when_the_rest_is_short(patch: pytest.MonkeyPatch) -> None:
    missing = BlockManager.missing

    def shares_first(manager: BlockManager, sequence: Sequence, **asked: object) -> int:
        short = missing(manager, sequence, **asked)
        if short:
            for block in chain.from_iterable(node.blocks for node in sequence.prefixes):
                if manager.pool.is_cached(block):
                    manager.pool.share(block)
        return short

    patch.setattr(BlockManager, "missing", shares_first)


def releases_twice(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a preempted sequence go back when it yields, and when it ends."""
    release = BlockManager.release

    def again(manager: BlockManager, sequence: Sequence) -> int:
        held = [block for table in sequence.tables for _, block in table.live()]
        released = release(manager, sequence)
        for block in held[:1]:
            if manager.pool.references(block):
                manager.pool.release(block, keep=manager._hits.publishes(block))
        return released

    patch.setattr(BlockManager, "release", again)


def publishes_partial_blocks(patch: pytest.MonkeyPatch) -> None:
    """A block that is only begun is offered for all that its sequence will put there."""
    seal = BlockManager.seal

    def rounded_up(manager: BlockManager, sequence: Sequence) -> None:
        computed = sequence.computed
        sequence.computed = min(len(sequence.tokens), computed + manager.block_size - 1)
        seal(manager, sequence)
        sequence.computed = computed

    patch.setattr(BlockManager, "seal", rounded_up)


def evicts_an_owned_block(patch: pytest.MonkeyPatch) -> None:
    """One block that a sequence owns counts as available, and is handed out when the rest is."""
    take = BlockPool.take

    def owned(pool: BlockPool) -> list[int]:
        return [block for block, count in enumerate(pool._references) if count == 1][:1]

    def available(pool: BlockPool) -> int:
        return len(pool._free) + len(pool._cached) + len(owned(pool))

    def takes(pool: BlockPool, count: int) -> Taken | Shortage:
        if len(pool._free) + len(pool._cached) < count <= pool.available:
            pool._free += owned(pool)
        return take(pool, count)

    patch.setattr(BlockPool, "available", property(available))
    patch.setattr(BlockPool, "take", takes)


def keeps_the_row_of_the_preempted(patch: pytest.MonkeyPatch) -> None:
    preempt = Sequence.preempt

    def stays(sequence: Sequence, **how: bool) -> None:
        row = sequence.row
        preempt(sequence, **how)
        sequence.row = row

    patch.setattr(Sequence, "preempt", stays)


def loses_the_row_of_the_preempted(patch: pytest.MonkeyPatch) -> None:
    preempt = Roster.preempt

    def lost(roster: Roster, victim: Sequence, **how: bool) -> None:
        preempt(roster, victim, **how)
        roster._rows.pop()

    patch.setattr(Roster, "preempt", lost)


def appends_twice_after_preemption(patch: pytest.MonkeyPatch) -> None:
    append = Sequence.append

    def twice(sequence: Sequence, token: int, *about: float) -> Token:
        event = append(sequence, token, *about)
        if sequence.preemptions and sequence.state is State.RUNNING and sequence.computed:
            sequence.tokens.append(token)
        return event

    patch.setattr(Sequence, "append", twice)


def draws_again_after_preemption(patch: pytest.MonkeyPatch) -> None:
    """The last token is dropped with the KV, and sampled, and sent, a second time."""
    preempt = Sequence.preempt

    def shortened(sequence: Sequence, **how: bool) -> None:
        preempt(sequence, **how)
        if sequence.answer_length:
            sequence.tokens.pop()

    patch.setattr(Sequence, "preempt", shortened)


def preempts_the_first(patch: pytest.MonkeyPatch) -> None:
    """The victim is whoever ranks highest."""

    def victim(sequence: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        others = [other for other in running if other is not sequence]
        return min(others, key=lambda other: other.rank, default=None)

    patch.setattr(policy, "victim_for", victim)


def preempts_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy, "victim_for", lambda sequence, running: None)


def forgets_refunds(patch: pytest.MonkeyPatch) -> None:
    """The tokens of one who waits in place are gone for all others."""
    patch.setattr(Budget, "refund", lambda budget, tokens: None)


def keeps_the_blocks_of_the_aborted(patch: pytest.MonkeyPatch) -> None:
    """Whoever is cancelled while a step of theirs is in flight never gives their blocks back."""
    end = Scheduler._end

    def leaks(scheduler: Scheduler, sequence: Sequence, reason: str, *rest: object) -> Finished:
        if reason == "abort" and sequence.scheduled > sequence.computed:
            for table in sequence.tables:
                table.clear()
        return end(scheduler, sequence, reason, *rest)

    patch.setattr(Scheduler, "_end", leaks)


def goes_on_after_the_end(patch: pytest.MonkeyPatch) -> None:
    """A step in flight brings a token for an answer that has ended."""
    take_in = Scheduler._take_in

    def late(
        scheduler: Scheduler, one: Sequence, epoch: int, span: Span, outcome: object, now: float
    ) -> Iterable[Event]:
        if one.state is State.FINISHED and isinstance(outcome, Sampled):
            return [one.append(outcome.token, 0.0, now)]
        return take_in(scheduler, one, epoch, span, outcome, now)

    patch.setattr(Scheduler, "_take_in", late)


def trusts_what_failed(patch: pytest.MonkeyPatch) -> None:
    """A row that failed is treated as one that samples nothing: its request never ends."""
    take_in = Scheduler._take_in

    def trusting(
        scheduler: Scheduler, one: Sequence, epoch: int, span: Span, outcome: object, now: float
    ) -> Iterable[Event]:
        if isinstance(outcome, RowFailed):
            return ()
        return take_in(scheduler, one, epoch, span, outcome, now)

    patch.setattr(Scheduler, "_take_in", trusting)


def overlooks_a_full_block(patch: pytest.MonkeyPatch) -> None:
    """A step that fills a block, or leaves one behind its window, is taken for a mere token."""
    next_event = BlockManager.next_event
    patch.setattr(BlockManager, "next_event", lambda *about: next_event(*about) + 1)


def promises_no_token(patch: pytest.MonkeyPatch) -> None:
    """A step in flight is not counted: the next plan computes its position again."""

    schedule = Sequence.schedule

    def forgetful(sequence: Sequence, count: int, plan_id: int, drafts: int) -> Span:
        span = schedule(sequence, count, plan_id, drafts)
        sequence.scheduled = span.start
        return span

    patch.setattr(Sequence, "schedule", forgetful)


def counts_a_revived_block_twice(patch: pytest.MonkeyPatch) -> None:
    """A cached block that is hit counts as found, and as available for the rest too."""
    patch.setattr(BlockPool, "is_cached", lambda pool, block: False)


def holds_nothing_back(patch: pytest.MonkeyPatch) -> None:
    """Who was preempted is let in at once, and thrown out at once: no bound on preemptions."""
    patch.setattr(policy, "headroom", lambda sequence, **sizes: 0)


def spends_more_than_the_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Budget, "grant", lambda budget, demand: demand)


def admits_above_a_lowered_limit(patch: pytest.MonkeyPatch) -> None:
    """The limit on rows is that of the start, whatever holds now."""

    def missing(admissions: Admissions, draft: object, leaving: int = 0) -> int:
        return 1 - leaving - len(admissions._roster._rows)

    patch.setattr(Admissions, "_rows_missing", missing)


def publishes_one_block_for_two_prefixes(patch: pytest.MonkeyPatch) -> None:
    """A block that is published already is published again for what its next owner computed."""
    publish = PrefixCache.publish

    def twice(cache: PrefixCache, node: Prefix, group: int, block: int) -> bool:
        before = dict(cache._by_block)
        done = publish(cache, node, group, block)
        if done and isinstance(node.parent, Prefix):
            cache._by_block.update({b: n for b, n in before.items() if n[0] is node.parent})
            cache._by_block[block] = (node.parent, group)
        return done

    patch.setattr(PrefixCache, "publish", twice)


def gives_back_too_late(patch: pytest.MonkeyPatch) -> None:
    def late(window: int | None, computed: int, block_size: int) -> int:
        return max(0, first_held(window, computed, block_size) - 1)

    patch.setattr(block_manager, "first_held", late)


def gives_back_for_all_who_share(patch: pytest.MonkeyPatch) -> None:
    """B001: what a branch gives back is free, though its siblings still read it."""
    give_back = BlockManager._give_back

    def wholly(manager: BlockManager, sequence: Sequence, group: int, window: int) -> None:
        live = dict(sequence.tables[group].live())
        give_back(manager, sequence, group, window)
        for index, block in live.items():
            if index < sequence.tables[group].first and manager.pool.references(block):
                manager.pool.release(block, keep=False)

    patch.setattr(BlockManager, "_give_back", wholly)


def keeps_the_slots_of_the_ended(patch: pytest.MonkeyPatch) -> None:
    """Whoever ends while it is swapped never gives its slots back."""
    patch.setattr(BlockManager, "release", lambda manager, one: manager._release(one.tables))


def trusts_moves_that_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostArena, "lose", lambda arena, slots: None)


def brings_back_in_the_wrong_order(patch: pytest.MonkeyPatch) -> None:
    bring_back = Transfers.bring_back

    def reversed_slots(transfers: Transfers, *about: object) -> tuple[Move, ...]:
        moves = bring_back(transfers, *about)
        return tuple(
            replace(move, slot=other.slot)
            for move, other in zip(moves, reversed(moves), strict=True)
        )

    patch.setattr(Transfers, "bring_back", reversed_slots)


def counts_a_hold_twice(patch: pytest.MonkeyPatch) -> None:
    hold = BlockPool.hold

    def twice(pool: BlockPool, block: int) -> None:
        hold(pool, block)
        pool._holds[block] += 1

    patch.setattr(BlockPool, "hold", twice)


def keeps_the_blocks_of_a_dropped_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "let_go", lambda manager, tables: 0)


def pins_beyond_the_quota(patch: pytest.MonkeyPatch) -> None:
    pin = Holds.pin
    patch.setattr(
        Holds, "pin", lambda holds, sequence, quota, now: pin(holds, sequence, 10**6, now)
    )


def lets_no_pin_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holds, "expire", lambda holds, now: [])


def calls_no_follower_back(patch: pytest.MonkeyPatch) -> None:
    """Whom they waited for is gone or there; they wait on."""
    patch.setattr(Followers, "passed", lambda followers, leader: [])
    patch.setattr(Followers, "deserted", lambda followers, leader: [])


WRONG_BOOKS: list[Patch] = [
    calls_no_follower_back,
    gives_back_for_all_who_share,
    gives_back_too_late,
    brings_back_in_the_wrong_order,
    counts_a_hold_twice,
    keeps_the_blocks_of_a_dropped_hold,
    pins_beyond_the_quota,
    lets_no_pin_end,
    takes_any_epoch,
    leaves_the_adapter_out,
    leaks_what_it_found_when_the_rest_is_short,
    releases_twice,
    publishes_partial_blocks,
    evicts_an_owned_block,
    keeps_the_row_of_the_preempted,
    loses_the_row_of_the_preempted,
    appends_twice_after_preemption,
    draws_again_after_preemption,
    preempts_the_first,
    preempts_nobody,
    forgets_refunds,
    keeps_the_blocks_of_the_aborted,
    goes_on_after_the_end,
    trusts_what_failed,
    overlooks_a_full_block,
    promises_no_token,
    counts_a_revived_block_twice,
    holds_nothing_back,
    spends_more_than_the_budget,
    admits_above_a_lowered_limit,
    publishes_one_block_for_two_prefixes,
    keeps_the_slots_of_the_ended,
    trusts_moves_that_failed,
]
