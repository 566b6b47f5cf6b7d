"""Bias: what is added to the logits of single tokens."""

from collections.abc import Sequence

import numpy as np


class Bias:
    """Pairs of a token and what is added to its logit, each token once."""

    __slots__ = ("_slots", "ids", "values")

    def __init__(self, pairs: Sequence[tuple[int, float]]) -> None:
        self.ids = np.array([token for token, _ in pairs], np.int32)
        self.values = np.array([value for _, value in pairs], np.float32)
        self._slots = {token: slot for slot, (token, _) in enumerate(pairs)}

    def slot(self, token: int) -> int | None:
        """Where `token` stands in `ids`."""
        return self._slots.get(token)
