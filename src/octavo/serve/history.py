"""The last half hour of a server in numbers that say how it fares: a point every two seconds.

    utilisation       the share of the pool that running requests own
    preemption rate   how often a running request gave up its blocks, a minute
    table depth       blocks in the table of a running request, on average
    hit ratio         the share of the looked-up tokens that the prefix cache had

Rates and ratios are those of the last ten seconds, or of all that is kept if that is less.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec

from octavo.observe.metrics import Metrics
from octavo.observe.status import Status, ratio

EVERY_S = 2.0
KEPT = 900
WINDOW_S = 10.0


class Point(msgspec.Struct, frozen=True, array_like=True):
    """At `at_s`, in seconds since 1970. None is a ratio of nothing."""

    at_s: float
    utilisation: float
    preemptions_a_minute: float
    table_depth: float | None
    hit_ratio: float | None
    answer_tokens_a_second: float
    prompt_tokens_a_second: float
    running: int
    waiting: int


class _Sample(msgspec.Struct, frozen=True):
    """What totals and gauges were."""

    at_s: float
    gauges: dict[str, float]
    totals: dict[str, float]
    utilisation: float


_TOTALS = (
    "preemptions",
    "prefix_tokens_queried",
    "prefix_tokens_hit",
    "tokens_sampled",
    "prompt_tokens",
)


class History:
    """Keeps   `KEPT` points, `EVERY_S` apart at least. Not thread-safe."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.time) -> None:
        self._metrics = metrics
        self._clock = clock
        self._samples: deque[_Sample] = deque(maxlen=int(WINDOW_S / EVERY_S) + 1)
        self._points: deque[Point] = deque(maxlen=KEPT)

    def take(self, status: Status) -> None:
        """Add a point, if it is time for one."""
        now = self._clock()
        if self._samples and now - self._samples[-1].at_s < EVERY_S * 0.9:
            return
        self._metrics.take(status)
        kept = self._metrics.kept
        totals = {name: kept.total(name) for name in _TOTALS}
        self._samples.append(_Sample(now, dict(kept.gauges), totals, kept.occupancy))
        self._points.append(_point(self._samples[0], self._samples[-1]))

    def since(self, at_s: float) -> tuple[Point, ...]:
        """The points after that time."""
        return tuple(point for point in self._points if point.at_s > at_s)


def _point(first: _Sample, last: _Sample) -> Point:
    span_s = last.at_s - first.at_s

    def gained(name: str) -> float:
        return last.totals[name] - first.totals[name]

    def rate(name: str) -> float:
        return ratio(gained(name), span_s)

    running = last.gauges.get("running", 0)
    queried = gained("prefix_tokens_queried")
    return Point(
        at_s=last.at_s,
        utilisation=last.utilisation,
        preemptions_a_minute=60 * rate("preemptions"),
        table_depth=last.gauges.get("table_entries", 0) / running if running else None,
        hit_ratio=gained("prefix_tokens_hit") / queried if queried else None,
        answer_tokens_a_second=rate("tokens_sampled"),
        prompt_tokens_a_second=rate("prompt_tokens"),
        running=int(running),
        waiting=int(last.gauges.get("waiting", 0)),
    )


async def remember(history: History, status: Callable[[], Status]) -> None:
    """Add points while the server runs, until it is cancelled."""
    while True:
        history.take(status())
        await asyncio.sleep(EVERY_S)
