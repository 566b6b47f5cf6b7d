"""Beams: a search for the likeliest answers to one prompt, as pure bookkeeping.

    beams      a ── the ─┬─ cat        each with the sum of its log-probabilities
                         └─ dog
    found      a ── the ── end         answers that have ended, by score, at most as many as beams

At each position every beam offers the tokens it may go on with. Of all that are offered the best
are taken: those that end an answer are found, as far as they are among the first `width`; of the
others the first `width` are the beams of the next position.

Source  "Beam search" as transformers defines it (`GenerationMixin._beam_search`), and for groups
        Vijayakumar et al. 2016, "Diverse Beam Search" (arXiv:1610.02424), with Hamming diversity.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.events import FinishReason, Likeliest
from octavo.core.plan import Candidate, Drawn
from octavo.core.request import Beams, Request


class Path(NamedTuple):
    """The tokens of a beam, the last one first."""

    drawn: Drawn
    before: "Path | None"


class Beam(NamedTuple):
    """It was taken from the beam in `slot`; there is its KV."""

    slot: int
    score: float
    path: Path | None = None

    @property
    def newest(self) -> int:
        """Its last token."""
        assert self.path is not None, "it has none"
        return self.path.drawn.token


class Offer(NamedTuple):
    """What may follow a beam, and what was likely there."""

    candidates: tuple[Candidate, ...]
    top: Likeliest


class Found(NamedTuple):
    """An answer, and the token that ended it if one did."""

    score: float
    drawn: tuple[Drawn, ...]
    reason: FinishReason
    stop_id: int | None


@dataclass(slots=True)
class Group:
    """Some of the beams, which search for themselves."""

    width: int
    beams: list[Beam]
    found: list[Found] = field(default_factory=list)
    """The best first."""


class BeamSearch:
    """Keeps  beams have the same length; found answers of a group are at most its width."""

    def __init__(self, request: Request, beams: Beams) -> None:
        self._asked = beams
        self._ends = request.stop_token_ids
        self._min_tokens = request.min_tokens
        self._max_tokens = request.max_tokens
        self._length = 0
        width = beams.width // beams.groups
        self._groups = [Group(width, [Beam(0, 0.0)]) for _ in range(beams.groups)]

    @property
    def over(self) -> bool:
        return not any(group.beams for group in self._groups)

    @property
    def beams(self) -> list[Beam]:
        return [beam for group in self._groups for beam in group.beams]

    def advance(self, offers: Mapping[int, Offer]) -> list[Beam]:
        """Go on by one token, with what is offered in the slot of each beam; returns the beams of
        the next position, of which each names the slot that it comes from.

        Cost     O(beams · candidates · log).
        """
        self._length += 1
        taken: Counter[int] = Counter()
        for group in self._groups:
            self._advance(group, offers, taken)
            taken.update(beam.newest for beam in group.beams)
        return self.beams

    def move(self, slots: Items[int]) -> None:
        """The KV of `beams`, in their order, is in these slots from now on."""
        slot = iter(slots)
        for group in self._groups:
            group.beams = [beam._replace(slot=next(slot)) for beam in group.beams]

    def results(self) -> list[Found]:
        """The answers, the best first; of equals those of the first groups."""
        found = [one for group in self._groups for one in group.found]
        return sorted(found, key=lambda one: -one.score)

    def _advance(self, group: Group, offers: Mapping[int, Offer], taken: Counter[int]) -> None:
        offered = sorted(self._offered(group, offers, taken), key=lambda one: -one.score)
        last = self._length == self._max_tokens
        for beam in offered[: group.width]:
            if last or self._has_ended(beam):
                group.found.append(self._found(beam))
        group.found = sorted(group.found, key=lambda one: -one.score)[: group.width]
        going = [] if last else [one for one in offered if not self._has_ended(one)]
        group.beams = going[: group.width]
        if self._is_over(group):
            group.beams = []

    def _offered(
        self, group: Group, offers: Mapping[int, Offer], taken: Counter[int]
    ) -> Iterator[Beam]:
        penalty = self._asked.diversity_penalty
        for beam in group.beams:
            candidates, top = offers[beam.slot]
            for token, score, logprob in candidates:
                total = beam.score + score - penalty * taken[token]
                yield Beam(beam.slot, total, Path(Drawn(token, logprob, top), beam.path))

    def _has_ended(self, beam: Beam) -> bool:
        return beam.newest in self._ends and self._length > self._min_tokens

    def _found(self, beam: Beam) -> Found:
        drawn, path = [], beam.path
        while path is not None:
            drawn.append(path.drawn)
            path = path.before
        score = self._normalised(beam.score, self._length)
        if self._has_ended(beam):
            return Found(score, tuple(drawn[::-1]), "stop", beam.newest)
        return Found(score, tuple(drawn[::-1]), "length", None)

    def _is_over(self, group: Group) -> bool:
        """Whether nothing more is to be found."""
        if not group.beams:
            return True
        if len(group.found) < group.width:
            return False
        if self._asked.early_stopping is True:
            return True
        longest = self._asked.early_stopping == "never" and self._asked.length_penalty > 0.0
        length = self._max_tokens if longest else self._length
        return self._normalised(group.beams[0].score, length) <= group.found[-1].score

    def _normalised(self, score: float, length: int) -> float:
        divisor: float = float(length) ** self._asked.length_penalty
        return score / divisor
