"""What goes into the core: the setup it starts from, and each call that changes it.

The setup and the calls, in order, are all that decisions depend on. Whoever kept them can have the
same decisions again.
"""

from dataclasses import dataclass, field

from octavo.core.budget import Ceilings, Limits
from octavo.core.events import CancelReason, Event
from octavo.core.plan import StepPlan, StepResult
from octavo.core.prefix_cache import Context
from octavo.core.request import Request
from octavo.core.swap import SwapSetup
from octavo.core.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSetup:
    """Sizes of pool and tables, limits at the start, and what KV depends on besides tokens.

    `windows` has the window of each layer group, None for one that sees all positions. Limits on
    rows and tokens can be raised up to the `ceilings`; without those they cannot. Without
    `prefix_caching` nothing is shared. With `slab_tokens` each admission reserves that many
    positions. Without `swap` every preempted sequence is computed again.
    """

    blocks: int
    block_size: int
    limits: Limits
    windows: Windows = (None,)
    prefix_caching: bool = True
    slab_tokens: int = 0
    context: Context = field(default_factory=Context)
    swap: SwapSetup | None = None
    ceilings: Ceilings | None = None


@dataclass(frozen=True, slots=True)
class Submit:
    now: float
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """`branch` alone, or all of the request. With the reason "stop" the caller has found the end
    of the answer, a stop string say: it ends as it should."""

    now: float
    request_id: str
    branch: int | None = None
    reason: CancelReason = "abort"


@dataclass(frozen=True, slots=True)
class Plan:
    now: float


@dataclass(frozen=True, slots=True)
class Commit:
    now: float
    result: StepResult


@dataclass(frozen=True, slots=True)
class Drop:
    """Give up the hold of this name, if there is one."""

    now: float
    hold: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Empty the prefix cache: no later request finds what was computed before. Pins end."""

    now: float


@dataclass(frozen=True, slots=True)
class SetLimits:
    """From now on these hold."""

    now: float
    limits: Limits


Call = Submit | Cancel | Plan | Commit | Drop | Flush | SetLimits
Answer = tuple[Event, ...] | StepPlan | Limits | None
"""A plan is answered by a `StepPlan`, or None when there is nothing to compute; new limits by those
that held before; all else by events."""
