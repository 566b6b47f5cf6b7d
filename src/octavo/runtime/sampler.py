"""The sampler: from logits to one token a row, whoever else is in the batch.

Order  the edits of the request → end ids masked below `min_tokens` → temperature, the filters and
       the draw, by the rule of `Ops.draw`. The point of each draw, and whether xtc takes part,
       come from a counter-based generator, so that they depend on the seed, the branch and the
       position alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.core.events import Likeliest
from octavo.core.plan import Candidate, RowFailed, Sampled
from octavo.core.request import Request, Sampling
from octavo.ops.api import F32, F64, Draws, Ops
from octavo.runtime.edits import Edits, Originals, write
from octavo.runtime.scores import likeliest

_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MASK32 = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_COLDEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to sample: the token for `position` of the sequence in `row`."""

    row: int
    position: int
    request: Request
    edits: Edits | None = None

    @property
    def masks(self) -> bool:
        """Whether the tokens that end an answer may not be drawn yet."""
        if self.edits is not None and self.edits.ends:
            return False
        answered = self.position - len(self.request.prompt)
        return answered < self.request.min_tokens and bool(self.request.stop_token_ids)


class Scale(NamedTuple):
    """How the `logits` of one row become log-probabilities: the `highest` had `greatest`. Some
    were written to; `originals` has what these were."""

    logits: F32
    row: int
    highest: float
    greatest: float
    originals: Originals

    def of(self, logit: float) -> float:
        """What a logit is as a log-probability."""
        return logit - self.highest + self.greatest

    def logprob(self, token: int) -> float:
        """The log-probability of `token` before anything was written."""
        logit = self.originals.get(self.row, token)
        return self.of(float(self.logits[token]) if logit is None else logit)


