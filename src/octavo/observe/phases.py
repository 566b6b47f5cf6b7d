"""The phases of a start, one line of the log each with what it took."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Phases:
    """Tells how long each phase took; the next begins where one ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s = clock()

    def end(self, phase: str) -> None:
        """This is done: "weights packed", say."""
        now = self._clock()
        took_s, self._since_s = now - self._since_s, now
        extra = {"phase": phase, "seconds": round(took_s, 4)}
        logger.info("start-up: %s, %.2f s", phase, took_s, extra=extra)
