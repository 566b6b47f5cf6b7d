"""Progress: a line on standard error that says how many answers there are, and how fast."""

import sys
import time

WIDTH = 30
EVERY_S = 0.1


class Progress:
    """A bar while it is entered, where standard error is a terminal. Elsewhere nothing, or a plain
    line each `plain_every_s`.

    Set or add to `total`, `done`, `errors` and `tokens`, then `update`. `total` is None where
    nobody knows it.
    """

    def __init__(
        self, total: int | None = None, *, shown: bool = True, plain_every_s: float | None = None
    ) -> None:
        self.total = total
        self.done = 0
        self.errors = 0
        self.tokens = 0
        self._bar_shown = shown and sys.stderr.isatty()
        self._every_s = EVERY_S if self._bar_shown else plain_every_s if shown else None
        self._started_s = self._drawn_s = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar_shown:
            self.update(always=True)
            sys.stderr.write("\n")

    def update(self, *, always: bool = False) -> None:
        """Draw it, if it was not drawn a moment ago."""
        now = time.monotonic()
        if self._every_s is None or (now - self._drawn_s < self._every_s and not always):
            return
        self._drawn_s = now
        line = self._numbers(now)
        sys.stderr.write(f"\r{self._bar()}{line} " if self._bar_shown else f"{line}\n")
        sys.stderr.flush()

    def _bar(self) -> str:
        if self.total is None:
            return ""
        filled = WIDTH * min(self.done, self.total) // max(self.total, 1)
        return "█" * filled + "·" * (WIDTH - filled) + " "

    def _numbers(self, now: float) -> str:
        rate = self.tokens / max(now - self._started_s, 1e-9)
        of = "" if self.total is None else f"/{self.total}"
        errors = f", {self.errors} errors" if self.errors else ""
        return f"{self.done}{of} answers{errors}, {rate:.0f} tokens/s"
