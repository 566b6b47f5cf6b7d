"""What the sampling of a branch writes to its row of logits before a token is drawn.

Order  all but `allowed_token_ids` are masked; `logit_bias` is added; then come the penalty of the
       tokens that are there already and `dry`; last, what would complete one of the `bad_words` is
       masked, and what the grammar does not allow. Penalties and biases touch only the logits of
       the tokens that they concern, and what these were is kept: log-probabilities are those of
       the model.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from octavo.core.plan import Bind
from octavo.core.request import Penalty
from octavo.ops.api import F32, I32, WORD, Entries, Ops, Penalties
from octavo.runtime.bias import Bias
from octavo.runtime.repeats import Repeats
from octavo.text.grammar import Grammars, Matcher

_ROOM = 64
"""Slots of a history at first; it doubles when they are taken."""


class History:
    """The tokens that a penalty looks at, each once, and how often the answer has it.

    Cost     O(prompt) to begin, O(1) a token.
    """

    __slots__ = ("_counts", "_ids", "_slots", "penalty")

    def __init__(self, penalty: Penalty, prompt: Sequence[int], answered: Iterable[int]) -> None:
        self.penalty = penalty
        seen = dict.fromkeys(prompt) if penalty.repetition != 1.0 else {}
        self._slots = {token: slot for slot, token in enumerate(seen)}
        self._ids = np.zeros(len(seen) + _ROOM, np.int32)
        self._ids[: len(seen)] = list(seen)
        self._counts = np.zeros(len(self._ids), np.int32)
        for token in answered:
            self.append(token)

    @property
    def ids(self) -> I32:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> I32:
        """How often the answer has each of `ids`."""
        return self._counts[: len(self._slots)]

    def append(self, token: int) -> None:
        """Take in the next token of the answer."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1

    def slot(self, token: int) -> int | None:
        """Where `token` stands in `ids`."""
        return self._slots.get(token)


Marked = History | Bias


class BadWords:
    """Sequences of tokens that the answer must not have.

    Cost     O(sequences whose last token but one was answered last) a step.
    """

    __slots__ = ("_after", "_always", "_answer")

    def __init__(self, words: Iterable[tuple[int, ...]], answered: Iterable[int]) -> None:
        self._answer = list(answered)
        self._always = [last for *before, last in words if not before]
        self._after: dict[int, list[tuple[int, ...]]] = {}
        """By the token before its last, each sequence of several."""
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(word)

    def append(self, token: int) -> None:
        """Take in the next token of the answer."""
        self._answer.append(token)

    def banned(self) -> list[int]:
        """The tokens that would complete one of the sequences now."""
        answer = self._answer
        if not answer:
            return self._always
        after = [
            last
            for *before, last in self._after.get(answer[-1], ())
            if answer[-len(before) :] == before
        ]
        return self._always + after


class Edits:
    """What one branch asks to be written to its logits.

    Keeps    `length` = the tokens of its prompt and answer, which a draw checks; None where
             nothing looks back at them.
    """

    __slots__ = (
        "_forces",
        "_masks_only",
        "allowed",
        "bad_words",
        "bias",
        "ends",
        "forced",
        "history",
        "length",
        "mask",
        "matcher",
        "repeats",
    )

    def __init__(self, bind: Bind, grammars: Grammars | None = None) -> None:
        request, sampling = bind.request, bind.request.sampling
        self.length = len(request.prompt) + len(bind.answered) if sampling.looks_back else None
        self.allowed = np.array(sampling.allowed_token_ids, np.intp)
        self.bias = Bias(sampling.logit_bias) if sampling.logit_bias else None
        self.history: History | None = None
        if sampling.penalty is not None:
            self.history = History(sampling.penalty, request.prompt, bind.answered)
        self.repeats: Repeats | None = None
        if sampling.dry is not None:
            self.repeats = Repeats(sampling.dry, (*request.prompt, *bind.answered))
        self.bad_words = BadWords(sampling.bad_words, bind.answered) if sampling.bad_words else None
        self.matcher: Matcher | None = None
        self.mask: I32 | None = None
        """What the grammar allows in the step under way, as `Ops.mask` takes it."""
        self.forced: list[int] = []
        """The tokens that must come next, if the grammar says so and they may be taken over."""
        self.ends = False
        """It allows nothing but the end of the answer in the step under way."""
        if sampling.grammar is not None:
            assert grammars is not None, "this runner was made without grammars"
            ends = request.stop_token_ids
            self.matcher = grammars.matcher(sampling.grammar, bind.answered, ends)
            self._forces = sampling.grammar.forced
            self.forced = self.matcher.forced() if self._forces else []
        others = (self.bias, self.history, self.repeats, self.bad_words)
        self._masks_only = not len(self.allowed) and all(one is None for one in others)

    @classmethod
    def of(cls, bind: Bind, grammars: Grammars | None = None) -> "Edits | None":
        """None where a request asks for none: then nothing is written, and nothing is kept."""
        sampling = bind.request.sampling
        asked = sampling.looks_back or sampling.logit_bias or sampling.allowed_token_ids
        return cls(bind, grammars) if asked else None

    @property
    def error(self) -> str:
        """Why nothing can be drawn, "" if something can."""
        return "" if self.matcher is None else self.matcher.error

    @property
    def complete(self) -> bool:
        """The grammar allows nothing more."""
        return self.matcher is not None and self.matcher.ended

    def keep(self, token: int) -> bool:
        """Whether `token`, with the highest logit, has it still when all is written."""
        return self._masks_only and (self.mask is None or allows(self.mask, token))

    def append(self, token: int) -> None:
        """Take in the next token of the answer."""
        if self.length is not None:
            self.length += 1
        if self.history is not None:
            self.history.append(token)
        if self.repeats is not None:
            self.repeats.append(token)
        if self.bad_words is not None:
            self.bad_words.append(token)
        if self.matcher is not None:
            self.matcher.extend((token,))
            self.forced = self.forced[1:] if self.forced[:1] == [token] else []
            if self._forces and not self.forced:
                self.forced = self.matcher.forced()

    def check(self, position: int) -> None:
        """What is kept must be of all tokens before the position that is drawn."""
        assert self.length in (None, position), f"{self.length} tokens before position {position}"


