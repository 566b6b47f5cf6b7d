"""OracleRunner: a runner whose KV cells remember all that they depend on.

A cell holds a digest of every token up to its position. Before a span is computed each cell that
attention would read is compared with the digest it must hold: a wrong table entry, a block reused
too early, a lost copy or a stale prefix hit is found at the step that reads it. The sampled token is
a function of the digest alone: every request gets the tokens it would get alone.
"""

import hashlib
import struct
from collections import defaultdict
from dataclasses import dataclass, field

from octavo.core.plan import RowFailed, Sampled, Span, StepPlan, StepResult
from octavo.core.request import Request

ROOT = b"octavo"


def digest(before: bytes, token: int) -> bytes:
    """What the cell of `token` holds when the cell before it holds `before`."""
    return hashlib.blake2b(before + struct.pack("<q", token), digest_size=8).digest()


def draw(cell: bytes, vocabulary: int) -> int:
    """The token that follows a position whose cell holds `cell`."""
    return int.from_bytes(cell, "little") % vocabulary


def answer_alone(request: Request, vocabulary: int) -> tuple[int, ...]:
    """The answer tokens `request` must get, whoever else is served."""
    cell = ROOT
    for token in (*request.prompt, *request.emitted):
        cell = digest(cell, token)
    answer = list(request.emitted)
    while len(answer) < request.max_tokens:
        token = draw(cell, vocabulary)
        answer.append(token)
        if token in request.stop_token_ids and len(answer) > request.min_tokens:
            break
        cell = digest(cell, token)
    return tuple(answer)


@dataclass(slots=True)
class _Row:
    request: Request
    tables: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    last: int = -1


class WrongContent(AssertionError):
    """A cell that a span reads does not hold what it must."""


class OracleRunner:
    """Carries out plans over cells."""

    def __init__(
        self, *, blocks: int, block_size: int, groups: int = 1, vocabulary: int = 97
    ) -> None:
        self._size = block_size
        self._groups = groups
        self._vocabulary = vocabulary
        self._cells: list[list[bytes | None]] = [[None] * block_size for _ in range(blocks)]
        self._rows: dict[int, _Row] = {}
        self.failing: frozenset[str] = frozenset()
        """Requests whose rows fail when they sample."""

    def execute(self, plan: StepPlan) -> StepResult:
        for bind in plan.binds:
            self._rows[bind.row] = _Row(bind.request)
        for write in plan.writes:
            table = self._rows[write.row].tables[write.group]
            table.update({write.index + i: block for i, block in enumerate(write.blocks)})
        for copy in plan.copies:
            self._cells[copy.target] = list(self._cells[copy.source])
        outcomes = [self._compute(span) for span in plan.spans]
        return StepResult(plan.id, tuple(outcome for outcome in outcomes if outcome is not None))

    def _compute(self, span: Span) -> Sampled | RowFailed | None:
        row = self._rows[span.row]
        tokens = span.tokens
        if len(tokens) < span.stop - span.start:
            tokens = (*tokens, row.last)
        assert len(tokens) == span.stop - span.start, f"row {span.row}: {len(tokens)} tokens"
        cell = ROOT
        for group in range(self._groups):
            cell = self._read(row, group, span.start)
            for position, token in enumerate(tokens, span.start):
                cell = digest(cell, token)
                block = row.tables[group][position // self._size]
                self._cells[block][position % self._size] = cell
        if not span.samples:
            return None
        if row.request.id in self.failing:
            return RowFailed(span.row, "the oracle was told to fail this row")
        row.last = draw(cell, self._vocabulary)
        return Sampled(span.row, row.last, 0.0)

    def _read(self, row: _Row, group: int, stop: int) -> bytes:
        """The cell before position `stop`; every cell below is checked against the known tokens."""
        cell = ROOT
        known = (*row.request.prompt, *row.request.emitted)
        for position in range(stop):
            held = self._cells[row.tables[group][position // self._size]][position % self._size]
            if position < len(known):
                cell = digest(cell, known[position])
            else:  # an answer token: it can only be what the cell before it draws
                cell = digest(cell, draw(cell, self._vocabulary))
            if held != cell:
                raise WrongContent(f"{row.request.id}: position {position} in group {group}")
        return cell
