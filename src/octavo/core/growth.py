"""Growth: the tokens of a step, and the blocks for them, shared out among those that run.

Who ranks last yields when blocks are short, or waits in place; so the one that ranks first can
always go on.
"""

from collections.abc import Container
from collections.abc import Sequence as Items
from typing import get_args

from octavo.core import policy
from octavo.core.acceptance import Experience
from octavo.core.block_manager import BlockManager
from octavo.core.block_pool import Shortage
from octavo.core.budget import Budget
from octavo.core.draft import Draft
from octavo.core.events import Chunked, Decision, Deferred, TokenLimit
from octavo.core.holds import Holds
from octavo.core.pace import Pace
from octavo.core.preemption import Preemptions
from octavo.core.roster import Roster
from octavo.core.sequence import Sequence


class Growth:
    """Cost     O(running), and no more than a look at each one that has room in its last block."""

    def __init__(
        self,
        manager: BlockManager,
        roster: Roster,
        holds: Holds,
        preemptions: Preemptions,
        pace: Pace,
        rounds: Pace,
        experience: Experience,
    ) -> None:
        self._manager = manager
        self._roster = roster
        self._holds = holds
        self._preemptions = preemptions
        self._pace = pace
        self._rounds = rounds
        self._experience = experience

    def share_out(self, draft: Draft) -> None:
        """Give tokens and blocks to those that run, as far as either goes."""
        self._grant(draft, self._roster.running)
        self._secure(draft)
        self._pass_on(draft)

    def guess(self, draft: Draft, draws: int) -> None:
        """Let those that decode guess ahead, with tokens and blocks that nobody else asks for; at
        most for so many positions tokens are drawn.

        What a guess costs and saves is estimated: from how long steps and rounds of guesses took,
        and how many were right.
        """
        most, pace = draft.at.limits.drafts, self._pace
        decoding = [one for one in draft.grants if one.decodes] if most else []
        if not decoding:
            return
        room = draws - sum([one.demand == draft.grants[one] for one in draft.grants])
        tokens = sum(draft.grants.values())
        step_s, share = pace.seconds(tokens), len(decoding)
        position = pace.token_s * share / step_s if step_s else 1.0
        guess = self._rounds.seconds(share) / step_s if step_s else 0.0
        for sequence in decoding:
            drafting = sequence.drafting
            drafting.begin(self._experience.rate)
            behind = sequence.length - drafting.reached
            wanted = drafting.worth(position + guess, guess * position * behind)
            left = min(sequence.last_position - sequence.length, sequence.longest_chunk - 1)
            count = min(wanted, most, left, draft.budget.left, room)
            if count > 0 and (count := self._covered(sequence, count, draft)):
                draft.guesses[sequence] = draft.budget.grant(count)
                room -= count

    def _covered(self, sequence: Sequence, count: int, draft: Draft) -> int:
        """For how many drafts of one there are blocks: those it has, and one that nobody wants."""
        after = sequence.scheduled + 1
        if after + count <= sequence.writable:
            return count
        wanted = draft.binds or draft.awaited or draft.promise or sequence in draft.covers
        wanted = wanted or any(
            isinstance(one, Deferred) and one.limit in ("blocks", "predicted", "in_transfer")
            for one in draft.decisions
        )
        if not wanted:
            headroom = draft.at.limits.watermark_blocks
            reservation = self._manager.reserve(sequence, after + count, headroom)
            if not isinstance(reservation, Shortage):
                draft.cover(sequence, reservation)
                return count
        return max(0, sequence.writable - after)

    def _grant(self, draft: Draft, running: Items[Sequence]) -> None:
        """Hand the token budget out."""
        demands = {sequence: sequence.demand for sequence in running if sequence.demand}
        wanted = sum(demands.values())
        if draft.budget.covers(wanted):
            draft.budget.grant(wanted)
            draft.grants.update(demands)
            return
        for sequence, demand in policy.service_order(demands.items(), draft.at):
            granted = draft.budget.grant(demand)
            if granted:
                draft.grants[sequence] = granted
            if granted < demand:
                draft.decisions.append(_short_of_tokens(sequence, granted, demand, draft.budget))

    def _secure(self, draft: Draft) -> None:
        """Find blocks for every grant, by rank.

        Nobody yields for blocks that come back when moves in flight are over: they are waited for.
        """
        growing = [
            sequence
            for sequence, granted in draft.grants.items()
            if sequence.scheduled + granted > sequence.writable
        ]
        for sequence in policy.by_rank(growing):
            while sequence in draft.grants:
                upto = sequence.scheduled + draft.grants[sequence]
                promised = self._promised_over(sequence, draft)
                headroom = max(draft.awaited, promised)
                reservation = self._manager.reserve(sequence, upto, headroom)
                if not isinstance(reservation, Shortage):
                    draft.cover(sequence, reservation)
                    break
                if promised > draft.awaited:
                    draft.defer(sequence, "blocks", reservation.blocks)
                    break
                if reservation.blocks <= self._manager.pool.fenced:
                    draft.awaited = self._manager.pool.available + reservation.blocks
                    draft.defer(sequence, "in_transfer", reservation.blocks)
                    break
                self._make_room(sequence, upto, reservation.blocks, draft)

    @staticmethod
    def _promised_over(sequence: Sequence, draft: Draft) -> int:
        """How many blocks are promised to one that `sequence` would yield to: did it grow into
        them, somebody else would have to give as many again."""
        promise = draft.promise
        if promise is None or not policy.yields(sequence, promise.sequence, draft.at):
            return 0
        return promise.blocks

    def _make_room(self, sequence: Sequence, upto: int, missing: int, draft: Draft) -> None:
        """Let a hold go, or preempt who ranks last; if all that ranks below would not do, nobody
        yields, and `sequence` waits in place."""
        below = policy.below(sequence, self._roster.running)
        lacking = self._manager.lacking(sequence, upto, below, draft.awaited, holds=True)
        if not lacking and (dropped := self._holds.yield_to(sequence)):
            draft.decisions.append(dropped)
            return
        victim = policy.victim_for(sequence, self._roster.running)
        if victim is None or lacking:
            draft.defer(sequence, "blocks", missing)
        else:
            self._preemptions.preempt(victim, sequence, draft)

    def _pass_on(self, draft: Draft) -> None:
        """Offer the tokens that came back to those for whom none were left.

        Otherwise one that is served next, ranks last and finds no block could hold a small budget
        for ever, and nobody would go on to give it blocks.
        """
        while draft.stuck and draft.budget.left and not draft.preempted:
            served = {*draft.grants, *draft.stuck}
            rest = [one for one in self._roster.running if one.demand and one not in served]
            if not rest:
                return
            ids = {one.id for one in rest}
            draft.decisions = [said for said in draft.decisions if not _no_tokens(said, ids)]
            self._grant(draft, rest)
            self._secure(draft)


def _no_tokens(decision: Decision, ids: Container[str]) -> bool:
    """Whether it says that one of these got no tokens."""
    return (
        isinstance(decision, Deferred)
        and decision.limit in get_args(TokenLimit)
        and decision.request_id in ids
    )


def _short_of_tokens(sequence: Sequence, granted: int, demand: int, budget: Budget) -> Decision:
    if granted:
        return Chunked(sequence.id, granted, demand, budget.limit)
    return Deferred(sequence.id, budget.limit, demand)
