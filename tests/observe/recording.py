"""Runs of the core with observers beside it, as an engine has them."""

from random import Random
from typing import Any

from tests.core.serving import (
    Serving,
    Setup,
    pinning,
    random_follower,
    random_limits,
    random_setup,
)

from octavo.core.budget import Limits
from octavo.core.calls import (
    Answer,
    Call,
    Cancel,
    Commit,
    CoreSetup,
    Drop,
    Flush,
    Plan,
    SetLimits,
    Submit,
)
from octavo.core.events import CancelReason, Event
from octavo.core.plan import StepPlan, StepResult
from octavo.core.prefix_cache import Context, sha256
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.setup import scheduler_of
from octavo.engine.engine import Observer


class Recorded:
    """A scheduler that tells its observers every call and answer."""

    def __init__(self, scheduler: Scheduler, *observers: Observer) -> None:
        self._scheduler = scheduler
        self._observers = observers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def submit(self, request: Request, now: float) -> tuple[Event, ...]:
        return self._show(Submit(now, request), self._scheduler.submit(request, now))

    def cancel(
        self,
        request_id: str,
        now: float,
        only: int | None = None,
        reason: CancelReason = "abort",
    ) -> tuple[Event, ...]:
        call = Cancel(now, request_id, only, reason)
        return self._show(call, self._scheduler.cancel(request_id, now, only, reason))

    def drop(self, hold: str, now: float) -> tuple[Event, ...]:
        return self._show(Drop(now, hold), self._scheduler.drop(hold, now))

    def flush(self, now: float) -> tuple[Event, ...]:
        return self._show(Flush(now), self._scheduler.flush(now))

    def plan(self, now: float) -> StepPlan | None:
        return self._show(Plan(now), self._scheduler.plan(now))

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> tuple[Event, ...]:
        return self._show(Commit(now, result), self._scheduler.commit(plan, result, now))

    def set_limits(self, limits: Limits) -> Limits:
        return self._show(SetLimits(0.0, limits), self._scheduler.set_limits(limits))

    def _show(self, call: Call, answer: Any) -> Any:
        for observer in self._observers:
            observer.observe(call, answer)
        return answer


class Kept:
    """An observer that keeps all it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Call, Answer]] = []

    def observe(self, call: Call, answer: Answer) -> None:
        self.told.append((call, answer))


def core_setup(setup: Setup) -> CoreSetup:
    return CoreSetup(
        blocks=setup.blocks,
        block_size=setup.block_size,
        limits=setup.limits(),
        ceilings=setup.ceilings(),
        windows=setup.windows,
        prefix_caching=setup.cached,
        swap=setup.swap(),
        context=Context(model="oracle", layout="größe\n"),
    )


def watched(setup: Setup, *observers: Observer) -> Serving:
    """A driver of a core of this setup, with observers beside it."""
    serving = Serving(setup)
    serving.scheduler = Recorded(scheduler_of(core_setup(setup)), *observers)  # type: ignore[assignment]
    return serving


def small_setup(random: Random) -> Setup:
    """Random, with the hash function that the engine uses."""
    while (setup := random_setup(random)).hash_function is not sha256:
        pass
    return setup


def random_run(random: Random, serving: Serving) -> None:
    """Requests that come, fail, are cancelled, refused and preempted under limits that change,
    until nothing is left."""
    names = [f"r{number}" for number in range(random.randint(3, 12))]
    serving.oracle.failing = {
        name: random.randint(1, 20) for name in names if random.random() < 0.1
    }
    for name in names:
        request = random_follower(random, serving, name)
        serving.submit(pinning(random, request) if random.random() < 0.3 else request)
        for _ in range(random.randint(0, 4)):
            serving.step()
            if random.random() < 0.1:
                serving.cancel(
                    random.choice(names), reason=random.choice(["abort", "stop", "timeout"])
                )
        if random.random() < 0.1:
            serving.drop(random.choice(names))
        if random.random() < 0.1:
            serving.flush()
        if random.random() < 0.1:
            serving.set_limits(**random_limits(random, serving.setup))
    serving.finish()
