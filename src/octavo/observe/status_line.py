"""The status line: what a server did since the line before, for who watches its log."""

from dataclasses import dataclass

from octavo.observe.status import Kept, ratio

EVERY_S = 10.0
"""How often there is one, while something happens."""

_COUNTED = (
    "prompt_tokens",
    "tokens_sampled",
    "preemptions",
    "prefix_tokens_queried",
    "prefix_tokens_hit",
    "admissions",
    "failed_steps",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Rates and ratios are those since the line before; None where there is nothing to divide."""

    running: int
    waiting: int
    prompt_tokens_per_s: float
    completion_tokens_per_s: float
    kv_pool_occupancy: float
    prefix_cache_hit_ratio: float | None
    preemptions: int
    failed_steps: int
    engine_restarts: int

    def __str__(self) -> str:
        hits = self.prefix_cache_hit_ratio
        parts = [
            f"running {self.running}",
            f"waiting {self.waiting}",
            f"in {self.prompt_tokens_per_s:,.0f} tokens/s",
            f"out {self.completion_tokens_per_s:,.0f} tokens/s",
            f"pool {self.kv_pool_occupancy:.0%}",
            f"cache hits {'none asked' if hits is None else f'{hits:.0%}'}",
            f"preemptions {self.preemptions}",
        ]
        if self.failed_steps:
            parts.append(f"failed steps {self.failed_steps}")
        if self.engine_restarts:
            parts.append(f"engine restarts {self.engine_restarts}")
        return ", ".join(parts)


class StatusLine:
    """Makes the next line from the status that metrics keep, if there is anything to tell."""

    def __init__(self, kept: Kept, now: float) -> None:
        self._kept = kept
        self._now = now
        self._totals = self._read()
        self._restarts = kept.restarts

    def next(self, now: float) -> Line | None:
        """The line of the time since the one before; None while nothing runs, waits or changed."""
        kept, before, passed_s = self._kept, self._totals, max(now - self._now, 1e-9)
        self._now, self._totals = now, self._read()
        restarts, self._restarts = kept.restarts - self._restarts, kept.restarts
        since = {field: total - before[field] for field, total in self._totals.items()}
        running, waiting = (int(kept.gauges.get(name, 0)) for name in ("running", "waiting"))
        if not (running or waiting or restarts or any(since.values())):
            return None
        queried = since["prefix_tokens_queried"]
        return Line(
            running=running,
            waiting=waiting,
            prompt_tokens_per_s=round(since["prompt_tokens"] / passed_s, 1),
            completion_tokens_per_s=round(since["tokens_sampled"] / passed_s, 1),
            kv_pool_occupancy=round(kept.occupancy, 4),
            prefix_cache_hit_ratio=round(ratio(since["prefix_tokens_hit"], queried), 4)
            if queried
            else None,
            preemptions=int(since["preemptions"]),
            failed_steps=int(since["failed_steps"]),
            engine_restarts=restarts,
        )

    def _read(self) -> dict[str, float]:
        return {field: self._kept.total(field) for field in _COUNTED}
