"""Virtual token counters: how much service each tenant has had, in weighted tokens.

    a prompt token computed    1        charged when its request is first admitted
    an answer token            2        charged when the step that sampled it is taken in

Who is served next is the tenant that waits and has had the least. While it waits for nothing it
saves nothing up: when it comes back its counter is lifted to the least of those that wait.

Source   Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, algorithm 2.
"""

from collections.abc import Set

PROMPT_WEIGHT = 1
ANSWER_WEIGHT = 2


class ServiceCounters:
    """Keeps    of two tenants that wait all the time, neither is ahead by more than what one
             request, and those of it that run at once, can be charged.
    Cost     O(1) a charge. Tenants that are at or below the least one that waits are forgotten now
             and then: they would be lifted there.
    """

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._last = ""
        self._most = _FEW

    def __len__(self) -> int:
        return len(self._counters)

    def of(self, tenant: str) -> int:
        return self._counters.get(tenant, 0)

    def join(self, tenant: str, waiting: Set[str]) -> None:
        """A request of `tenant` comes to those `waiting`."""
        if tenant in waiting:
            return
        least = min(map(self.of, waiting), default=self.of(self._last))
        self._counters[tenant] = max(self.of(tenant), least)
        if len(self._counters) > self._most:
            self._forget(least, {tenant, self._last, *waiting})

    def leave(self, tenant: str) -> None:
        """A request of `tenant` is admitted."""
        self._last = tenant

    def prompt(self, tenant: str, tokens: int) -> None:
        """Charge so many tokens of a prompt."""
        self._counters[tenant] = self.of(tenant) + PROMPT_WEIGHT * tokens

    def answer(self, tenant: str, tokens: int = 1) -> None:
        """Charge so many tokens of answers."""
        self._counters[tenant] = self.of(tenant) + ANSWER_WEIGHT * tokens

    def _forget(self, least: int, kept: Set[str]) -> None:
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if counter > least or tenant in kept
        }
        self._most = max(_FEW, 2 * len(self._counters))


_FEW = 64
