"""OracleRunner: a runner whose KV cells remember all that they depend on.

    cell = (salt, layer group, digest of every token up to its position)

Before a span is computed each cell that attention would read is compared with what it must hold: a
wrong table entry, a block reused too early, a lost copy, a block moved to a wrong place or too
late, a stale prefix hit or one across salts is found at the step that reads it. The sampled token
is a function of the tokens before it, and of the branch if the request is not greedy, alone: every
request gets the tokens it would get alone. Where a request has a grammar, that function says too
how many tokens follow at once, and where the answer ends.
"""

import hashlib
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.core.events import Score
from octavo.core.plan import (
    Bind,
    Candidate,
    Drawn,
    RowFailed,
    RowScores,
    Sampled,
    Span,
    StepPlan,
    StepResult,
)
from octavo.core.request import Request, Sampling
from octavo.core.windows import Windows

ROOT = b"octavo"

Cell = tuple[str, int, bytes]


def digest(before: bytes, token: int) -> bytes:
    """What stands for all tokens up to `token`, when `before` stands for those before it."""
    return hashlib.blake2b(before + struct.pack("<q", token), digest_size=8).digest()


def draw(before: bytes, vocabulary: int, sampling: Sampling) -> int:
    """The token that follows the tokens for which `before` stands."""
    branch = 0 if sampling.greedy else sampling.branch
    chosen = digest(before, branch) if branch else before
    return int.from_bytes(chosen, "little") % vocabulary


def offered(
    request: Request, before: bytes, length: int, vocabulary: int, most: int | None
) -> tuple[Candidate, ...]:
    """What a beam of `length` tokens, for which `before` stands, may go on with, at `most` so many,
    the best first: each is less likely than the one before, by how much depends on them too."""
    answered = length - len(request.prompt)
    masked = request.stop_token_ids if answered < request.min_tokens else frozenset()
    found, score, told = [], 0.0, before
    for token in range(vocabulary):
        told = digest(told, token)
        score -= (1 + told[0]) / 256
        found.append(Candidate((before[0] + token) % vocabulary, score, score))
    return tuple([one for one in found if one.token not in masked][:most])


def forced_after(told: bytes) -> int:
    """How many tokens come at once after those for which `told` stands."""
    return (told[0] % 8) // 2


def ends_after(told: bytes) -> bool:
    """Whether the grammar of the oracle allows nothing more."""
    return told[1] % 16 == 0


def answer_alone(request: Request, vocabulary: int) -> tuple[int, ...]:
    """The answer tokens that the first branch of `request` must get, whoever else is served."""
    last = ROOT
    for token in (*request.prompt, *request.emitted):
        last = digest(last, token)
    answer = list(request.emitted)
    while not _ended(request, answer, last):
        answer.append(draw(last, vocabulary, request.sampling))
        last = digest(last, answer[-1])
    return tuple(answer)


def _ended(request: Request, answer: list[int], told: bytes) -> bool:
    if len(answer) >= request.max_tokens:
        return True
    if len(answer) > len(request.emitted) and request.sampling.grammar and ends_after(told):
        return True
    return len(answer) > request.min_tokens and answer[-1] in request.stop_token_ids


@dataclass(slots=True)
class _Row:
    request: Request
    tables: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """A group's entries by their index, without those given back."""
    digests: list[bytes] = field(default_factory=list)
    """What the first positions must hold, as far as they were asked for."""
    last: int = -1
    length: int = 0
    """Tokens that its sampling looks back at."""


class WrongContent(AssertionError):
    """A cell that a span reads does not hold what it must."""


