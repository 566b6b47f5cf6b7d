"""What leaves the core: events for the caller, decisions and their reasons for the journal."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

TokenLimit = Literal["tokens", "slo"]
"""What ends the tokens of a step: the limit on them, or how long it may last."""
FinishReason = Literal["stop", "length", "abort", "error", "timeout"]
CancelReason = Literal["abort", "stop", "timeout"]
"""Of those a caller may give."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """At `at_s` an answer gave up `blocks` so that `beneficiary` could go on; or its engine died,
    for nobody's sake."""

    at_s: float
    mode: Literal["recompute", "swap", "engine_died"]
    beneficiary: str = ""
    blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What one answer cost. Times are on the engine's clock, in seconds.

    The receipts of all branches sum to the cost of the request: the prompt, and what of it was
    cached, stands in the receipt of the first branch only.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens taken from the prefix cache at the first admission."""
    recomputed_tokens: int
    """Tokens computed again because a preemption dropped their KV."""
    preemptions: int
    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    finished_s: float
    peak_blocks: int
    swaps: int = 0
    """How many of the preemptions swapped its KV."""
    interruptions: tuple[Interruption, ...] = ()
    drafted_tokens: int = 0
    """Tokens that were guessed ahead and computed."""
    accepted_tokens: int = 0
    """Guesses that were right: steps it did not take."""
    """The preemptions, in order."""


Likeliest = tuple[tuple[int, float], ...]
"""Tokens and their log-probabilities, the likeliest first, of equals the lowest id first."""


class Token(NamedTuple):
    """Answer token `number` (from 0) of one branch of a request.

    `logprob` and `top`, the likeliest tokens if the request asks for them, are the model's, before
    anything that its sampling does.
    """

    request_id: str
    number: int
    token: int
    logprob: float
    branch: int = 0
    top: Likeliest = ()


new_token: Callable[[type[Token], tuple[str, int, int, float, int, Likeliest]], Token]
new_token = tuple.__new__
"""`new_token(Token, fields)` is `Token(*fields)` in half the time: each step makes one for every
sequence."""


class Score(NamedTuple):
    """How likely the model found a token of the prompt: `rank` 1 is the likeliest, and `top` has as
    many of the likeliest as the request asks for."""

    token: int
    logprob: float
    rank: int
    top: Likeliest = ()


class PromptScored(NamedTuple):
    """The tokens of a prompt from position `first` on, which is 1 at least; each comes once, in
    order, before any token of the answer."""

    request_id: str
    first: int
    scores: tuple[Score, ...]
    branch: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal event of each branch of an accepted request.

    `stop_id` is the token that ended it.
    """

    request_id: str
    reason: FinishReason
    stop_id: int | None
    message: str
    receipt: Receipt
    branch: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """The one terminal event of a request not accepted: it can never fit, or a limit is reached."""

    request_id: str
    limit: str
    message: str


Event = Token | PromptScored | Finished | Refused


Fares = Literal[
    "hit",
    "partial",
    "never_seen",
    "evicted",
    "flushed",
    "distrusted",
    "other_salt",
    "other_adapter",
    "other_attachments",
    "behind_a_miss",
    "not_full",
    "cache_off",
]
"""How a block of a prompt fares in the prefix cache: it is there; a cached one begins alike; it was
never there; it was there, and left in one of three ways; the same tokens are there under another
salt or adapter or with other attachments; it is there, but one before it is not; it has too few
tokens to be cached; or the cache is not used."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that is another one in the cached block most like it. Tokens are shown to who
    asks for them, but not where records are written out, into a log say."""

    position: int
    token: int = field(repr=False)
    cached: int = field(repr=False)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks from `start` up to before `stop` of a prompt, which fare the same way.

    The first `alike` tokens were found in a cached block that begins so. They left the cache for
    the request `by`, at `at_s` on the engine's clock, in or before the plan `plan_id`.
    """

    start: int
    stop: int
    why: Fares
    alike: int = 0
    differs: Difference | None = None
    by: str = ""
    at_s: float | None = None
    plan_id: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the prefix cache has of a prompt: `cached_tokens` of its tokens, and each block. It was
    `asked_s` on the engine's clock."""

    prompt_tokens: int
    cached_tokens: int
    block_size: int
    stretches: tuple[Stretch, ...]
    asked_s: float


