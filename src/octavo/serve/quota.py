"""Quotas: how much one key may ask, kept as buckets that fill again as time goes by."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.errors import RateLimited

Clock = Callable[[], float]

MINUTE_S = 60.0
AGAIN_S = 1.0
"""When to try again while too many are under way: nobody knows when one of them ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """How much may be asked; None is no limit. Tokens are those of prompts and answers together."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


NO_LIMITS = Quota()


class Bucket:
    """Holds what a minute allows at most, and fills at that pace.

    What is taken may be more than there is: then it must fill again before anything else.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._most = float(per_minute)
        self._level = self._most
        self._filled_s = now

    def wait_s(self, needed: float, now: float) -> float:
        """How long until `needed` are there; 0 if they are."""
        self._fill(now)
        return max(0.0, (min(needed, self._most) - self._level) * MINUTE_S / self._most)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        passed_s = max(0.0, now - self._filled_s)
        self._level = min(self._most, self._level + passed_s * self._most / MINUTE_S)
        self._filled_s = max(now, self._filled_s)


class Meter:
    """What one key has used of its quota. `name` is what errors call the key."""

    def __init__(self, name: str, quota: Quota, *, clock: Clock = time.monotonic) -> None:
        self.quota = quota
        self._name = name
        self._clock = clock
        self._under_way = 0
        now = clock()
        self._requests = _bucket(quota.requests_per_minute, now)
        self._tokens = _bucket(quota.tokens_per_minute, now)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request, and that it is under way for as long as this lasts.

        Raises   RateLimited: one more is beyond the quota; nothing was counted.
        """
        now, quota = self._clock(), self.quota
        if quota.max_concurrent is not None and self._under_way >= quota.max_concurrent:
            raise self._beyond(f"have {quota.max_concurrent} requests under way at once", AGAIN_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1, now)):
            raise self._beyond(f"use {quota.tokens_per_minute} tokens a minute", wait_s)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1, now):
                raise self._beyond(f"send {quota.requests_per_minute} requests a minute", wait_s)
            self._requests.take(1, now)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def spend(self, tokens: int) -> None:
        """Count tokens of a prompt or an answer. What is under way goes on beyond the quota; the
        next request waits for it."""
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock())

    def _beyond(self, what: str, wait_s: float) -> RateLimited:
        error = RateLimited(
            f"the key {self._name!r} may {what}; try again in {max(1, round(wait_s))} s"
        )
        error.retry_after_s = wait_s
        return error


def _bucket(per_minute: int | None, now: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now)