class OracleRunner:
    """Carries out plans over cells.

    Moves out are carried out as late as they may be, at the end of their step: what they read must
    be there still.
    """

    def __init__(
        self, *, blocks: int, block_size: int, windows: Windows = (None,), vocabulary: int = 97
    ) -> None:
        self.vocabulary = vocabulary
        self._size = block_size
        self._windows = windows
        self._slots: dict[int, list[Cell | None]] = {}
        self._cells: list[list[Cell | None]] = [[None] * block_size for _ in range(blocks)]
        self._rows: dict[int, _Row] = {}
        self.failing: Mapping[str, int] = {}
        """Requests whose rows fail, each from the first span on that reaches beyond a position."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan.

        Raises  WrongContent if a span would read a cell that holds anything but its own past.
        """
        for gone in plan.returned:
            table = self._rows[gone.row].tables[gone.group]
            for index in [index for index in table if index < gone.first]:
                del table[index]
        for bind in plan.binds:
            self._rows[bind.row] = self._bound(bind)
        for write in plan.writes:
            table = self._rows[write.row].tables[write.group]
            table.update({write.index + i: block for i, block in enumerate(write.blocks)})
        for copy in plan.copies:
            self._cells[copy.target] = list(self._cells[copy.source])
        for move in plan.moves:
            if move.kind == "in":
                self._cells[move.block] = list(self._slots[move.slot])
        outcomes = [self._compute(span) for span in plan.spans]
        for move in plan.moves:
            if move.kind == "out":
                self._slots[move.slot] = list(self._cells[move.block])
        told = tuple(outcome for outcome in outcomes if outcome is not None)
        scores = tuple(one for one in map(self._scores, plan.spans) if one is not None)
        return StepResult(plan.id, told, len(plan.moves), scores)

    def _scores(self, span: Span) -> RowScores | None:
        """Of a prompt that is to be scored: each token is as likely as its position says."""
        request = self._rows[span.row].request
        tokens = request.prompt[span.start + 1 : span.stop + 1]
        if request.prompt_logprobs is None or not tokens:
            return None
        first = span.start + 1
        scores = [Score(token, -float(at), 1) for at, token in enumerate(tokens, first)]
        return RowScores(span.row, first, tuple(scores))

    def _bound(self, bind: Bind) -> _Row:
        request, length = bind.request, len(bind.request.prompt) + len(bind.answered)
        row = _Row(request, length=length)
        told = ROOT
        for token in (*request.prompt, *bind.answered):
            told = digest(told, token)
            if request.beams is not None:  # the plan says what it has answered
                row.digests.append(told)
        self._know(row, length)
        if row.digests[-1] != told:
            raise WrongContent(f"{request.id}: it never answered {bind.answered}")
        return row

    def _compute(self, span: Span) -> Sampled | RowFailed | None:
        row = self._rows[span.row]
        tokens = span.tokens
        if len(tokens) < span.stop - span.start:
            tokens = (*tokens, row.last)
        assert len(tokens) == span.stop - span.start, f"row {span.row}: {len(tokens)} tokens"
        last = ROOT
        for group in range(len(self._windows)):
            last = self._read(row, group, span.start)
            for position, token in enumerate(tokens, span.start):
                last = digest(last, token)
                block = row.tables[group][position // self._size]
                self._cells[block][position % self._size] = (row.request.salt, group, last)
        if span.samples and row.request.sampling.looks_back and row.length != span.stop:
            raise WrongContent(f"{row.request.id}: {row.length} tokens to look back at")
        if row.request.beams is not None:
            return self._offer(row, span, tokens, last)
        drawn = self._draw(row, span, last) if span.samples else []
        kept = len(drawn) - 1
        ended = self._force(row, drawn)
        row.length += len(drawn)
        row.last = drawn[-1] if drawn else -1
        if span.stop > self.failing.get(row.request.id, span.stop):
            return RowFailed(span.row, "the oracle was told to fail this row")
        if not drawn:
            return None
        more = tuple(Drawn(token, 0.0) for token in drawn[1:])
        return Sampled(
            span.row, drawn[0], 0.0, more=more, kept=kept, drafted=span.drafts, ended=ended
        )

    def _offer(
        self, row: _Row, span: Span, tokens: tuple[int, ...], last: bytes
    ) -> Sampled | RowFailed | None:
        """What a beam may go on with, once it knows its newest token."""
        for token in tokens[len(row.digests) - span.start :]:
            row.digests.append(digest(row.digests[-1], token))
        if row.request.sampling.looks_back and span.samples and row.length != span.stop:
            raise WrongContent(f"{row.request.id}: {row.length} tokens to look back at")
        if row.digests[span.stop - 1] != last:
            raise WrongContent(f"{row.request.id}: it is no beam that goes on with {tokens}")
        if span.stop > self.failing.get(row.request.id, span.stop):
            return RowFailed(span.row, "the oracle was told to fail this row")
        if not span.samples or row.request.beams is None:
            return None
        most = row.request.beams.candidates(len(row.request.stop_token_ids))
        found = offered(row.request, last, span.stop, self.vocabulary, most)
        return Sampled(span.row, found[0].token, found[0].logprob, candidates=found)

    def _draw(self, row: _Row, span: Span, last: bytes) -> list[int]:
        """The tokens that follow `last`: with drafts up to the first that was guessed wrong. Each
        guess is right or wrong by what stands before it, and its cells are written either way."""
        sampling = row.request.sampling
        drawn, right = [draw(last, self.vocabulary, sampling)], True
        for position in range(span.stop, span.stop + span.drafts):
            truth = draw(last, self.vocabulary, sampling)
            hit = last[0] % 3 > 0
            last = digest(last, truth if hit else truth + 1)
            for group in range(len(self._windows)):
                block = row.tables[group][position // self._size]
                self._cells[block][position % self._size] = (row.request.salt, group, last)
            right = right and hit and not self._ends(row, last)
            if right:
                drawn.append(draw(last, self.vocabulary, sampling))
        return drawn

    @staticmethod
    def _ends(row: _Row, told: bytes) -> bool:
        return row.request.sampling.grammar is not None and ends_after(told)

    def _force(self, row: _Row, drawn: list[int]) -> bool:
        """Add what must follow these tokens of a row with a grammar; whether nothing can."""
        if not drawn or row.request.sampling.grammar is None:
            return False
        self._know(row, row.length + len(drawn))
        last = row.digests[row.length + len(drawn) - 1]
        for _ in range(forced_after(last)):
            if ends_after(last):
                break
            drawn.append(draw(last, self.vocabulary, row.request.sampling))
            last = digest(last, drawn[-1])
        return ends_after(last)

    def _read(self, row: _Row, group: int, stop: int) -> bytes:
        """The digest before position `stop`; every cell that this one sees is checked."""
        self._know(row, stop)
        window = self._windows[group]
        first = 0 if window is None else max(0, stop + 1 - window)
        for position, held in enumerate(row.digests[first:stop], first):
            block = row.tables[group].get(position // self._size)
            if block is None:
                raise WrongContent(f"{row.request.id}: position {position} was given back")
            if self._cells[block][position % self._size] != (row.request.salt, group, held):
                raise WrongContent(f"{row.request.id}: position {position} in group {group}")
        return row.digests[stop - 1] if stop else ROOT

    def _know(self, row: _Row, upto: int) -> None:
        """Extend the digests of `row` to every position below `upto`.

        An answer token can only be what the tokens before it draw.
        """
        known = (*row.request.prompt, *row.request.emitted)
        while (position := len(row.digests)) < upto:
            last = row.digests[-1] if row.digests else ROOT
            if position < len(known):
                token = known[position]
            else:
                token = draw(last, self.vocabulary, row.request.sampling)
            row.digests.append(digest(last, token))