@dataclass(frozen=True, slots=True)
class Admitted:
    """`cached_tokens` were found; `blocks_found` are shared whole, `blocks_allocated` are new.

    They were found in the prefix cache, or with `parent`: a running sequence or a hold. In
    decisions the branches of a request after the first are named `ID#1`, `ID#2` and so on. The KV
    of `swapped_tokens` more comes back from the host arena, in `blocks_moved`. `missed` is the
    block at which the hits of the prefix cache end, and why; None if there is nothing to explain.
    By the policy it `overtook` so many that had come earlier and wait still.
    """

    request_id: str
    row: int
    tokens: int
    cached_tokens: int
    blocks_found: int
    blocks_allocated: int
    resumed: bool
    parent: str | None = None
    swapped_tokens: int = 0
    blocks_moved: int = 0
    missed: Stretch | None = None
    overtook: int = 0


@dataclass(frozen=True, slots=True)
class Deferred:
    """A request waits this step: `limit` names what is short, `missing` how much of it.

    `slo` is short of tokens too: more would make steps outlast the TPOT target of those that run.
    `predicted` is short of blocks too: those that run are expected to need them.

    Of the requests not yet admitted only the first says so; the others wait behind it. Blocks
    `in_transfer` are there when a plan in flight is committed. One whose prompt begins as that of a
    running request, `behind`, says once that it waits until the `missing` tokens of the beginning
    are computed there ("prefix"); nobody waits behind it.
    """

    request_id: str
    limit: Literal[
        "blocks", "rows", "tokens", "in_flight", "in_transfer", "prefix", "slo", "predicted"
    ]
    missing: int
    behind: str = ""


@dataclass(frozen=True, slots=True)
class Chunked:
    """A span shorter than the demand, because the token budget ended, or (`slo`) because a longer
    step would outlast the TPOT target of those that run."""

    request_id: str
    granted: int
    demand: int
    limit: TokenLimit = "tokens"


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence gave up its blocks so that `beneficiary` can go on; its tokens stay.

    Its KV is swapped, `blocks_moved` to the host arena, or `tokens_to_recompute` later (fewer if
    the prefix cache still has some). What either was estimated to take stands in `swap_s` (None:
    it could not be swapped) and `recompute_s` (None: nothing was known yet).
    """

    request_id: str
    beneficiary: str
    mode: Literal["recompute", "swap"]
    blocks_released: int
    tokens_to_recompute: int
    blocks_moved: int = 0
    swap_s: float | None = None
    recompute_s: float | None = None


@dataclass(frozen=True, slots=True)
class Evicted:
    """A cached block was reused for `beneficiary`; the prefix it held is no longer cached."""

    block: int
    beneficiary: str


@dataclass(frozen=True, slots=True)
class Pinned:
    """The beginning of a prompt stays in the pool under `name`, in so many blocks, until `until_s`,
    or longer if it is found until then."""

    request_id: str
    name: str
    blocks: int
    until_s: float


@dataclass(frozen=True, slots=True)
class PinRefused:
    """A pin was not granted: it is shorter than a block ("tokens"), its blocks are not in the cache
    ("cache"), or with them more blocks would be pinned than may be ("quota")."""

    request_id: str
    limit: Literal["tokens", "cache", "quota"]
    blocks: int
    missing: int


@dataclass(frozen=True, slots=True)
class HoldDropped:
    """A pin or a session gave up its blocks so that `beneficiary` can go on; so many became
    available."""

    name: str
    beneficiary: str
    blocks: int


@dataclass(frozen=True, slots=True)
class HoldExpired:
    """The time of a pin is over; so many blocks became available."""

    name: str
    blocks: int


Decision = (
    Admitted
    | Deferred
    | Chunked
    | Preempted
    | Evicted
    | Pinned
    | PinRefused
    | HoldDropped
    | HoldExpired
)
