"""A request's life in words, for the terminal and for machines."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from octavo.core.events import (
    Admitted,
    Deferred,
    Explanation,
    Fares,
    Finished,
    HoldDropped,
    Pinned,
    PinRefused,
    Preempted,
    Receipt,
    Refused,
    Stretch,
)
from octavo.observe.lives import (
    Arrived,
    Drew,
    Filled,
    Life,
    Lives,
    Moment,
    Phase,
    Relimited,
    Reused,
    Waited,
    What,
)

T = TypeVar("T")

WIDTH = 60
_BARS = "▁▂▃▄▅▆▇█"
_MARKS: dict[Phase, str] = {
    "waiting": "·",
    "prefill": "▒",
    "decode": "█",
    "preempted": "░",
    "ended": " ",
}
_SHORT_OF = {
    "blocks": "KV blocks short by {:,}",
    "rows": "all rows were taken",
    "tokens": "the step's token budget was spent",
    "predicted": "those that ran were expected to need {:,} KV blocks more than there were",
    "slo": "a longer step would break the TPOT target of those under way ({:,} tokens short)",
    "in_flight": "steps in flight were to give it tokens ({:,})",
    "in_transfer": "KV blocks still on their way to the swap space ({:,})",
}


@dataclass(frozen=True, slots=True)
class Sentence:
    """What happened, in seconds after the arrival."""

    at_s: float
    for_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One request for machines. Times count from its arrival, that from the start of the run.

    `blocks` holds (time, blocks held) at each change, `phases` (time, phase).
    """

    id: str
    state: str
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int
    recomputed_tokens: int | None
    priority: int
    arrived_s: float
    queued_s: float | None
    first_token_s: float | None
    ended_s: float | None
    preemptions: int
    swaps: int
    evictions: int
    peak_blocks: int
    phases: tuple[tuple[float, Phase], ...]
    blocks: tuple[tuple[float, int], ...]
    story: tuple[Sentence, ...]
    receipt: Receipt | None


def account(life: Life, started_s: float, *, brief: bool = False) -> Account:
    """The whole story of one request; briefly it has no sentences, phases and blocks over time."""
    arrived = life.arrived_s
    receipt = life.ending.receipt if isinstance(life.ending, Finished) else None
    return Account(
        id=life.id,
        state=_state(life),
        prompt_tokens=life.prompt_tokens,
        answer_tokens=life.answer_tokens,
        cached_tokens=life.cached_tokens,
        recomputed_tokens=None if receipt is None else receipt.recomputed_tokens,
        priority=life.priority,
        arrived_s=arrived - started_s,
        queued_s=_after(arrived, _first(life, Admitted)),
        first_token_s=_after(arrived, _first(life, Drew)),
        ended_s=_after(arrived, life.ended_s),
        preemptions=life.preemptions,
        swaps=life.swaps,
        evictions=life.evictions,
        peak_blocks=_peak(life) if receipt is None else receipt.peak_blocks,
        phases=() if brief else tuple((at_s - arrived, phase) for at_s, phase in life.phases),
        blocks=() if brief else tuple((at_s - arrived, blocks) for at_s, blocks in life.blocks),
        story=() if brief else tuple(_sentence(moment, life) for moment in life.moments),
        receipt=receipt,
    )


def _peak(life: Life) -> int:
    return max((blocks for _, blocks in life.blocks), default=0)


def _after(start: float, at_s: float | None) -> float | None:
    return None if at_s is None else at_s - start


def _first(life: Life, kind: type) -> float | None:
    return next((m.at_s for m in life.moments if isinstance(m.what, kind)), None)


def _state(life: Life) -> str:
    match life.ending:
        case Finished(reason=reason):
            return reason
        case Refused():
            return "refused"
    return life.phase


def reason(lives: Lives, name: str) -> tuple[Phase, str]:
    """Where a live request is, and why: the last thing that was decided about it, and what it waits
    for."""
    newest = lives.newest(name)
    if newest is None:
        return "waiting", ""
    phase, moments = newest
    said = [_newest_words(one, name) for one in moments if not isinstance(one.what, Arrived)]
    return phase, "; ".join(said) or "waits for the next step"


def _newest_words(moment: Moment, name: str) -> str:
    match moment.what:
        case Waited(behind, "prefix", missing):
            alike = f"{_count(missing, 'token')} that both begin with"
            return f"waits for {behind}, which computes {alike}"
        case Waited(behind, limit, missing):
            where = f"waits behind {behind}" if behind else "first in the queue"
            return f"{where}: {_short_of(limit, missing)}" if limit else "waits for the next step"
        case Deferred(_, limit, missing):
            return f"stands still: {_short_of(limit, missing)}"
    return _words(moment.what, name, moment.at_s, moment.until_s - moment.at_s)


# --- words


def _sentence(moment: Moment, life: Life) -> Sentence:
    at_s, for_s = moment.at_s - life.arrived_s, moment.until_s - moment.at_s
    return Sentence(at_s, for_s, _words(moment.what, life.id, moment.at_s, for_s))


