"""How long answers will be, from those that ended, and how much room they will need at once.

    blocks                    ╱│         each sequence grows until it ends, and then gives back all
                         ╱│╱   │         that it holds: so the most that all need together is needed
                    ╱│╱    │   │         just before one of them ends
     ───────────────────────────────▶

Source   Gong et al., Past-Future Scheduler for LLM Serving under SLA Guarantees, ASPLOS 2025
         (LightLLM): the peak over the ends of all. Its draws from past lengths are a fixed share of
         them here, so that the same calls give the same decisions.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from octavo.core.sequence import Sequence
from octavo.units import ceil_div

WINDOW = 1000
"""So many answers are remembered."""
LEAST_KNOWN = 10
"""Fewer answers that were as long as one is already say nothing of how long it will be."""
SHARE = 0.5
"""Of the answers that were longer than one is, this share ends before the length predicted."""


class AnswerLengths:
    """The lengths of the last answers.

    Cost     O(window) to learn, a copy of a short list; O(log window) to predict.
    """

    def __init__(self) -> None:
        self._last: deque[int] = deque()
        self._sorted: list[int] = []

    def learn(self, length: int) -> None:
        """One more answer has ended, after so many tokens."""
        self._last.append(length)
        insort(self._sorted, length)
        if len(self._last) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]

    def predict(self, drawn: int, most: int) -> int:
        """How long an answer of `drawn` tokens so far will be, of `most` that it may have.

        While too few that went so far are known, that is the most.
        """
        longer = bisect_right(self._sorted, drawn)
        known = len(self._sorted) - longer
        if known < LEAST_KNOWN:
            return most
        return min(self._sorted[longer + int(SHARE * known)], most)


class Growing(NamedTuple):
    """A sequence that holds `blocks`, and needs room for so many `positions` more until it ends."""

    blocks: float
    positions: int


def growth(sequences: Iterable[Growing], block_size: int, groups: int) -> int:
    """How many blocks these need at once beyond what they hold, when each ends as predicted.

    Cost     O(n log n).
    """
    longest_first = sorted(sequences, key=lambda one: one.positions, reverse=True)
    held_by_ended = sum(one.blocks for one in longest_first)
    most = 0.0
    for alive, one in enumerate(longest_first, 1):
        held_by_ended -= one.blocks
        grown = groups * ceil_div(alive * one.positions, block_size)
        most = max(most, grown - held_by_ended)
    return int(most)


def foreseen(
    sequence: Sequence,
    staying: Iterable[Sequence],
    lengths: AnswerLengths,
    *,
    owned: int,
    block_size: int,
) -> int:
    """How many blocks `sequence`, admitted now, and those `staying` will need at once beyond what
    they hold then.

    Of blocks that several share each counts its part, on average: `owned` is how many there are.
    """
    others = list(staying)
    held = [sum(map(len, one.tables)) for one in others]
    part = min(1.0, owned / max(sum(held), 1))
    groups = len(sequence.tables)
    own = groups * ceil_div(len(sequence.tokens), block_size)
    growing = [
        Growing(part * blocks, _positions_to_come(one, lengths))
        for one, blocks in zip(others, held, strict=True)
    ]
    growing.append(Growing(own, _positions_to_come(sequence, lengths)))
    return growth(growing, block_size, groups)


def _positions_to_come(sequence: Sequence, lengths: AnswerLengths) -> int:
    """The last token of an answer needs no room."""
    drawn = sequence.answer_length
    length = lengths.predict(drawn, sequence.request.max_tokens)
    return max(0, length - 1 - drawn)
