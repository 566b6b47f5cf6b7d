"""Admissions: who waits starts, in the order of the policy, if there is room for it."""

from collections.abc import Sequence as Items

from octavo.core import policy
from octavo.core.block_manager import BlockManager
from octavo.core.block_pool import Shortage
from octavo.core.counters import Counters
from octavo.core.draft import Draft, Promise
from octavo.core.events import Admitted, Chunked, Deferred, Stretch
from octavo.core.following import Followers
from octavo.core.grants import Admission
from octavo.core.hits import Parent
from octavo.core.holds import Holds
from octavo.core.misses import first_miss
from octavo.core.pace import Pace
from octavo.core.prediction import AnswerLengths
from octavo.core.preemption import Preemptions
from octavo.core.roster import Roster
from octavo.core.sequence import Sequence


class Admissions:
    """Keeps    nobody overtakes the first who must wait. Who waits for another's prompt is not in
    the way.
    """

    def __init__(
        self,
        manager: BlockManager,
        roster: Roster,
        holds: Holds,
        followers: Followers,
        preemptions: Preemptions,
        pace: Pace,
        lengths: AnswerLengths,
        counters: Counters,
    ) -> None:
        self._manager = manager
        self._roster = roster
        self._holds = holds
        self._followers = followers
        self._preemptions = preemptions
        self._pace = pace
        self._lengths = lengths
        self._counters = counters
        self.promise: Promise | None = None

    def take_promise(self) -> Promise | None:
        """What the last plan promised to one that waits; it holds for one plan."""
        promise, self.promise = self.promise, None
        return promise

    def admit(self, draft: Draft) -> None:
        """Admit in order until a limit is reached."""
        while not draft.preempted:
            sequence = policy.first(self._roster.waiting, draft.at)
            if sequence is None:
                return
            if self._follow(sequence, draft):
                continue
            deferred = self._admit(sequence, draft)
            if deferred is not None:
                draft.decisions.append(deferred)
                return

    def _follow(self, sequence: Sequence, draft: Draft) -> bool:
        """Set it aside while one that runs computes the beginning of its prompt, if that is worth
        waiting for."""
        if not draft.budget.left:
            return False
        if draft.leaders is None:
            running = self._roster.running
            draft.leaders = [one for one in running if self._manager.fills_prompt(one)]
        before = [one for one in draft.leaders if policy.goes_before(one, sequence, draft.at)]
        if not before:
            return False
        lead = self._manager.lead(sequence, before, self._parent_of(sequence))
        if lead is None or not policy.worth_following(
            lead.alike, lead.lacking, draft.budget.left, self._pace
        ):
            return False
        self._roster.waiting.set_aside(sequence, draft.at.now)
        self._followers.follow(lead.leader, lead.upto, sequence)
        draft.decisions.append(Deferred(sequence.id, "prefix", lead.alike, lead.leader.id))
        return True

    def _admit(self, sequence: Sequence, draft: Draft) -> Deferred | None:
        if sequence.promised:
            return Deferred(sequence.id, "in_flight", sequence.promised)
        if moving := self._manager.in_transfer(sequence):
            return Deferred(sequence.id, "in_transfer", moving)
        if draft.budget.left == 0:
            return Deferred(sequence.id, draft.budget.limit, sequence.demand)
        if excess := policy.overload(sequence, [bind.request for bind in draft.binds], draft.at):
            return Deferred(sequence.id, "slo", excess)
        chunk = min(draft.budget.left, sequence.longest_chunk)
        if self._manager.pool.yielding:
            self._ask_holds(sequence, chunk, draft)
        victims = self._victims(sequence, chunk, draft)
        if victims is None:
            return self._short_of_room(sequence, chunk, draft)
        for victim in victims:
            self._preemptions.preempt(victim, sequence, draft)
        admission = self._manager.admit(
            sequence,
            self._roster.next_row,
            chunk=chunk,
            upto=policy.reserved(sequence, draft.at.limits.admission),
            headroom=self._headroom(sequence, (), draft),
            parent=self._parent_of(sequence),
        )
        if isinstance(admission, Shortage):
            assert self._manager.pool.fenced, "counted before"
            self.promise = Promise(sequence, self._manager.pool.available + admission.blocks)
            return Deferred(sequence.id, "in_transfer", admission.blocks)
        self._start(sequence, admission, chunk, draft)
        return None

    # --- is there room

    def _ask_holds(self, sequence: Sequence, chunk: int, draft: Draft) -> None:
        """Let holds go, as many as it takes for `sequence` to start, if it can then."""
        lower = policy.yielding_to(sequence, self._roster.running, draft.at)
        leaving = lower[: max(self._rows_missing(draft), 0)]
        if self._rows_missing(draft, len(lower)) > 0:
            return
        if self._missing(sequence, chunk, lower, draft, holds=True):
            return
        while self._missing(sequence, chunk, leaving, draft):
            dropped = self._holds.yield_to(sequence)
            if dropped is None:
                return
            draft.decisions.append(dropped)

    def _victims(self, sequence: Sequence, chunk: int, draft: Draft) -> list[Sequence] | None:
        """Who must yield a row or blocks for `sequence` to start: the fewest, in their order; None
        if all would not do.

        Cost     log(those of lower classes) times a count of their blocks.
        """
        lower = policy.yielding_to(sequence, self._roster.running, draft.at)
        few, enough = max(self._rows_missing(draft), 0), len(lower)
        if few > enough:
            return None
        if not self._missing(sequence, chunk, lower[:few], draft):
            return lower[:few]
        if self._missing(sequence, chunk, lower, draft):
            return None
        while enough - few > 1:  # the first few do not do
            middle = (few + enough) // 2
            if self._missing(sequence, chunk, lower[:middle], draft):
                few = middle
            else:
                enough = middle
        return lower[:enough]

    def _short_of_room(self, sequence: Sequence, chunk: int, draft: Draft) -> Deferred:
        missing = self._missing(sequence, chunk, (), draft)
        if missing and not self._missing(sequence, chunk, (), draft, foresee=False):
            return Deferred(sequence.id, "predicted", missing)
        if missing:
            return Deferred(sequence.id, "blocks", missing)
        return Deferred(sequence.id, "rows", self._rows_missing(draft))

    def _rows_missing(self, draft: Draft, leaving: int = 0) -> int:
        """How many more sequences must leave before one may start; 0 or less: it may now."""
        return len(self._roster.running) - leaving + 1 - draft.at.limits.sequences

    def _missing(
        self,
        sequence: Sequence,
        chunk: int,
        leaving: Items[Sequence],
        draft: Draft,
        *,
        holds: bool = False,
        foresee: bool = True,
    ) -> int:
        return self._manager.missing(
            sequence,
            chunk=chunk,
            upto=policy.reserved(sequence, draft.at.limits.admission),
            headroom=self._headroom(sequence, leaving, draft, foresee=foresee),
            leaving=leaving,
            parent=self._parent_of(sequence, leaving),
            holds=holds,
        )

    def _parent_of(self, sequence: Sequence, leaving: Items[Sequence] = ()) -> Parent | None:
        """Whose blocks it can go on from: those of a sibling that runs and is not `leaving`, or of
        the hold it names."""
        parents: list[Parent | None] = [
            self._roster.siblings_of(sequence.request).parent_of(sequence, leaving),
            self._holds.of(sequence),
        ]
        there = [parent for parent in parents if parent is not None]
        return max(there, key=lambda parent: parent.common_with(sequence), default=None)

    def _headroom(
        self, sequence: Sequence, leaving: Items[Sequence], draft: Draft, *, foresee: bool = True
    ) -> int:
        gone = set(leaving)
        staying = [one for one in self._roster.running if one not in gone]
        limits = draft.at.limits
        foreseen = 0
        if foresee and policy.foresees(limits):
            foreseen = self._manager.foreseen(sequence, staying, leaving, self._lengths)
        return policy.headroom(
            sequence,
            watermark=limits.watermark_blocks,
            alone=not staying,
            blocks=self._manager.pool.total,
            foreseen=foreseen,
        )

    # --- it starts

    def _start(self, sequence: Sequence, admission: Admission, chunk: int, draft: Draft) -> None:
        resumed, now = sequence.preemptions > 0, draft.at.now
        overtook = 0 if resumed else self._roster.waiting.earlier(sequence)
        row, ticket = self._roster.start(sequence, now)
        sequence.take_rank((policy.rank_class(sequence, draft.at), ticket))
        cached, restored = admission.cached_tokens, admission.restored_tokens
        sequence.admit(row=row, cached=cached, restored=restored, now=now)
        if draft.leaders is not None and self._manager.fills_prompt(sequence):
            draft.leaders.append(sequence)
        draft.binds.append(sequence.bind())
        draft.cover(sequence, admission)
        draft.moves_in += admission.moves
        self._count(sequence, admission, resumed)
        draft.decisions.append(
            Admitted(
                sequence.id,
                row,
                sequence.length,
                cached,
                admission.blocks_found,
                admission.blocks_allocated,
                resumed,
                None if admission.parent is None else admission.parent.id,
                max(0, restored - cached),
                len(admission.moves),
                self._missed(sequence, admission, resumed),
                overtook,
            )
        )
        self._holds.hit(sequence, now)
        draft.pinned += self._holds.pin(sequence, draft.at.limits.pinned_blocks, now)
        self._grant(sequence, chunk, draft)
        self._roster.queue_next(sequence, now)

    def _grant(self, sequence: Sequence, chunk: int, draft: Draft) -> None:
        demand = sequence.demand
        draft.grants[sequence] = granted = draft.budget.grant(min(demand, chunk))
        if granted < demand:
            draft.decisions.append(Chunked(sequence.id, granted, demand, draft.budget.limit))

    def _count(self, sequence: Sequence, admission: Admission, resumed: bool) -> None:
        cached = admission.cached_tokens
        if not resumed:
            self._roster.service.prompt(sequence.request.tenant, sequence.length - cached)
        self._counters.tokens_moved_in += max(0, admission.restored_tokens - cached)
        if self._manager.cache is None or not sequence.request.reads_cache:
            return
        # What a sibling or a hold shares is no hit, and the prompt of its siblings is counted once.
        if not resumed and not sequence.number and admission.parent is None:
            self._counters.prefix_tokens_queried += sequence.length
            self._counters.prefix_tokens_hit += cached

    def _missed(self, sequence: Sequence, admission: Admission, resumed: bool) -> Stretch | None:
        if resumed or admission.parent is not None:
            return None
        return first_miss(self._manager, sequence, admission.cached_tokens)
