"""Latency targets: what is due when, who can still be in time, and how long a step may last.

    arrival ──── TTFT ────▶ token 0 ── TPOT ──▶ token 1 ── TPOT ──▶ token 2 …
                            due at first token + k · TPOT: the mean counts, so that one who is
                            behind may still catch up

What a step costs is told by the pace of the steps before. Who missed its TTFT, or cannot catch up
any more, binds nobody: it is served with what the others leave.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from octavo.core.budget import Limits
from octavo.core.pace import Pace
from octavo.core.request import Request
from octavo.core.sequence import Sequence
from octavo.units import ceil_div

LEAST_PROMPT_TOKENS = 16
"""What a step has for prompts at least, whatever the targets: or those would stand still."""

AIM = 0.95
"""Steps are made for so much of a TPOT target: how long they take is an estimate."""


class Line(NamedTuple):
    """What a step costs, as the pace tells it now; 0 while nothing is known."""

    base_s: float
    token_s: float

    def seconds(self, tokens: int) -> float:
        return self.base_s + self.token_s * tokens

    def tokens(self, seconds: float) -> int:
        """How many a step of so many seconds computes."""
        return int((seconds - self.base_s) / self.token_s + _BREADTH)


_BREADTH = 1e-6
"""So that 19.999999999 tokens are 20."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What the steps ahead can do.

    `bound` sequences are in time so far. A step that none of their targets is broken by has
    `tokens`, of which `decodes` go to answers that are in time; `backlog` prompt tokens of those
    that are in time wait for the rest. `tightest_s` is the least of what their TPOT targets allow.
    """

    line: Line
    tokens: int
    bound: int
    decodes: int
    backlog: int
    tightest_s: float

    def prompt_s(self, tokens: int) -> float:
        """How long a prompt of so many tokens takes from now, after those that run."""
        chunk = max(self.tokens - self.decodes, 1)
        steps = ceil_div(self.backlog + tokens, chunk)
        beside = (steps - 1) * self.decodes
        return steps * self.line.base_s + self.line.token_s * (self.backlog + tokens + beside)


def outlook(running: Iterable[Sequence], limits: Limits, pace: Pace, now: float) -> Outlook:
    """From those that run and the targets that can still be met.

    Cost     O(running).
    """
    line = Line(pace.base_s, pace.token_s)
    bound = decodes = backlog = 0
    tightest_s = inf
    longest_s = AIM * (limits.tpot_target_s or inf)
    for sequence in running:
        tpot_s = AIM * tpot_target_s(sequence.request, limits)
        first_s = sequence.first_token_s
        if first_s is None:
            if now > ttft_due_s(sequence, limits):
                continue
            backlog += sequence.demand
        elif _is_lost(sequence, first_s, limits, line, now):
            continue
        else:
            decodes += 1
            due_s = first_s + tpot_s * _drawn(sequence)
            longest_s = min(longest_s, due_s - now, tpot_s)
        bound += 1
        tightest_s = min(tightest_s, tpot_s)
    return Outlook(
        line=line,
        tokens=_step_tokens(longest_s, decodes, limits.tokens, line),
        bound=bound,
        decodes=decodes,
        backlog=backlog,
        tightest_s=tightest_s,
    )


def ttft_due_s(sequence: Sequence, limits: Limits) -> float:
    """When the first token is due; never without a target."""
    target_s = sequence.request.ttft_target_s or limits.ttft_target_s or inf
    return sequence.submitted_s + target_s


def turn_s(sequence: Sequence, limits: Limits) -> float:
    """By what those that wait are ordered: when the first token is due, and without a target when
    it will have climbed a class."""
    target_s = sequence.request.ttft_target_s or limits.ttft_target_s or limits.aging_s or inf
    return sequence.submitted_s + target_s


def tpot_target_s(request: Request, limits: Limits) -> float:
    return request.tpot_target_s or limits.tpot_target_s or inf


def is_late(sequence: Sequence, limits: Limits, ahead: Outlook, now: float) -> bool:
    """Whether its first token was late, or can no longer be in time."""
    due_s, first_s = ttft_due_s(sequence, limits), sequence.first_token_s
    if first_s is not None:
        return first_s > due_s
    left = len(sequence.tokens) - sequence.scheduled
    return now > due_s or (due_s != inf and now + ahead.prompt_s(left) > due_s)


def excess_tokens(ahead: Outlook, started: Items[Request], limits: Limits) -> int:
    """By how many tokens a step would outlast the tightest target if one more ran beside those in
    time and the `started`, with the least of prompts; 0 if it would not.

    Nobody is kept from an engine in which nothing is in time.
    """
    line = ahead.line
    bound = ahead.bound + len(started)
    if not bound or not line.token_s:
        return 0
    alone_s = line.seconds(1)
    targets = (AIM * tpot_target_s(request, limits) for request in started)
    tightest_s = min((ahead.tightest_s, *(one for one in targets if alone_s <= one)))
    if tightest_s == inf:
        return 0
    return max(0, bound + 1 + LEAST_PROMPT_TOKENS - line.tokens(tightest_s))


def _drawn(sequence: Sequence) -> int:
    """Tokens since the first one inclusive, those in flight too."""
    return sequence.answer_length - len(sequence.request.emitted) + sequence.promised


def _is_lost(sequence: Sequence, first_s: float, limits: Limits, line: Line, now: float) -> bool:
    """Whether its first token was late, or its last will be, were it alone from now on."""
    if first_s > ttft_due_s(sequence, limits):
        return True
    tpot_s = tpot_target_s(sequence.request, limits)
    left = sequence.request.max_tokens - sequence.answer_length - sequence.promised
    due_s = first_s + tpot_s * (_drawn(sequence) + left - 1)
    return now + left * line.seconds(1) > due_s


def _step_tokens(longest_s: float, decodes: int, most: int, line: Line) -> int:
    """The tokens of a step that lasts no longer; all answers go on, and prompts by a little."""
    if longest_s == inf or not line.token_s:
        return most
    return min(max(line.tokens(longest_s), decodes + LEAST_PROMPT_TOKENS), most)