def _words(what: What, own: str, now: float, for_s: float) -> str:
    match what:
        case Arrived(running, waiting):
            return f"arrived; {running} were running, {waiting} waiting"
        case Waited(behind, "prefix", missing):
            alike = f"{_count(missing, 'token')} that both begin with"
            return f"waited {_seconds(for_s)} for {behind}, which computed {alike}"
        case Waited(behind, limit, missing):
            if not limit:
                return f"waited {_seconds(for_s)} for the next step"
            where = f"behind {behind}" if behind else "first in the queue"
            return f"waited {_seconds(for_s)} {where}: {_short_of(limit, missing)}"
        case Deferred(_, limit, missing):
            return f"stood still for {_seconds(for_s)}: {_short_of(limit, missing)}"
        case Admitted():
            return _admitted(what, now)
        case Filled():
            return _filled(what)
        case Drew(first):
            return "first token" if first else "next token: it goes on where it was"
        case Reused(blocks):
            return f"{_count(blocks, 'cached block')} evicted to make room for it"
        case Preempted():
            return _preempted(what, own)
        case Pinned(_, name, blocks):
            return f"its beginning stays cached: {_count(blocks, 'block')} pinned as {name}"
        case PinRefused():
            return f"its beginning was not pinned: {_not_pinned(what)}"
        case HoldDropped(name, _, blocks):
            return f"needed room: the hold {name} gave up {_count(blocks, 'block')}"
        case Relimited(changes):
            said = [f"{name} {_limit(old)} → {_limit(new)}" for name, old, new in changes]
            return f"limits changed: {', '.join(said)}"
        case Finished() | Refused():
            return _ended(what)


def _limit(value: object) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _short_of(limit: str, missing: int) -> str:
    return _SHORT_OF.get(limit, f"{limit} short by {{:,}}").format(missing)


def _filled(what: Filled) -> str:
    parts = f" in {what.chunks} chunks" if what.chunks > 1 else ""
    if what.shortened:
        parts += f", {what.shortened} of them shortened to keep the TPOT target of others"
    return f"{_count(what.tokens, 'token')} to compute{parts}"


def _admitted(what: Admitted, now: float) -> str:
    head = "resumed" if what.resumed else "admitted"
    where = "cached" if what.parent is None else f"shared with {what.parent}"
    found = f", {what.cached_tokens:,} of them {where}" if what.cached_tokens else ", none cached"
    if what.swapped_tokens:
        found += f", {what.swapped_tokens:,} moved back from the swap space"
    ahead = f" before {what.overtook:,} that came earlier" if what.overtook else ""
    missed = what.missed
    why = "" if missed is None or missed.why in _UNREMARKABLE else f"; {fares(missed, now)}"
    return (
        f"{head} in row {what.row}{ahead}: {_count(what.tokens, 'token')}{found};"
        f" {_count(what.blocks_found, 'block')} found, {what.blocks_allocated:,} allocated{why}"
    )


_UNREMARKABLE = ("never_seen", "partial")
"""Nothing more than the number of tokens found says already."""


def fares(stretch: Stretch, now: float) -> str:
    """How blocks of a prompt fare in the prefix cache at this time."""
    last = stretch.stop - 1
    which = f"block {last}" if stretch.start == last else f"blocks {stretch.start}-{last}"
    said = f"{which} {_FARES[stretch.why]}"
    if stretch.by:
        said += f" {stretch.by}"
    if stretch.plan_id is not None:
        said += f" at step {stretch.plan_id}"
    if stretch.at_s is not None:
        said += f", {_seconds(now - stretch.at_s)} before"
    if stretch.alike:
        said += f"; a cached one begins with the same {_count(stretch.alike, 'token')}"
    if stretch.differs is not None:
        at = stretch.differs
        said += (
            f"; token {at.position} is {at.token}, in the cached prompt most like it {at.cached}"
        )
    return said


_FARES: dict[Fares, str] = {
    "hit": "found",
    "partial": "found in part",
    "never_seen": "never seen, or too long ago",
    "evicted": "evicted for",
    "flushed": "gone with all the cache, which was emptied on demand",
    "distrusted": "given up with the failed request",
    "other_salt": "cached under another salt only",
    "other_adapter": "cached for another adapter only",
    "other_attachments": "cached with other attachments only",
    "behind_a_miss": "cached, but one before is not",
    "not_full": "too short to be cached: only full blocks are",
    "cache_off": "not looked for: the cache is off",
}


def cache_summary(told: Explanation) -> str:
    """One sentence about a prompt."""
    tokens = f"{told.cached_tokens:,} of {_count(told.prompt_tokens, 'prompt token')} cached"
    first = next((one for one in told.stretches if one.why not in ("hit", "not_full")), None)
    if first is None:
        rest = told.prompt_tokens - told.cached_tokens
        return f"{tokens}: all that can be; {_count(rest, 'token')} must be computed in any case"
    return f"{tokens}; {fares(first, told.asked_s)}"


