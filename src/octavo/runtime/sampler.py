"""The sampler: from logits to one token a row, whoever else is in the batch.

Order  end ids masked below `min_tokens` → temperature → top_k → top_p → min_p → draw. Each filter
       sees what the one before left, renormalised, and keeps at least one token; among equals the
       lowest id comes first. The draw is by inverse transform over ascending ids.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.core.plan import RowFailed, Sampled
from octavo.core.request import Request, Sampling
from octavo.ops.api import F32, Ops

logger = logging.getLogger(__name__)

_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
_COLDEST = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to sample: the token for `position` of the sequence in `row`."""

    row: int
    position: int
    request: Request


def uniform(seed: int, branch: int, position: int) -> float:
    """A number in [0, 1) that depends on these three alone.

    Source  Philox4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    counter = [position & _MASK32, position >> 32 & _MASK32, branch & _MASK32, 0]
    key = [seed & _MASK32, seed >> 32 & _MASK32]
    for _ in range(_PHILOX_ROUNDS):
        first = _PHILOX_MULTIPLIERS[0] * counter[0]
        second = _PHILOX_MULTIPLIERS[1] * counter[2]
        counter = [
            second >> 32 ^ counter[1] ^ key[0],
            second & _MASK32,
            first >> 32 ^ counter[3] ^ key[1],
            first & _MASK32,
        ]
        key = [(word + step) & _MASK32 for word, step in zip(key, _PHILOX_WEYL, strict=True)]
    return (counter[0] << 21 | counter[1] >> 11) * 2.0**-53


class Sampler:
    """Draws the tokens of a step."""

    def __init__(self, ops: Ops, *, max_rows: int) -> None:
        self._ops = ops
        self._best = np.empty(max_rows, np.int32)
        self._logprob = np.empty(max_rows, np.float32)

    def sample(self, logits: F32, draws: Sequence[Draw]) -> tuple[Sampled | RowFailed, ...]:
        """One outcome for each row of `logits` [R, V]; rows may be written to."""
        if not draws:
            return ()
        best, logprob = self._best[: len(draws)], self._logprob[: len(draws)]
        self._ops.argmax(logits, best, logprob)
        return tuple(
            self._guarded(logits[index], draw, int(best[index]), float(logprob[index]))
            for index, draw in enumerate(draws)
        )

    def _guarded(self, logits: F32, draw: Draw, best: int, logprob: float) -> Sampled | RowFailed:
        """What goes wrong for one row ends that row, not the step."""
        try:
            return self._one(logits, draw, best, logprob)
        except Exception as error:
            logger.exception("sampling position %d of a row failed", draw.position)
            return RowFailed(draw.row, f"sampling failed: {type(error).__name__}")

    @staticmethod
    def _one(logits: F32, draw: Draw, best: int, logprob: float) -> Sampled | RowFailed:
        request = draw.request
        if best < 0:
            return RowFailed(draw.row, f"the logits of position {draw.position - 1} are not finite")
        answered = draw.position - len(request.prompt)
        masked = answered < request.min_tokens and bool(request.stop_token_ids)
        if request.sampling.greedy and not masked:
            return Sampled(draw.row, best, logprob)
        log_total = float(logits[best]) - logprob
        allowed = _without(logits, request.stop_token_ids) if masked else logits
        if not np.isfinite(allowed).any():
            return RowFailed(draw.row, "every token that may be drawn is masked")
        token = choose(allowed, request.sampling, draw.position)
        return Sampled(draw.row, token, float(logits[token]) - log_total)


def choose(logits: F32, sampling: Sampling, position: int) -> int:
    """The token drawn from one row of logits [V]; -inf is never drawn.

    Cost  O(V), and a sort of the few tokens that top_k or top_p keep.
    """
    if sampling.greedy:
        return int(np.argmax(logits))
    # A temperature below what float32 holds would be zero, and the greatest logit 0 / 0.
    temperature = max(np.float32(sampling.temperature), _COLDEST)
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / temperature)
    ids: npt.NDArray[np.intp] | None = None
    if sampling.top_k and sampling.top_k < len(logits):
        ids = _top_k(weights, sampling.top_k)
    if sampling.top_p < 1.0:
        ids = _top_p(weights, ids, sampling.top_p)
    if sampling.min_p > 0.0:
        ids = _min_p(weights, ids, sampling.min_p)
    kept = weights if ids is None else weights[ids := np.sort(ids)]
    cumulative = np.cumsum(kept, dtype=np.float64)
    point = uniform(sampling.seed, sampling.branch, position) * cumulative[-1]
    index = int(np.searchsorted(cumulative, point, side="right"))
    index = min(index, int(np.flatnonzero(kept)[-1]))
    return index if ids is None else int(ids[index])


def _without(logits: F32, ids: frozenset[int]) -> F32:
    masked = logits.copy()
    masked[list(ids)] = -np.inf
    return masked


def _descending(weights: F32, ids: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """`ids`, which ascend, by falling weight; among equals the lowest id first."""
    order: npt.NDArray[np.intp] = np.argsort(-weights[ids], kind="stable")
    return ids[order]


def _top_k(weights: F32, count: int) -> npt.NDArray[np.intp]:
    """The ids of the `count` largest weights, largest first."""
    threshold = np.partition(weights, -count)[-count]
    return _descending(weights, np.flatnonzero(weights >= threshold))[:count]


def _top_p(weights: F32, ids: npt.NDArray[np.intp] | None, share: float) -> npt.NDArray[np.intp]:
    """The fewest ids, largest first, whose weights sum to `share` of all; at least one."""
    if ids is None:
        ids = _likely(weights, share)
        total = float(weights.sum(dtype=np.float64))
    else:
        total = float(weights[ids].sum(dtype=np.float64))
    before = np.cumsum(weights[ids], dtype=np.float64) - weights[ids]
    return ids[: max(1, int(np.searchsorted(before, share * total, side="left")))]


def _likely(weights: F32, share: float) -> npt.NDArray[np.intp]:
    """Enough of the largest weights, in falling order, to reach `share`: mostly a few of many."""
    total = float(weights.sum(dtype=np.float64))
    for threshold in (1e-2, 1e-4, 1e-6):
        ids = np.flatnonzero(weights >= threshold)
        if float(weights[ids].sum(dtype=np.float64)) >= share * total:
            return _descending(weights, ids)
    return _descending(weights, np.flatnonzero(weights))


def _min_p(weights: F32, ids: npt.NDArray[np.intp] | None, share: float) -> npt.NDArray[np.intp]:
    """The ids whose weight is at least `share` of the largest."""
    ids = np.arange(len(weights)) if ids is None else ids
    kept: npt.NDArray[np.intp] = ids[weights[ids] >= share * weights[ids].max()]
    return kept
