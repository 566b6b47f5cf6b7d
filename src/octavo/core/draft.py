"""Draft: a plan in the making; InFlight: one that was handed out and is not committed yet."""

from typing import Literal, NamedTuple

from octavo.core.budget import Budget
from octavo.core.events import Chunked, Decision, Deferred, Evicted
from octavo.core.grants import Admission, Reservation
from octavo.core.plan import Bind, Move, StepPlan
from octavo.core.policy import Circumstances
from octavo.core.sequence import Sequence


class Promise(NamedTuple):
    """So many `blocks` stay available for `sequence`, which waits: victims gave theirs for it."""

    sequence: Sequence
    blocks: int


class Draft:
    """What each sequence is granted, and why the others are not, until the plan is closed."""

    def __init__(self, plan_id: int, at: Circumstances, budget: Budget) -> None:
        self.id = plan_id
        self.at = at
        self.budget = budget
        self.grants: dict[Sequence, int] = {}
        self.binds: list[Bind] = []
        self.guesses: dict[Sequence, int] = {}
        """How many drafts each may have besides."""
        self.covers: dict[Sequence, Reservation | Admission] = {}
        self.decisions: list[Decision] = []
        self.pinned: list[Decision] = []
        """What became of the pins that requests admitted now ask for."""
        self.moves_out: list[Move] = []
        self.moves_in: list[Move] = []
        self.stuck: set[Sequence] = set()
        """Those that no blocks were found for: they wait in place, and their tokens came back."""
        self.preempted = False
        self.awaited = 0
        """Blocks kept for those who will have enough when the moves in flight are over."""
        self.promise: Promise | None = None
        """What victims of the plan before gave up for one that waits still."""
        self.leaders: list[Sequence] | None = None
        """Who is computing its prompt, once somebody has asked."""

    def cover(self, sequence: Sequence, taken: Reservation | Admission) -> None:
        self.covers[sequence] = taken
        self.decisions += [Evicted(block, sequence.id) for block in taken.evicted]

    def defer(
        self, sequence: Sequence, limit: Literal["blocks", "in_transfer"], missing: int
    ) -> None:
        """Take back what was granted to `sequence`: it waits in place."""
        self.budget.refund(self.grants.pop(sequence))
        self.stuck.add(sequence)
        self.decisions.append(Deferred(sequence.id, limit, missing))

    def take_back(self, victim: Sequence) -> Reservation | Admission | None:
        """Take back all that a victim was granted; returns the blocks it was given in this plan."""
        self.preempted = True
        self.budget.refund(self.grants.pop(victim, 0))
        return self.covers.pop(victim, None)

    @property
    def empty(self) -> bool:
        """Nothing is to be computed or moved, and nothing has happened that must be told."""
        if self.grants or self.moves_out or self.moves_in:
            return False
        return all(isinstance(said, Deferred | Chunked) for said in self.decisions)


class InFlight(NamedTuple):
    """A plan of so many `tokens`, made at `planned_at`: span i is of `sequences[i]`, which was in
    `epochs[i]` then."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    epochs: tuple[int, ...]
    tokens: int
    planned_at: float