def _preempted(what: Preempted, own: str) -> str:
    if what.request_id != own:
        return f"needed room: {what.request_id} yielded {_count(what.blocks_released, 'block')}"
    if what.mode == "swap":
        fate = f"{what.blocks_moved:,} moved to the swap space"
    else:
        fate = f"{_count(what.tokens_to_recompute, 'token')} to recompute unless still cached"
    return (
        f"preempted ({what.mode}) for {what.beneficiary}:"
        f" {_count(what.blocks_released, 'block')} released, {fate}{_estimates(what)}"
    )


def _estimates(what: Preempted) -> str:
    """What either way was estimated to take, when there was a choice."""
    if what.swap_s is None or what.recompute_s is None:
        return ""
    swap, recompute = f"{1000 * what.swap_s:,.1f} ms", f"{1000 * what.recompute_s:,.1f} ms"
    return f"; estimated {swap} to move there and back, {recompute} to recompute"


def _not_pinned(what: PinRefused) -> str:
    match what.limit:
        case "tokens":
            return f"{_count(what.missing, 'token')} short of a block"
        case "cache":
            return "its blocks are not in the prefix cache"
        case "quota":
            return f"with it {_count(what.missing, 'block')} too many would be pinned"


def _ended(what: Finished | Refused) -> str:
    if isinstance(what, Refused):
        return f"refused ({what.limit}): {what.message}"
    reasons = {
        "stop": "finished: the model or a stop token ended the answer",
        "length": "finished: the answer has its full length",
        "abort": "cancelled",
        "error": "failed",
        "timeout": "ended: its time was over",
    }
    stop = f" (token {what.stop_id})" if what.stop_id is not None else ""
    return reasons[what.reason] + stop + (f": {what.message}" if what.message else "")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:,.2f} s"


# --- the terminal


def page(told: Account) -> str:
    """One request: what it cost, a bar of its phases and blocks over time, and its story."""
    lines = [f"request {told.id}: {told.state}", *_figures(told), "", *_pictures(told), ""]
    lines += [f"{sentence.at_s:12.3f} s  {sentence.text}" for sentence in told.story]
    return "\n".join(lines) + "\n"


def _figures(told: Account) -> Iterable[str]:
    yield (
        f"  {_count(told.prompt_tokens, 'prompt token')} ({told.cached_tokens:,} cached),"
        f" {_count(told.answer_tokens, 'answer token')}, priority {told.priority}"
    )
    yield (
        f"  queued {_seconds(told.queued_s)}, first token after {_seconds(told.first_token_s)},"
        f" ended after {_seconds(told.ended_s)}"
    )
    if told.preemptions:
        recomputed = (
            ""
            if told.recomputed_tokens is None
            else (f", {_count(told.recomputed_tokens, 'token')} recomputed")
        )
        swapped = f" ({told.swaps:,} by swap)" if told.swaps else ""
        yield f"  preempted {_count(told.preemptions, 'time')}{swapped}{recomputed}"
    if told.evictions:
        yield f"  evicted {_count(told.evictions, 'cached block')}"


def _pictures(told: Account) -> Iterable[str]:
    end_s = told.ended_s if told.ended_s is not None else _last(told)
    if end_s <= 0:
        return
    times = [end_s * (column + 0.5) / WIDTH for column in range(WIDTH)]
    bar = "".join(_MARKS[_at(told.phases, at_s, "waiting")] for at_s in times)
    yield f"  {'phase':7}{bar}  {_seconds(end_s)}"
    peak = told.peak_blocks
    if peak:
        held = [_at(told.blocks, at_s, 0) for at_s in times]
        heights = "".join(_BARS[(n * 7) // peak] if n else " " for n in held)
        yield f"  {'blocks':7}{heights}  peak {peak:,}"
    yield "         · waiting   ▒ prefill   █ decode   ░ preempted"


def _last(told: Account) -> float:
    return max((sentence.at_s + sentence.for_s for sentence in told.story), default=0.0)


def _at(changes: Sequence[tuple[float, T]], at_s: float, before: T) -> T:
    """What the last change up to `at_s` set."""
    value = before
    for since_s, changed in changes:
        if since_s > at_s:
            break
        value = changed
    return value


def table(accounts: Iterable[Account]) -> str:
    """A line for each request."""
    head = (
        "request",
        "arrived",
        "queued",
        "first",
        "ended",
        "prompt",
        "cached",
        "answer",
        "preempted",
        "blocks",
        "state",
    )
    rows = [head]
    for told in accounts:
        rows.append(
            (
                told.id,
                f"{told.arrived_s:.3f} s",
                _seconds(told.queued_s),
                _seconds(told.first_token_s),
                _seconds(told.ended_s),
                f"{told.prompt_tokens:,}",
                f"{told.cached_tokens:,}",
                f"{told.answer_tokens:,}",
                str(told.preemptions),
                str(told.peak_blocks),
                told.state,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index in (0, len(head) - 1) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines) + "\n"
