"""Search: the sequences of one request that are its beams.

    step      each computes its newest token, by itself; one that is through waits, barred
    choice    when all are through: the best go on, perhaps in the place of another

Which beam is in which sequence means nothing. The first that goes on from a beam stays where that
is; the others take the places of those that nobody goes on from.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.core.beams import Beam, BeamSearch, Found, Offer
from octavo.core.events import FinishReason
from octavo.core.plan import Candidate, Drawn, Sampled
from octavo.core.request import Request
from octavo.core.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Turn:
    """`sequence` goes on from `parent`, which may be itself, by a token."""

    sequence: Sequence
    parent: Sequence
    token: int


@dataclass(frozen=True, slots=True)
class Ended:
    """What a sequence answers when the search is over."""

    drawn: tuple[Drawn, ...]
    reason: FinishReason
    stop_id: int | None = None
    message: str = ""


class Search:
    """Keeps  a sequence is barred while it has given what it may go on with, or has no beam."""

    def __init__(self, request: Request, sequences: tuple[Sequence, ...]) -> None:
        assert request.beams is not None, f"{request.id} asks for no search"
        self.sequences = sequences
        self._search = BeamSearch(request, request.beams)
        self._offers: dict[int, Offer] = {}
        for sequence in sequences:
            sequence.company = self
            sequence.barred = sequence.number > 0  # the first computes the prompt

    @property
    def stranded(self) -> bool:
        """Whether a beam that has not been computed waits to be admitted."""
        return any(one.state is State.WAITING and not one.barred for one in self.sequences)

    @property
    def over(self) -> bool:
        return self._search.over

    def offer(self, sequence: Sequence, sampled: Sampled) -> bool:
        """Take in what a sequence may go on with; whether that was the last one."""
        own = Candidate(sampled.token, sampled.logprob, sampled.logprob)
        self._offers[sequence.number] = Offer(sampled.candidates or (own,), sampled.top)
        sequence.barred = True
        return all(one.barred for one in self.sequences)

    def choose(self) -> list[Turn]:
        """Who goes on, and from whom; the others have no beam. Those who go on in the place of
        another come first: their parents have not changed yet."""
        beams = self._search.advance(self._offers)
        self._offers.clear()
        places = self._places(beams)
        self._search.move(places)
        turns = [
            Turn(self.sequences[place], self.sequences[beam.slot], beam.newest)
            for beam, place in zip(beams, places, strict=True)
        ]
        for turn in turns:
            turn.sequence.barred = False
            if turn.sequence.ticket is None:  # they rank alike
                turn.sequence.ticket = turn.parent.ticket
        return sorted(turns, key=lambda turn: turn.sequence is turn.parent)

    def _places(self, beams: list[Beam]) -> list[int]:
        """The number of the sequence for each beam: one that runs if its parent does, if there is
        any."""
        sequences = self.sequences
        free = set(range(len(sequences))) - {beam.slot for beam in beams}
        places: list[int] = []
        for beam in beams:
            place = beam.slot
            if place in places:
                state = sequences[beam.slot].state
                place = min(free, key=lambda number: (sequences[number].state is not state, number))
                free.remove(place)
            places.append(place)
        return places

    def results(self) -> Iterator[tuple[Sequence, Ended]]:
        """The answers of a search that is over: the best is that of the first sequence."""
        found = self._search.results()
        for number, sequence in enumerate(self.sequences):
            yield sequence, _ended(found[number] if number < len(found) else None, len(found))


def _ended(found: Found | None, count: int) -> Ended:
    if found is None:
        return Ended((), "error", message=f"the search has found only {count} different answers")
    return Ended(found.drawn, found.reason, found.stop_id)
