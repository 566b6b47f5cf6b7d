"""The engine's status as metrics read it: gauges as they stand, totals over all engines so far.

An engine that died was replaced by one that counts from zero. What the one before had counted is
kept and added, so that no total ever falls.
"""

from dataclasses import dataclass
from typing import Protocol

from octavo.observe.buckets import STEP_TOKENS, TOKEN_S
from octavo.observe.histogram import Counted, nothing


class Status(Protocol):
    """What is read of the engine's status whatever metrics there are: `GAUGES`, `TOTALS` and
    `DISTRIBUTIONS` name the rest."""

    @property
    def started_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Shown:
    """A metric `name`, and the field of the status that it shows."""

    name: str
    field: str
    help: str


GAUGES = (
    Shown("requests_running", "running", "Answers that run now: they hold KV blocks"),
    Shown(
        "requests_waiting",
        "waiting",
        "Answers that wait now for blocks, a place in the batch or a sibling",
    ),
    Shown("kv_blocks_total", "blocks_total", "KV blocks in the pool"),
    Shown(
        "kv_blocks_pinned",
        "blocks_pinned",
        "KV blocks that stay for prompts to come because requests asked for it",
    ),
    Shown(
        "kv_table_entries",
        "table_entries",
        "KV blocks in the tables of running answers; one that several share counts for each",
    ),
    Shown("swap_blocks_total", "swap_blocks_total", "Blocks that the swap space holds"),
    Shown("swap_blocks_used", "swap_blocks_used", "Blocks of the swap space that are taken"),
    Shown("last_step_seconds", "last_step_s", "How long the last step took"),
)

BLOCKS = (
    Shown("free", "blocks_free", ""),
    Shown("cached", "blocks_cached", ""),
    Shown("owned", "blocks_owned", ""),
    Shown("held", "blocks_held", ""),
    Shown("fenced", "blocks_fenced", ""),
)
"""The values of the label `state`; together they are all blocks."""

TOTALS = (
    Shown("steps", "steps", "Steps planned"),
    Shown("failed_steps", "failed_steps", "Steps whose work failed as a whole"),
    Shown("admissions", "admissions", "Answers admitted for the first time"),
    Shown("tokens_computed", "tokens_computed", "Positions planned to compute, prompt and answer"),
    Shown("tokens_sampled", "tokens_sampled", "Answer tokens sampled, counted at commit"),
    Shown(
        "tokens_prompt",
        "prompt_tokens",
        "Prompt tokens of requests, counted at commit of their first token",
    ),
    Shown(
        "tokens_prompt_cached",
        "prompt_tokens_cached",
        "Those of tokens_prompt that the prefix cache had at first admission",
    ),
    Shown("tokens_drafted", "tokens_drafted", "Tokens guessed ahead, counted at commit"),
    Shown("tokens_accepted", "tokens_accepted", "Those of tokens_drafted that were right"),
    Shown(
        "tokens_recomputed",
        "tokens_recomputed",
        "Positions computed again after preemptions, counted when the answer ends",
    ),
    Shown(
        "tokens_swapped_out",
        "tokens_swapped_out",
        "Positions whose KV preemptions moved to the swap space",
    ),
    Shown("tokens_swapped_in", "tokens_swapped_in", "Positions whose KV admissions moved back"),
    Shown("preemptions", "preemptions", "Times a running answer gave up its blocks"),
    Shown("preemptions_swapped", "swaps", "Preemptions whose KV was moved to the swap space"),
    Shown("prefix_cache_evictions", "evictions", "Cached blocks reused for something else"),
    Shown(
        "prefix_cache_tokens_queried",
        "prefix_tokens_queried",
        "Tokens looked up in the prefix cache at first admissions",
    ),
    Shown(
        "prefix_cache_tokens_hit",
        "prefix_tokens_hit",
        "Tokens that first admissions found in the prefix cache",
    ),
)

DISTRIBUTIONS = {"step_s": TOKEN_S, "step_tokens": STEP_TOKENS, "token_gaps_s": TOKEN_S}
"""Fields that hold a `Counted`, and by which bounds."""


LARGEST = 2**63
"""What no counter reaches; from there on a value is a mistake."""


def countable(value: object) -> bool:
    """Whether it is a number that a counter or a gauge may take."""
    return isinstance(value, int | float) and 0 <= value < LARGEST  # NaN is not


def ratio(part: float, whole: float, *, of_nothing: float = 0.0) -> float:
    """`part / whole`, and a defined value when there is nothing to divide."""
    return part / whole if whole else of_nothing


class Kept:
    """The last status that was countable.

    Keeps    no total falls: not by a bad value, nor when another engine takes over.
    """

    def __init__(self) -> None:
        self.gauges: dict[str, float] = {}
        self.restarts = 0
        """How often an engine took over from another."""
        self.dropped = 0
        """Values that could not be counted."""
        self._started_s: float | None = None
        self._before = {shown.field: 0.0 for shown in TOTALS}
        self._totals = dict(self._before)
        self._counted_before = {name: nothing(bounds) for name, bounds in DISTRIBUTIONS.items()}
        self._counted = dict(self._counted_before)

    @property
    def occupancy(self) -> float:
        """Share of the KV blocks that running answers hold, and transfers."""
        taken = self.gauges.get("blocks_owned", 0) + self.gauges.get("blocks_fenced", 0)
        return ratio(taken, self.gauges.get("blocks_total", 0))

    def total(self, field: str) -> float:
        return self._before[field] + self._totals[field]

    def counted(self, field: str) -> Counted:
        return self._counted_before[field].plus(self._counted[field])

    def take(self, status: Status) -> None:
        """Take over what of `status` can be counted; of the rest what was there stays."""
        if self._started_s is not None and status.started_s != self._started_s:
            self._take_over()
        self._started_s = status.started_s
        for shown in (*GAUGES, *BLOCKS):
            value = getattr(status, shown.field)
            if self._is_good(countable(value)):
                self.gauges[shown.field] = value
        for field, total in self._totals.items():
            value = getattr(status, field)
            if self._is_good(countable(value) and value >= total):
                self._totals[field] = value
        for field, counted in self._counted.items():
            value = getattr(status, field)
            if self._is_good(_continues(value, counted)):
                self._counted[field] = value

    def _take_over(self) -> None:
        """The engine is another one, and counts from zero."""
        self.restarts += 1
        for field in self._totals:
            self._before[field] = self.total(field)
            self._totals[field] = 0.0
        for field, bounds in DISTRIBUTIONS.items():
            self._counted_before[field] = self.counted(field)
            self._counted[field] = nothing(bounds)

    def _is_good(self, good: bool) -> bool:
        self.dropped += not good
        return good


def _continues(value: object, before: Counted) -> bool:
    return (
        isinstance(value, Counted)
        and len(value.counts) == len(before.counts)
        and countable(value.total)
        and value.total >= before.total
        and all(new >= old for new, old in zip(value.counts, before.counts, strict=True))
    )
