"""The board: memory in which an engine process writes what it is computing, before it does.

It outlives the process, so that the front knows what was being computed when it died.

    ┌────────────────┬──────────────────────────────────────────┐
    │ length, 8 bytes│ msgpack of ((request id, branch), …)     │   length 0: nothing is computed
    └────────────────┴──────────────────────────────────────────┘
"""

import mmap
import os
from collections.abc import Sequence

import msgspec

from octavo.core.plan import Runner, StepPlan, StepResult
from octavo.engine.ledger import Key

_HEAD_BYTES = 8
_ANSWER_BYTES = 128
"""More than an id and a branch take."""

_encoder = msgspec.msgpack.Encoder()


class Board:
    """Memory of a descriptor that two processes share."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, 0)

    @classmethod
    def of(cls, answers: int) -> "Board":
        """A new board with room for so many answers."""
        descriptor = os.memfd_create("octavo-board")
        os.ftruncate(descriptor, _HEAD_BYTES + answers * _ANSWER_BYTES)
        return cls(descriptor)

    def write(self, answers: Sequence[Key]) -> None:
        """These are computed from now on. What does not fit is not written."""
        text = _encoder.encode(answers) if answers else b""
        if _HEAD_BYTES + len(text) > len(self._memory):
            text = b""
        self._memory[:_HEAD_BYTES] = bytes(_HEAD_BYTES)
        self._memory[_HEAD_BYTES : _HEAD_BYTES + len(text)] = text
        self._memory[:_HEAD_BYTES] = len(text).to_bytes(_HEAD_BYTES, "little")

    def read(self) -> tuple[Key, ...]:
        """What is computed, or was when the writer died."""
        length = int.from_bytes(self._memory[:_HEAD_BYTES], "little")
        if not length:
            return ()
        text = self._memory[_HEAD_BYTES : _HEAD_BYTES + length]
        try:
            return msgspec.msgpack.decode(text, type=tuple[Key, ...])
        except msgspec.DecodeError:  # it died writing
            return ()

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


class Announcing:
    """A runner that writes the answers of each plan on a board before another runner computes
    them, and wipes it after."""

    def __init__(self, runner: Runner, board: Board) -> None:
        self._runner = runner
        self._board = board
        self._rows: dict[int, Key] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for bind in plan.binds:
            self._rows[bind.row] = bind.request.id, bind.request.sampling.branch
        self._board.write([self._rows[span.row] for span in plan.spans])
        result = self._runner.execute(plan)
        self._board.write(())
        return result