def allows(mask: I32, token: int) -> bool:
    """Whether a mask lets `token` be drawn."""
    return bool(mask[token // WORD] >> token % WORD & 1)


class Originals:
    """The logits that were written to, as they were."""

    __slots__ = ("_written",)

    def __init__(self) -> None:
        self._written: list[tuple[dict[int, tuple[int, Marked]], F32]] = []

    def keep(self, marked: Mapping[int, Marked], entries: Entries, before: F32) -> None:
        """One writing: the tokens of each row, and what was there before."""
        places = zip(entries.start.tolist(), marked.values(), strict=False)
        self._written.append((dict(zip(marked, places, strict=False)), before))

    def get(self, row: int, token: int) -> float | None:
        """What the logit of `token` was in `row` at first; None if it is that still."""
        for places, before in self._written:
            if row in places:
                start, marked = places[row]
                slot = marked.slot(token)
                if slot is not None:
                    return float(before[start + slot])
        return None


def write(ops: Ops, logits: F32, edits: Mapping[int, Edits]) -> Originals:
    """Write to each row of `logits` what its edits ask for; returns what was there."""
    for row, one in edits.items():
        if len(one.allowed):
            kept = logits[row, one.allowed]
            logits[row] = -np.inf
            logits[row, one.allowed] = kept
    originals = Originals()
    _add(ops, logits, {row: one.bias for row, one in edits.items()}, originals)
    histories = {row: one.history for row, one in edits.items() if one.history is not None}
    if histories:
        entries, before = _entries(histories)
        ops.penalise(logits, entries, _penalties(tuple(histories.values())), before)
        originals.keep(histories, entries, before)
    repeats = {row: one.repeats.bias() for row, one in edits.items() if one.repeats is not None}
    _add(ops, logits, repeats, originals)
    for row, one in edits.items():
        if one.bad_words is not None:
            logits[row, one.bad_words.banned()] = -np.inf
    masks = {row: one.mask for row, one in edits.items() if one.mask is not None}
    if masks:
        ops.mask(logits, np.array(list(masks), np.int32), np.stack(list(masks.values())))
    return originals


def _add(ops: Ops, logits: F32, asked: Mapping[int, Bias | None], originals: Originals) -> None:
    biases = {row: bias for row, bias in asked.items() if bias is not None}
    if biases:
        entries, before = _entries(biases)
        values = np.concatenate([bias.values for bias in biases.values()])
        ops.add_bias(logits, entries, values, before)
        originals.keep(biases, entries, before)


def _entries(marked: Mapping[int, Marked]) -> tuple[Entries, F32]:
    """The tokens of each row, and room for what their logits were."""
    ids = [one.ids for one in marked.values()]
    start = np.array(list(accumulate(map(len, ids), initial=0)), np.int32)
    entries = Entries(np.array(list(marked), np.int32), start, np.concatenate(ids))
    return entries, np.empty(len(entries.ids), np.float32)


def _penalties(histories: Sequence[History]) -> Penalties:
    asked = [one.penalty for one in histories]
    return Penalties(
        counts=np.concatenate([one.counts for one in histories]),
        repetition=np.array([one.repetition for one in asked], np.float32),
        presence=np.array([one.presence for one in asked], np.float32),
        frequency=np.array([one.frequency for one in asked], np.float32),
    )
