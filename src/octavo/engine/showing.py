"""What the engine shows of itself to who looks: the pool with the reasons behind it, and a block.

Made between two steps, when it is asked for; nothing is kept for it.
"""

import time

import msgspec

from octavo.core.view import BlockView, PoolView, SequenceView, view_block, view_pool
from octavo.engine.engine import Engine, EngineStatus
from octavo.errors import InvalidRequest
from octavo.observe.explain import reason
from octavo.observe.lives import Lives, Phase


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """Where a request is, and why."""

    phase: Phase
    reason: str


class PoolShown(msgspec.Struct, frozen=True, kw_only=True):
    """The pool at `at_s` on the engine's clock, and what the engine itself counts then. `running`
    and `waiting` stand beside the sequences of the view. It took the engine `took_s` to make."""

    view: PoolView
    running: tuple[Standing, ...]
    waiting: tuple[Standing, ...]
    status: EngineStatus
    at_s: float
    took_s: float


class BlockShown(msgspec.Struct, frozen=True, kw_only=True):
    """One block, and how long ago it was last given to a request; None if it never was."""

    view: BlockView
    given_ago_s: float | None


def show_pool(engine: Engine, lives: Lives, *, most: int) -> PoolShown:
    """All blocks, all that run, and at most so many of those that wait.

    Cost     that of `view_pool`, and a few microseconds a request.
    """
    started = time.perf_counter()
    view = view_pool(engine.scheduler, most=most)
    return PoolShown(
        view=view,
        running=_standings(lives, view.running),
        waiting=_standings(lives, view.waiting),
        status=engine.status(),
        at_s=engine.now(),
        took_s=time.perf_counter() - started,
    )


def _standings(lives: Lives, sequences: tuple[SequenceView, ...]) -> tuple[Standing, ...]:
    return tuple(Standing(*_standing(lives, sequence)) for sequence in sequences)


def _standing(lives: Lives, sequence: SequenceView) -> tuple[Phase, str]:
    if sequence.behind:
        return "waiting", f"waits for {sequence.behind}, which has the same prompt"
    return reason(lives, sequence.id)


def show_block(engine: Engine, lives: Lives, block: int) -> BlockShown:
    """One block.

    Raises   InvalidRequest: there is no such block.
    """
    total = engine.scheduler.manager.pool.total
    if not 0 <= block < total:
        raise InvalidRequest(
            f"there is no block {block}: they go from 0 to {total - 1}", param="block"
        )
    given_s = lives.given_s(block)
    return BlockShown(
        view=view_block(engine.scheduler, block),
        given_ago_s=None if given_s is None else engine.now() - given_s,
    )
