"""Preemptions: one that runs gives up its row and its blocks for another, and waits again."""

from octavo.core.block_manager import BlockManager
from octavo.core.counters import Counters
from octavo.core.draft import Draft
from octavo.core.events import Interruption, Preempted
from octavo.core.following import Followers
from octavo.core.pace import Pace
from octavo.core.roster import Roster
from octavo.core.sequence import Sequence


class Preemptions:
    """How a victim yields is the limits' to say, or what is estimated to cost less."""

    def __init__(
        self,
        manager: BlockManager,
        roster: Roster,
        followers: Followers,
        pace: Pace,
        counters: Counters,
    ) -> None:
        self._manager = manager
        self._roster = roster
        self._followers = followers
        self._pace = pace
        self._counters = counters

    def preempt(self, victim: Sequence, beneficiary: Sequence, draft: Draft) -> None:
        """Take row, blocks and grant of the victim; nothing in flight of it counts any more."""
        cover = draft.take_back(victim)
        lost, kept = victim.computed, victim.scheduled
        yielded = self._manager.preempt(
            victim,
            draft.at.limits.preemption,
            recompute_s=self._pace.seconds(kept) if self._pace.known else None,
            intact=cover is None or not cover.copies,  # which will not be carried out
        )
        self._roster.preempt(victim, kept=bool(yielded.moves))
        if victim.barred:
            self._roster.waiting.set_aside(victim, draft.at.now)
        for follower in self._followers.deserted(victim):
            self._roster.waiting.call_back(follower)
        draft.moves_out += yielded.moves
        self._counters.preemptions += 1
        if yielded.moves:
            lost = 0
            self._counters.preemptions_moved += 1
            self._counters.tokens_moved_out += kept
        victim.interruptions += (
            Interruption(draft.at.now, yielded.how.mode, beneficiary.id, yielded.blocks),
        )
        draft.decisions.append(
            Preempted(
                victim.id,
                beneficiary.id,
                yielded.how.mode,
                yielded.blocks,
                lost,
                len(yielded.moves),
                *yielded.how.estimates_s,
            )
        )
