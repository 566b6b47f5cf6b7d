"""The mailbox of a request: what has come for it and was not read yet.

    told ──▶ assembler ──▶ mailbox ──▶ whoever reads

Pieces that wait are merged into one a branch, without loss or repeat, so that a reader that stops
costs what its answer is long, not an object a token; and one that keeps up gets each as it came.
The assembler works as events come: an answer that has found its end needs no reader to say so.
"""

import asyncio
from array import array
from collections.abc import Sequence

from octavo.core.events import Finished, PromptScored, Score, Token
from octavo.engine.door import Ticket
from octavo.errors import OctavoError
from octavo.text.assembler import Delta, Ended, Scored

Item = Delta | Ended


class Mailbox:
    """Put by the front, read by one task. For one event loop."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._waiting: dict[int, Delta | _Pile] = {}
        self._ends: list[Ended] = []
        self._error: OctavoError | None = None
        self._arrived = asyncio.Event()
        self.unfinished = ticket.request.branches
        """Branches whose end has not come, read or not."""

    def put(self, event: Token | PromptScored | Finished) -> bool:
        """Add what an event brings; whether it has shown the end of an answer that the engine does
        not know of, a stop string say."""
        assembler = self._ticket.assembler_of(event)
        for item in assembler.take(event):
            if isinstance(item, Ended):
                self._ends.append(item)
                self.unfinished -= 1
            else:
                self._pile(item)
            self._arrived.set()
        return assembler.ended and isinstance(event, Token)

    def fail(self, error: OctavoError) -> None:
        """End it with an error, after what is there already."""
        self._error = error
        self._arrived.set()

    async def take(self) -> Sequence[Item]:
        """All that is there, at least one item; of each branch one piece, and its end.

        Raises   the error, when nothing else is left.
        """
        await self._arrived.wait()
        if not self._waiting and not self._ends and self._error is not None:
            raise self._error
        items: list[Item] = [
            one.merged(branch) if isinstance(one, _Pile) else one
            for branch, one in self._waiting.items()
        ]
        items += self._ends
        self._waiting.clear()
        self._ends.clear()
        if self._error is None:
            self._arrived.clear()
        return items

    def _pile(self, delta: Delta) -> None:
        there = self._waiting.get(delta.branch)
        if there is None:
            self._waiting[delta.branch] = delta
        elif isinstance(there, _Pile):
            there.add(delta)
        else:
            pile = self._waiting[delta.branch] = _Pile()
            pile.add(there)
            pile.add(delta)


class _Pile:
    """Pieces of one answer, packed."""

    __slots__ = ("_ids", "_logprobs", "_prompt", "_scored", "_utf8")

    def __init__(self) -> None:
        self._utf8 = bytearray()
        self._ids = array("q")
        self._logprobs = array("d")
        self._scored: list[Scored] = []
        self._prompt: list[Score] = []

    def add(self, delta: Delta) -> None:
        self._utf8 += delta.text.encode()
        self._ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._scored += delta.scored
        self._prompt += delta.prompt

    def merged(self, branch: int) -> Delta:
        return Delta(
            self._utf8.decode(),
            tuple(self._ids),
            tuple(self._logprobs),
            branch,
            tuple(self._scored),
            tuple(self._prompt),
        )
