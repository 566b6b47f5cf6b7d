"""What one caller wants: frozen, and fully checked before it reaches the core."""

from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """What makes tokens less likely that are there already.

    `repetition` divides the logit of a token of prompt or answer, or multiplies one that is not
    above 0; `frequency` is taken away for each time the answer has the token, `presence` once.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dry:
    """Do not repeat yourself: what would go on a repeated sequence is made less likely.

    A token that would make the last `n` tokens and itself stand in the text once more, n at least
    `allowed_length`, loses `multiplier` · `base` ^ (n - `allowed_length`). Only the last `window`
    tokens of prompt and answer are looked at; None is all. No sequence goes beyond one of the
    `breakers`, sequences of token ids; those of one token lose nothing.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    window: int | None = None
    breakers: tuple[tuple[int, ...], ...] = ()


GrammarKind = Literal["json", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be: JSON by a schema, what matches a regular expression, or what a Lark
    or GBNF grammar derives. The door has compiled it.

    If `forced`, tokens that alone can follow are taken without a look at the logits: nobody asks
    for their log-probabilities, which are given as 0.
    """

    kind: GrammarKind
    text: str
    forced: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits of one position.

    Only `allowed_token_ids` may be drawn, of which () is all, and none that would complete one of
    the `bad_words` in the answer; these are token ids. `logit_bias` is added to the logits of
    single tokens; then come the `penalty` and `dry`. `temperature` 0, `top_k` 1 and `min_p` 1 all
    take the highest logit, the lowest id among equals. `top_k` and `top_n_sigma` 0, `typical_p` 1
    and `xtc_probability` 0 are off. With a `grammar` only what keeps the answer within it may be
    drawn, and the answer ends where the grammar does. The draw is keyed by (`seed`, `branch`,
    `position`), never by who else is in the batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    branch: int = 0
    penalty: Penalty | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    dry: Dry | None = None
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        if self.temperature == 0.0 or self.top_k == 1:
            return True
        # With these the likeliest may be left out.
        return self.min_p >= 1.0 and self.typical_p >= 1.0 and self.xtc_probability <= 0.0

    @property
    def looks_back(self) -> bool:
        """Whether the draw depends on which tokens were answered."""
        kept = (self.penalty, self.dry, self.grammar)
        return any(one is not None for one in kept) or bool(self.bad_words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beams:
    """Search for the likeliest answers, `width` at a time, and give the best that were found.

    The score of an answer is the sum of the log-probabilities of its tokens (of n of them),
    divided by n to the power of `length_penalty`. Log-probabilities are the model's, plus what the
    sampling adds to single logits; what it masks is not searched.

    The search ends when it has `width` answers (`early_stopping` true), when no unfinished one
    is better by the score it has now (false), or when none could be better, were it as long as may
    be ("never").

    The beams are split into `groups`, which search one after the other at each position: a token
    loses `diversity_penalty` for each beam of the groups before that goes on with it.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    groups: int = 1
    diversity_penalty: float = 0.0

    def candidates(self, ends: int) -> int:
        """How many of the likeliest tokens of a beam can matter, if so many end an answer."""
        return self.width + ends


def branch_name(request_id: str, number: int) -> str:
    """What decisions call branch `number` (from 0) of a request."""
    return f"{request_id}#{number}" if number else request_id


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the blocks of the first `tokens` prompt tokens in the pool until they were not used for
    `ttl_s` seconds. Whole blocks only."""

    tokens: int
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it.

    `stop_token_ids` end the answer once `min_tokens` are there; before that they are not drawn.
    They hold the model's own end tokens too, unless the caller asked to ignore those.
    `branches` answers are wanted: branch b draws as a request of one branch does whose
    `sampling.branch` is b higher. The prompt is computed once. With `beams` they are the answers
    that a search finds, as many as it is wide, the best first.
    `emitted` are answer tokens that an earlier engine has sent already (a restart resumes
    with them); they count as answer. One that was `accepted` before is not turned away because too
    many wait. A lower `priority` value goes first. `tenant` is on whose
    behalf it comes: some policies are fair between tenants. Its first token should come within
    `ttft_target_s` of its arrival, each further one within `tpot_target_s` on average; None is what
    the limits say. After `timeout_s` it is over time (None: never).
    Each answer token comes with the `top_logprobs` likeliest ones. With `prompt_logprobs` each
    token of the prompt is scored, with so many likeliest ones; then nothing is taken from a cache
    or a hold, since all its positions have to be computed. Of several branches the first does it.
    `pins`, the shortest first, ask that beginnings of the prompt stay in the pool. `keep` asks that
    each answer that ends as it should leaves its blocks as a hold, under the name that decisions
    give it; a request that is to go on `after` this name shares as many positions as it begins
    alike.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    priority: int = 0
    salt: str = ""
    use_cache: bool = True
    emitted: tuple[int, ...] = ()
    accepted: bool = False
    branches: int = 1
    tenant: str = ""
    pins: tuple[Pin, ...] = ()
    keep: bool = False
    after: str | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    top_logprobs: int = 0
    timeout_s: float | None = None
    prompt_logprobs: int | None = None
    beams: Beams | None = None

    @property
    def reads_cache(self) -> bool:
        return self.use_cache and self.prompt_logprobs is None

    def split(self) -> "tuple[Request, ...]":
        """One request a branch, in order."""
        first = self.sampling.branch
        own = [replace(self.sampling, branch=first + index) for index in range(self.branches)]
        return (
            replace(self, sampling=own[0], branches=1),
            *(
                replace(self, sampling=sampling, branches=1, prompt_logprobs=None)
                for sampling in own[1:]
            ),
        )
