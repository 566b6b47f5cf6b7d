"""What would go on a sequence that the text has already, for `dry`.

    … a b c d … a b c │ ?      the last three tokens stood there before, then came d

Source  the DRY sampler as llama.cpp has it (`llama-sampler.cpp`), after p-e-w's proposal in
        oobabooga/text-generation-webui#5677.
"""

import math
from collections.abc import Sequence

import numpy as np

from octavo.core.request import Dry
from octavo.ops.api import I32
from octavo.runtime.bias import Bias

_ROOM = 256
"""Tokens at first; the room doubles when it is taken."""
_MOST = 1e30
"""That is taken from a logit, so that it stays finite."""


class Repeats:
    """Follows the tokens of prompt and answer.

    Keeps    `_alike[i]` = how many tokens up to and with that at i are the last ones of the text.
    Cost     O(prompt) to begin; a token takes a pass over the text, with vectors.
    """

    __slots__ = ("_alike", "_breakers", "_broken", "_dry", "_length", "_single", "_tokens")

    def __init__(self, dry: Dry, tokens: Sequence[int]) -> None:
        self._dry = dry
        self._breakers: dict[int, list[tuple[int, ...]]] = {}
        """By their last token."""
        for breaker in dry.breakers:
            self._breakers.setdefault(breaker[-1], []).append(breaker)
        self._single = frozenset(breaker[0] for breaker in dry.breakers if len(breaker) == 1)
        self._length = len(tokens)
        self._tokens = np.zeros(self._length + _ROOM, np.int32)
        self._tokens[: self._length] = tokens
        self._alike = np.zeros(len(self._tokens), np.int32)
        self._alike[: self._length] = suffix_lengths(tokens)
        self._broken = (-1, 0)
        """Where the last breaker begins, and how many tokens it has."""
        for stop, token in enumerate(tokens, 1):
            if token in self._breakers:
                self._note_breakers(token, stop)

    def append(self, token: int) -> None:
        """Take in the next token of the answer."""
        count = self._length
        if count == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._alike = np.concatenate([self._alike, np.zeros_like(self._alike)])
        alike = self._alike[:count]
        alike[1:] = alike[:-1] + 1
        alike[:1] = 1
        alike *= self._tokens[:count] == token
        self._tokens[count] = token
        self._length = count + 1
        if token in self._breakers:
            self._note_breakers(token, count + 1)

    def bias(self) -> Bias | None:
        """What is to be added to the logits of the tokens that would go on a repetition."""
        lengths = self._lengths()
        if not lengths:
            return None
        return Bias([(token, -self._penalty(length)) for token, length in lengths.items()])

    def _penalty(self, length: int) -> float:
        dry = self._dry
        grown = math.log(dry.multiplier) + (length - dry.allowed_length) * math.log(dry.base)
        return math.exp(min(grown, math.log(_MOST)))

    def _lengths(self) -> dict[int, int]:
        """How long a sequence each of these tokens would go on, where it is too long."""
        dry, count = self._dry, self._length
        first = 0 if dry.window is None else max(0, count - dry.window)
        start, size = self._broken
        longest = count - (start + size if start >= first else first)
        if longest < dry.allowed_length:
            return {}
        places = np.flatnonzero(self._alike[first : count - 1] >= dry.allowed_length)
        alike = self._alike[first + places]
        lengths = np.minimum(np.minimum(alike, places + 1), longest)
        after = self._tokens[first + places + 1]
        found: dict[int, int] = {}
        for token, length in zip(after.tolist(), lengths.tolist(), strict=True):
            if length >= dry.allowed_length and token not in self._single:
                found[token] = max(found.get(token, 0), length)
        return found

    def _note_breakers(self, token: int, stop: int) -> None:
        """Keep the breaker that begins last; of those that begin together, the longest."""
        for breaker in self._breakers[token]:
            start = stop - len(breaker)
            if start >= 0 and tuple(self._tokens[start:stop].tolist()) == breaker:
                self._broken = max(self._broken, (start, len(breaker)))


def suffix_lengths(tokens: Sequence[int]) -> I32:
    """At i how many tokens up to and with that at i are the last ones of all; 0 at the last.

    Cost     O(tokens).
    Source   the Z-algorithm, Gusfield 1997, "Algorithms on Strings, Trees and Sequences" §1.4,
             backwards.
    """
    text = list(reversed(tokens))
    count = len(text)
    lengths = [0] * count
    left = right = 0
    for place in range(1, count):
        same = min(right - place, lengths[place - left]) if place < right else 0
        while place + same < count and text[same] == text[place + same]:
            same += 1
        lengths[place] = same
        if place + same > right:
            left, right = place, place + same
    return np.array(lengths[::-1], np.int32)
