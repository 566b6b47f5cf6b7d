"""Searches: what a choice between beams does to tokens, blocks and rows.

A fork shares every block of its parent and copies the last one when either of the two writes to it.
So a search owns once what its beams have in common, and their ends. What nobody goes on from is
given back at once.
"""

from octavo.core.block_manager import BlockManager
from octavo.core.following import Followers
from octavo.core.plan import Sampled
from octavo.core.roster import Roster
from octavo.core.search import Ended, Search, Turn
from octavo.core.sequence import Sequence, State


class Searches:
    """The searches of all requests that make one."""

    def __init__(self, manager: BlockManager, roster: Roster, followers: Followers) -> None:
        self._manager = manager
        self._roster = roster
        self._followers = followers
        self._turned: dict[Sequence, int] = {}
        """Whose row must learn of another past, and their epochs."""

    def company_of(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """All that search with `sequence`; it alone if it does not search."""
        search = self._roster.siblings_of(sequence.request).search
        return (sequence,) if search is None else search.sequences

    def take(
        self, sequence: Sequence, sampled: Sampled, now: float
    ) -> list[tuple[Sequence, Ended]]:
        """Take in what one may go on with, and choose if it was the last; returns what each
        answers if the search is over."""
        search = self._roster.siblings_of(sequence.request).search
        assert search is not None, f"{sequence.id} searches alone"
        complete = search.offer(sequence, sampled)
        if complete:
            turns = search.choose()
            if search.over:
                return self._end(search)
            for turn in turns:
                self._turn(turn)
        elif sequence.state is State.WAITING:
            self._roster.waiting.set_aside(sequence, now)
        self._roster.queue_next(sequence, now)
        return []

    def turned(self) -> list[Sequence]:
        """Those that run whose row must be bound again before they compute."""
        turned = [
            one
            for one, epoch in self._turned.items()
            if one.state is State.RUNNING and one.epoch == epoch
        ]
        self._turned.clear()
        return turned

    def _end(self, search: Search) -> list[tuple[Sequence, Ended]]:
        results = list(search.results())
        for sequence, _ in results:
            del sequence.tokens[sequence.prompt_length :]
        return results

    def _turn(self, turn: Turn) -> None:
        sequence, parent = turn.sequence, turn.parent
        if sequence is parent:
            sequence.tokens.append(turn.token)
            sequence.settle()
            bound = sequence.request.sampling.looks_back
        else:
            self._fork(sequence, parent, turn.token)
            bound = True
        if sequence.state is State.RUNNING and bound:
            self._turned[sequence] = sequence.epoch
        self._roster.waiting.call_back(sequence)

    def _fork(self, sequence: Sequence, parent: Sequence, token: int) -> None:
        """Let one go on from another, which keeps its tokens. If only one of them runs, nothing
        can be shared: what `sequence` lacks is computed again, or found when it is admitted."""
        tokens = [*parent.tokens, token]
        self._manager.release(sequence)
        for follower in self._followers.deserted(sequence):
            self._roster.waiting.call_back(follower)
        running = State.RUNNING
        if sequence.state is running and parent.state is running:
            sequence.replace(tokens, parent.computed)
            self._manager.fork(parent, sequence, sequence.row, parent.computed)
        else:
            sequence.replace(tokens, 0)
            sequence.prefixes = parent.prefixes[:]
            sequence.private = parent.private
