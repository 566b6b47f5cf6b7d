"""An engine over a network that is noise: what its answers have in common is what was asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tests.text.vocabulary import tokenizer_of

from octavo.core.budget import Limits
from octavo.core.calls import CoreSetup
from octavo.core.events import Event, Finished, FinishReason
from octavo.core.request import Request
from octavo.core.setup import scheduler_of
from octavo.engine.door import Door
from octavo.engine.engine import Engine
from octavo.engine.params import SamplingParams
from octavo.ops.api import BF16, F32, Batch, KVLayout
from octavo.ops.native import NativeOps
from octavo.runtime.drafting import Guesser
from octavo.runtime.runner import ModelRunner
from octavo.runtime.storage import KVStorage
from octavo.text.grammar import Grammars

PIECES = [b'{"', b'":', b'", "', b"name", b"na", b"me", b" the", b"  ", b'"}', b"],", b"12", b"tr"]
TOKENIZER, _ = tokenizer_of(PIECES)
VOCABULARY = TOKENIZER.vocab_size + 2
END = 0
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=2, block_size=16)
CONTEXT = 2048

Likes = Callable[[bytes], float]
"""What is added to the logit of a token, by its bytes."""


def likes_to_end(piece: bytes) -> float:
    """Text in ASCII, closed soon."""
    return 4.0 * piece.count(b'"') + 3.0 * sum(piece.count(one) for one in b"}]") + piece.isalnum()


class Noise:
    """Logits that depend on the token before and the position alone, and on what it likes."""

    def __init__(self, seed: int, likes: Likes = likes_to_end) -> None:
        bias = np.array([likes(piece) for piece in TOKENIZER.pieces(VOCABULARY)], np.float32)
        noise = np.random.default_rng(seed).standard_normal((509, VOCABULARY), np.float32)
        self._table = noise * 2 + bias
        self._batch: Batch | None = None

    def of(self, token: int, position: int) -> F32:
        """Those from which the token after this one is drawn."""
        row: F32 = self._table[(31 * token + 7 * position) % len(self._table)]
        return row

    def forward(self, batch: Batch, pool: BF16) -> F32:
        self._batch = batch
        return self.logits(batch.logit_rows)

    def logits(self, rows: np.ndarray) -> F32:
        assert self._batch is not None
        tokens, positions = self._batch.tokens[rows], self._batch.positions[rows]
        return self._table[(31 * tokens + 7 * positions) % len(self._table)].copy()


@dataclass(frozen=True, slots=True)
class Told:
    """One answer."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: FinishReason
    stop_id: int | None
    message: str = ""


@dataclass(slots=True)
class Noisy:
    """An engine, its door, and how many steps it took."""

    seed: int = 0
    likes: Likes = likes_to_end
    blocks: int = 512
    sequences: int = 64
    tokens: int = 512
    drafts: int = 0
    guesser: Guesser | None = None
    grammars: Grammars | None = None
    steps: int = 0
    door: Door = field(init=False)
    engine: Engine = field(init=False)
    network: Noise = field(init=False)

    def __post_init__(self) -> None:
        self.door = Door(TOKENIZER, max_model_len=CONTEXT, vocab_size=VOCABULARY, seed=1)
        grammars = self.grammars or GRAMMARS
        self.door.grammars = grammars
        self.network = Noise(self.seed, self.likes)
        runner = ModelRunner(
            self.network,
            NativeOps(threads=1),
            KVStorage(LAYOUT, self.blocks),
            rows=self.sequences,
            draws=8 * self.sequences,
            guesser=self.guesser,
            max_context=CONTEXT,
            grammars=grammars,
        )
        limits = Limits(
            sequences=self.sequences, tokens=self.tokens, watermark_blocks=0, drafts=self.drafts
        )
        setup = CoreSetup(blocks=self.blocks, block_size=LAYOUT.block_size, limits=limits)
        self.engine = Engine(scheduler_of(setup), runner)

    def ask(self, prompt: str, **params: object) -> Request:
        """A request, named after its prompt."""
        asked = {"max_tokens": 200, "seed": 7} | params
        ticket = self.door.completion(prompt, SamplingParams(**asked))  # type: ignore[arg-type]
        return replace(ticket.request, id=prompt)

    def answers(self, *requests: Request) -> dict[str, Told]:
        """Serve all at once; by the name of the request, and its branch after # if it has many."""
        tokens: dict[str, list[tuple[int, float]]] = {}
        told: dict[str, Told] = {}

        def take(events: Sequence[Event]) -> None:
            for event in events:
                name = f"{event.request_id}#{event.branch}" if event.branch else event.request_id
                if isinstance(event, Finished):
                    told[name] = _told(tokens.get(name, []), event)
                else:
                    tokens.setdefault(name, []).append((event.token, event.logprob))

        for request in requests:
            take(self.engine.submit(request))
        while not self.engine.idle:
            take(self.engine.step())
            self.steps += 1
        return told


GRAMMARS = Grammars(lambda: TOKENIZER, VOCABULARY)
"""Of all these engines: they are of one model."""


def _told(tokens: Sequence[tuple[int, float]], end: Finished) -> Told:
    ids = tuple(token for token, _ in tokens)
    text = TOKENIZER.decode(ids[:-1] if end.stop_id is not None else ids)
    return Told(
        text, ids, tuple(score for _, score in tokens), end.reason, end.stop_id, end.message
    )
