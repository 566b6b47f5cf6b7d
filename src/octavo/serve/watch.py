"""The watch: pictures of the pool for all who look, each taken once.

The engine is asked only while somebody waits for a newer picture than they have, at most every
`LEAST_S`, and never for more than a hundredth of its time. While nothing happens it is left alone.
While the server drains nobody waits here: that would hold up its end.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from octavo.engine.engine import EngineStatus
from octavo.engine.showing import PoolShown

LEAST_S = 0.25
"""From one picture to the next, at least."""
REST_S = 5.0
"""At most, although nothing happens."""
SHARE = 0.01
"""Of the engine's time, at most."""


class Picture:
    """The pool once, with a number that rises. Its forms are made when they are first wanted."""

    def __init__(self, number: int, shown: PoolShown) -> None:
        self.number = number
        self.shown = shown
        self._forms: dict[object, asyncio.Task[bytes]] = {}

    async def form(self, make: Callable[[int, PoolShown], bytes]) -> bytes:
        """What `make` gives for it, made once, in a thread beside the event loop."""
        if make not in self._forms:
            made = asyncio.to_thread(make, self.number, self.shown)
            self._forms[make] = asyncio.create_task(made)
        return await asyncio.shield(self._forms[make])


class Watch:
    """Asks the engine by `ask`; `status` is what is known of it without asking, and `draining` that
    the server is about to end."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[PoolShown]],
        status: Callable[[], EngineStatus],
        draining: Callable[[], bool] = lambda: False,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._ask = ask
        self._status = status
        self._draining = draining
        self._clock = clock
        self._sleep = sleep
        self._latest: Picture | None = None
        self._taken_s = 0.0
        self._next: asyncio.Task[Picture] | None = None

    async def picture(self, after: int = 0) -> Picture:
        """The latest picture, or the next one if that is not newer than the one numbered `after`.

        While the server drains that is one which is not old, be it newer or not.

        Raises   EngineStopped.
        """
        latest, age_s, draining = self._latest, self._clock() - self._taken_s, self._draining()
        fresh = age_s < (LEAST_S if draining else REST_S)
        if latest is not None and fresh and (draining or latest.number > after):
            return latest
        if self._next is None or self._next.done():
            self._next = asyncio.create_task(self._take())
        return await asyncio.shield(self._next)

    async def _take(self) -> Picture:
        latest = self._latest
        if latest is not None:
            await self._pause(latest.shown)
        shown = await self._ask()
        self._latest = Picture(1 if latest is None else latest.number + 1, shown)
        self._taken_s = self._clock()
        return self._latest

    async def _pause(self, before: PoolShown) -> None:
        """Until it is time for another picture, and something has happened since this one."""
        least_s = self._taken_s + max(LEAST_S, before.took_s / SHARE)
        most_s = max(least_s, self._taken_s + REST_S)
        while not self._draining():
            now, happened = self._clock(), self._status() != before.status
            rest_s = (least_s if happened else most_s) - now
            if rest_s <= 0:
                return
            await self._sleep(min(rest_s, LEAST_S))
