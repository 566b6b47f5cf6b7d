"""ModelRunner: carries out plans with a model. It decides nothing."""

from collections.abc import Sequence
from itertools import accumulate

from octavo.core.plan import (
    Bind,
    Drawn,
    RowFailed,
    RowScores,
    Sampled,
    Span,
    StepPlan,
    StepResult,
)
from octavo.core.request import Request
from octavo.ops.api import F32, Ops
from octavo.runtime.batch import RowTables, make_batch
from octavo.runtime.drafting import Chain, Guess, Guesser, accept
from octavo.runtime.edits import Edits
from octavo.runtime.lookup import Drafters
from octavo.runtime.masks import Masks
from octavo.runtime.movers import Mover, copy_blocks
from octavo.runtime.network import Network
from octavo.runtime.sampler import Draw, Sampler
from octavo.runtime.scores import PromptScorer
from octavo.runtime.storage import KVStorage
from octavo.text.grammar import Grammars


class ModelRunner:
    """Keeps  rows: a request and block tables each, from its bind to the next bind of that row."""

    def __init__(
        self,
        network: Network,
        ops: Ops,
        storage: KVStorage,
        *,
        rows: int,
        draws: int | None = None,
        max_context: int,
        groups: int = 1,
        mover: Mover | None = None,
        guesser: Guesser | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._network = network
        self._ops = ops
        self._storage = storage
        self._mover = mover
        self._grammars = grammars
        vocab_size = 0 if grammars is None else grammars.vocab_size
        self._masks = Masks(rows=rows, vocab_size=vocab_size)
        self._sampler = Sampler(ops, max_rows=draws or rows)
        self._scorer = PromptScorer(network, ops, max_rows=draws or rows)
        self._block_size = storage.layout.block_size
        self._tables = RowTables(
            rows=rows, width=-(-max_context // self._block_size), groups=groups
        )
        self._requests: dict[int, Request] = {}
        self._last: dict[int, int] = {}
        self._edits: dict[int, Edits] = {}
        """Of the rows whose requests ask for any."""
        self._scored: set[int] = set()
        """The rows whose prompts are to be scored."""
        self._guesser = Drafters() if guesser is None else guesser

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan: moves out, binds, table writes, copies, moves in, then all spans in
        one forward pass."""
        moved = 0 if self._mover is None else self._mover.move_out(plan.moves)
        for bind in plan.binds:
            self._bind(bind)
        self._tables.apply(plan.writes)
        copy_blocks(self._ops, self._storage, plan.copies)
        moved += 0 if self._mover is None else self._mover.move_in(plan.moves)
        self._guesser.carry(plan)
        if not plan.spans:
            return StepResult(plan.id, (), moved)
        guesses = self._guess(plan.spans)
        tokens = [
            (*self._tokens(span), *guess) for span, guess in zip(plan.spans, guesses, strict=True)
        ]
        batch = make_batch(plan.spans, tokens, self._tables, self._block_size)
        chains = [
            Chain(span.row, span.stop, guess)
            for span, guess in zip(plan.spans, guesses, strict=True)
            if span.samples
        ]
        edits = (self._edits.get(chain.row) for chain in chains)
        with self._masks.of([one for one in edits if one is not None]):
            logits = self._network.forward(batch, self._storage.pool)
        outcomes = self._sample(logits, chains)
        if not self._scored:
            return StepResult(plan.id, outcomes, moved, rounds=self._guesser.rounds)
        told = self._scorer.score(plan.spans, self._requests, batch)
        failed = {one.row: one for one in told if isinstance(one, RowFailed)}
        sound = tuple(one for one in outcomes if one.row not in failed)
        scores = tuple(one for one in told if isinstance(one, RowScores))
        outcomes = (*sound, *failed.values())
        return StepResult(plan.id, outcomes, moved, scores, self._guesser.rounds)

    def _bind(self, bind: Bind) -> None:
        self._requests[bind.row] = bind.request
        drafts = bind.request.beams is None
        past = (*bind.request.prompt, *bind.answered) if drafts else ()
        self._guesser.bind(bind.row, bind.request, past)
        if bind.request.prompt_logprobs is None:
            self._scored.discard(bind.row)
        else:
            self._scored.add(bind.row)
        edits = Edits.of(bind, self._grammars)
        if edits is None:
            self._edits.pop(bind.row, None)
        else:
            self._edits[bind.row] = edits

    def _guess(self, spans: Sequence[Span]) -> list[Guess]:
        """What may follow each span; what its grammar does not allow is no guess."""
        guesses = list(self._guesser.guess(spans, self._tables))
        for index, span in enumerate(spans):
            edits = self._edits.get(span.row) if guesses[index] else None
            if edits is not None and edits.matcher is not None:
                guesses[index] = guesses[index][: edits.matcher.valid(guesses[index])]
        return guesses

    def _tokens(self, span: Span) -> tuple[int, ...]:
        missing = span.stop - span.start - len(span.tokens)
        return (*span.tokens, self._last[span.row]) if missing else span.tokens

    def _sample(self, logits: F32, chains: Sequence[Chain]) -> tuple[Sampled | RowFailed, ...]:
        """One outcome for each chain; its rows of logits follow those of the chain before it.

        What a row's edits write depends on the tokens before it: such chains are drawn a token at a
        time, as far as their guesses are right.
        """
        firsts = list(accumulate((len(chain.guesses) + 1 for chain in chains), initial=0))
        wave = [
            (number, index)
            for number, chain in enumerate(chains)
            for index in range(1 if chain.row in self._edits else len(chain.guesses) + 1)
        ]
        drawn: list[list[Sampled | RowFailed]] = [[] for _ in chains]
        while wave:
            rows = [firsts[number] + index for number, index in wave]
            some = logits if len(rows) == len(logits) else logits[rows]
            outcomes = self._sampler.sample(some, [self._draw(chains[n], i) for n, i in wave])
            for (number, _), outcome in zip(wave, outcomes, strict=True):
                drawn[number].append(outcome)
            wave = [
                (number, len(drawn[number]))
                for number in dict.fromkeys(number for number, _ in wave)
                if chains[number].row in self._edits
                and self._advance(chains[number], drawn[number])
            ]
            with self._masks.of([self._edits[chains[number].row] for number, _ in wave]):
                pass  # those of the first wave were computed beside the forward pass
        accepted = tuple(self._followed(accept(*each)) for each in zip(chains, drawn, strict=True))
        for outcome in accepted:
            if isinstance(outcome, Sampled):
                self._keep(outcome)
        return accepted

    def _draw(self, chain: Chain, index: int) -> Draw:
        request, edits = self._requests[chain.row], self._edits.get(chain.row)
        return Draw(chain.row, chain.stop + index, request, edits)

    def _advance(self, chain: Chain, drawn: list[Sampled | RowFailed]) -> bool:
        """Take in the newest token of a chain with edits; whether the next row is to be drawn."""
        newest, edits = drawn[-1], self._edits[chain.row]
        if not isinstance(newest, Sampled) or newest.candidates:
            return False
        if edits.forced:  # it was sure, whoever asked the model
            drawn[-1] = newest._replace(logprob=0.0)
        edits.append(newest.token)
        right = len(drawn) <= len(chain.guesses) and newest.token == chain.guesses[len(drawn) - 1]
        return right and not edits.complete

    def _followed(self, outcome: Sampled | RowFailed) -> Sampled | RowFailed:
        """The tokens of a row with what its grammar makes follow; a token that may end the answer
        is drawn like any other."""
        edits = self._edits.get(outcome.row)
        if edits is None or edits.matcher is None or isinstance(outcome, RowFailed):
            return outcome
        more, stops = list(outcome.more), self._requests[outcome.row].stop_token_ids
        while edits.forced and edits.forced[0] not in stops:
            more.append(Drawn(edits.forced[0], 0.0))
            edits.append(edits.forced[0])
        return outcome._replace(more=tuple(more), ended=edits.complete)

    def _keep(self, outcome: Sampled) -> None:
        """The tokens of a row are there; those of a beam come with the next plan."""
        if outcome.candidates:
            return
        tokens = (outcome.token, *(drawn.token for drawn in outcome.more))
        self._last[outcome.row] = tokens[-1]
        self._guesser.append(outcome.row, tokens)
