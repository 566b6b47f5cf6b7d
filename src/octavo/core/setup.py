"""From a setup to a scheduler: the one way in which engine, replay and simulation make theirs."""

from octavo.core.block_manager import BlockManager
from octavo.core.calls import CoreSetup
from octavo.core.prefix_cache import PrefixCache
from octavo.core.scheduler import Scheduler
from octavo.core.swap import HostArena


def scheduler_of(setup: CoreSetup) -> Scheduler:
    """A scheduler with nothing to do, over a pool with nothing in it."""
    size, windows = setup.block_size, setup.windows
    manager = BlockManager(
        blocks=setup.blocks,
        block_size=size,
        windows=windows,
        cache=PrefixCache(block_size=size, windows=windows) if setup.prefix_caching else None,
        slab_tokens=setup.slab_tokens,
        arena=None if setup.swap is None else HostArena(setup.swap),
    )
    return Scheduler(manager, setup.limits, context=setup.context, ceilings=setup.ceilings)
