"""What a server says of itself unasked: the status line in its log."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict

from octavo.engine.engine import EngineStatus
from octavo.observe.metrics import Metrics
from octavo.observe.status_line import EVERY_S, StatusLine

logger = logging.getLogger(__name__)


async def report(
    metrics: Metrics, status: Callable[[], EngineStatus], *, every_s: float = EVERY_S
) -> None:
    """Log a line each `every_s` while something happens. Runs until it is cancelled."""
    metrics.take(status())
    line = StatusLine(metrics.kept, time.monotonic())
    while True:
        await asyncio.sleep(every_s)
        metrics.take(status())
        say(line, time.monotonic())


def say(line: StatusLine, now: float) -> None:
    """Log the next line, if there is one; as JSON it has a field for each number."""
    told = line.next(now)
    if told is not None:
        logger.info("%s", told, extra=asdict(told))