def uniform(
    seeds: Sequence[int], branches: Sequence[int], positions: Sequence[int], stream: int = 0
) -> F64:
    """A number in [0, 1) for each seed, branch and position; it depends on these alone. Another
    `stream` has other numbers.

    Source  Philox4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    seed, branch, position = (
        np.array([number & 0xFFFFFFFFFFFFFFFF for number in numbers], np.uint64)
        for numbers in (seeds, branches, positions)
    )
    counter = [position & _MASK32, position >> _HALF, branch & _MASK32, np.full_like(seed, stream)]
    key = [seed & _MASK32, seed >> _HALF]
    for _ in range(_PHILOX_ROUNDS):
        first = _PHILOX_MULTIPLIERS[0] * counter[0]
        second = _PHILOX_MULTIPLIERS[1] * counter[2]
        counter = [
            second >> _HALF ^ counter[1] ^ key[0],
            second & _MASK32,
            first >> _HALF ^ counter[3] ^ key[1],
            first & _MASK32,
        ]
        key = [(word + step) & _MASK32 for word, step in zip(key, _PHILOX_WEYL, strict=True)]
    bits = counter[0] << np.uint64(21) | counter[1] >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


class Sampler:
    """Draws the tokens of a step."""

    def __init__(self, ops: Ops, *, max_rows: int) -> None:
        self._ops = ops
        self._best = np.empty(max_rows, np.int32)
        self._logprob = np.empty(max_rows, np.float32)
        self._drawn = np.empty(max_rows, np.int32)

    def sample(self, logits: F32, draws: Sequence[Draw]) -> tuple[Sampled | RowFailed, ...]:
        """One outcome for each row of `logits` [R, V]; rows may be written to."""
        if not draws:
            return ()
        best, logprob = self._best[: len(draws)], self._logprob[: len(draws)]
        self._ops.argmax(logits, best, logprob)
        outcomes = [_best(*row) for row in zip(draws, best, logprob, strict=True)]
        named = [
            index
            for index, draw in enumerate(draws)
            if draw.request.top_logprobs and isinstance(outcomes[index], Sampled)
        ]
        tops = self._likeliest(logits, named, draws) if named else {}
        others = [
            index
            for index, outcome in enumerate(outcomes)
            if isinstance(outcome, Sampled) and _draws(draws[index], outcome.token)
        ]
        if others:
            highest = [float(logits[index, best[index]]) for index in others]
            edits = {index: one for index in others if (one := draws[index].edits) is not None}
            for index, one in edits.items():
                one.check(draws[index].position)
            originals = write(self._ops, logits, edits)
            scales = {
                index: Scale(logits[index], index, high, float(logprob[index]), originals)
                for index, high in zip(others, highest, strict=True)
            }
            self._mask_ends(logits, others, draws)
            beams = [index for index in others if draws[index].request.beams is not None]
            drawn = [index for index in others if draws[index].request.beams is None]
            for index, found in self._candidates(logits, beams, draws, scales).items():
                outcomes[index] = _offered(draws[index], found)
            for index, token in zip(drawn, self._take(logits, drawn, draws), strict=True):
                outcomes[index] = _outcome(draws[index], token, scales[index].logprob(token))
        for index, top in tops.items():
            outcome = outcomes[index]
            if isinstance(outcome, Sampled):
                outcomes[index] = outcome._replace(top=top)
        return tuple(outcomes)

    def _likeliest(
        self, logits: F32, rows: Sequence[int], draws: Sequence[Draw]
    ) -> dict[int, Likeliest]:
        """The likeliest tokens of each of these rows, as many as its request asks for."""
        counts = [draws[row].request.top_logprobs for row in rows]
        greatest = self._logprob[list(rows)].tolist()
        return dict(zip(rows, likeliest(self._ops, logits, rows, counts, greatest), strict=True))

    @staticmethod
    def _mask_ends(logits: F32, rows: Sequence[int], draws: Sequence[Draw]) -> None:
        """Let no answer end that is not long enough; where its grammar allows nothing but tokens
        that end answers, one of them is text like any other."""
        for row in rows:
            draw = draws[row]
            if not draw.masks:
                continue
            ends = list(draw.request.stop_token_ids)
            before = logits[row, ends]
            logits[row, ends] = -np.inf
            bound = draw.edits is not None and draw.edits.mask is not None
            if bound and not np.isfinite(logits[row]).any():
                logits[row, ends] = before

    def _candidates(
        self,
        logits: F32,
        rows: Sequence[int],
        draws: Sequence[Draw],
        scales: Mapping[int, "Scale"],
    ) -> dict[int, tuple[Candidate, ...]]:
        """What the beams in these rows may go on with, as many as can matter."""
        if not rows:
            return {}
        counts = [_offers(draws[row].request, logits.shape[1]) for row in rows]
        shape = len(rows), max(counts)
        ids, values = np.empty(shape, np.int32), np.empty(shape, np.float32)
        self._ops.likeliest(logits, np.array(rows, np.int32), ids, values)
        return {
            row: tuple(
                Candidate(token, scales[row].of(value), scales[row].logprob(token))
                for token, value in zip(tokens[:count], found[:count], strict=True)
                if value > -inf
            )
            for row, count, tokens, found in zip(
                rows, counts, ids.tolist(), values.tolist(), strict=True
            )
        }

    def _take(self, logits: F32, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
        """The tokens taken from these rows, -1 where none may be."""
        drawn = [row for row in rows if not draws[row].request.sampling.greedy]
        best = [row for row in rows if draws[row].request.sampling.greedy]
        tokens: dict[int, int] = {}
        if best:
            ids, values = np.empty((len(best), 1), np.int32), np.empty((len(best), 1), np.float32)
            self._ops.likeliest(logits, np.array(best, np.int32), ids, values)
            found = np.where(np.isfinite(values), ids, -1)[:, 0]
            tokens |= zip(best, found.tolist(), strict=True)
        if drawn:
            found = self._draw(logits, drawn, [draws[row] for row in drawn])
            tokens |= zip(drawn, found.tolist(), strict=True)
        return [tokens[row] for row in rows]

    def _draw(
        self, logits: F32, rows: Sequence[int], draws: Sequence[Draw]
    ) -> npt.NDArray[np.int32]:
        """The tokens drawn from these rows, -1 where none may be."""
        asked = [draw.request.sampling for draw in draws]
        places = [draw.position for draw in draws]
        out = self._drawn[: len(rows)]
        vocabulary = logits.shape[1]
        how = Draws(
            # One below what float32 holds would be zero, and the greatest logit 0 / 0.
            temperature=np.array([max(one.temperature, _COLDEST) for one in asked], np.float32),
            top_k=np.array([min(one.top_k, vocabulary) for one in asked], np.int32),
            top_p=np.array([one.top_p for one in asked], np.float64),
            min_p=np.array([one.min_p for one in asked], np.float32),
            point=uniform([one.seed for one in asked], [one.branch for one in asked], places),
            top_n_sigma=np.array([one.top_n_sigma for one in asked], np.float32),
            typical_p=np.array([one.typical_p for one in asked], np.float64),
            xtc_threshold=_xtc_thresholds(asked, places),
        )
        self._ops.draw(logits, np.array(rows, np.int32), how, out)
        return out


def _xtc_thresholds(asked: Sequence[Sampling], positions: Sequence[int]) -> F64:
    """The threshold of each draw in which xtc takes part, 1 for the others."""
    thresholds = np.ones(len(asked), np.float64)
    if any(one.xtc_probability > 0 for one in asked):
        chances = uniform(
            [one.seed for one in asked], [one.branch for one in asked], positions, stream=1
        )
        for index, one in enumerate(asked):
            if chances[index] < one.xtc_probability:
                thresholds[index] = one.xtc_threshold
    return thresholds


def _draws(draw: Draw, best: int) -> bool:
    """Whether its token may be another than the likeliest."""
    if draw.masks or draw.request.beams is not None or not draw.request.sampling.greedy:
        return True
    return draw.edits is not None and not draw.edits.keep(best)


def _best(draw: Draw, best: np.int32, logprob: np.float32) -> Sampled | RowFailed:
    if best < 0:
        return RowFailed(draw.row, f"the logits of position {draw.position - 1} are not finite")
    if draw.edits is not None and draw.edits.error:
        return RowFailed(draw.row, draw.edits.error)
    return Sampled(draw.row, int(best), float(logprob))


def _offers(request: Request, vocabulary: int) -> int:
    """How many candidates a beam has."""
    assert request.beams is not None, f"{request.id} asks for no search"
    return min(request.beams.candidates(len(request.stop_token_ids)), vocabulary)


def _offered(draw: Draw, found: tuple[Candidate, ...]) -> Sampled | RowFailed:
    if not found:
        return _outcome(draw, -1, 0.0)
    return Sampled(draw.row, found[0].token, found[0].logprob, candidates=found)


def _outcome(draw: Draw, token: int, logprob: float) -> Sampled | RowFailed:
    if token < 0:
        return RowFailed(draw.row, "every token that may be drawn is masked")
    return Sampled(draw.row, token, logprob)
