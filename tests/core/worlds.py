"""The small worlds that are searched whole. Each looks at some features beside one another."""

from dataclasses import replace

from tests.core.small_world import VOCABULARY, Steady, World

from octavo.core.budget import Ceilings, Limits
from octavo.core.calls import CoreSetup
from octavo.core.request import Pin, Request, Sampling
from octavo.core.swap import SwapSetup
from octavo.core.windows import Windows
from octavo.simulate.oracle import answer_alone

DRAWN = Sampling(temperature=1.0)


def request(name: str, prompt: tuple[int, ...], max_tokens: int, **fields: object) -> Request:
    return Request(id=name, prompt=prompt, max_tokens=max_tokens, **fields)


def setup(
    blocks: int,
    *,
    block_size: int = 2,
    windows: Windows = (None,),
    host_blocks: int = 0,
    prefix_caching: bool = True,
    **limits: object,
) -> CoreSetup:
    bounds = {"sequences": 3, "tokens": 4, "watermark_blocks": 0, **limits}
    arena = SwapSetup(host_blocks=host_blocks, block_bytes=1, bytes_per_s=2.0, tokens_per_s=1.5)
    return CoreSetup(
        blocks=blocks,
        block_size=block_size,
        windows=windows,
        limits=Limits(**bounds),
        prefix_caching=prefix_caching,
        swap=arena if host_blocks else None,
    )


PRIORITIES = World(
    setup=setup(4, sequences=2),
    requests=(
        request("a", (1, 2, 3), 3),
        request("b", (1, 2, 4), 1),
        request("c", (1, 2, 3), 1, priority=-1),
    ),
    depth=2,
)
"""Three that share a beginning, one of which goes first; two plans in flight."""

BRANCHES = World(
    setup=setup(5),
    requests=(
        request("a", (1, 2, 3), 2, branches=2, sampling=DRAWN),
        request("b", (1, 2, 4), 2, priority=-1),
    ),
    depth=2,
)

SALTS = World(
    setup=setup(5),
    requests=(
        request("a", (1, 2, 3), 2, branches=2, sampling=DRAWN),
        request("b", (1, 2, 3, 4), 1, salt="other"),
        request("c", (1, 2, 3), 1, use_cache=False),
    ),
)

CHUNKS = World(
    setup=setup(5, tokens=2, admission="chunked"),
    requests=(
        request("a", (1, 2, 3, 4, 5), 3),
        request("b", (1, 2, 3, 4), 2),
        request("c", (1, 2, 3), 2, priority=-1),
    ),
)
"""Prompts longer than the budget of a step, admitted for their first chunk."""

PREDICTED = World(
    setup=setup(5, admission="predicted"),
    requests=(
        request("a", (1, 2, 3), 4),
        request("b", (1, 2, 4), 3),
        request("c", (1, 2), 2, priority=-1),
    ),
    cancels=False,
)
"""Room is kept for the longest that each answer may become: nobody yields but for a priority."""

TROUBLES = World(
    setup=setup(5, watermark_blocks=1),
    requests=(
        request("a", (1, 2, 3), 2),
        request("b", (1, 2, 3, 4), 2, priority=-1),
        request("c", (1, 2), 2),
    ),
    troubles=3,
)
"""Any of the rows of a step stop or fail at once."""

GROUPS = World(
    setup=setup(6, windows=(None, None), block_size=2),
    requests=(request("a", (1, 2, 3), 3), request("b", (1, 2, 3, 4), 2, priority=-1)),
    depth=2,
)

WINDOWS = World(
    setup=setup(7, windows=(None, 2), block_size=2),
    requests=(
        request("a", (1, 2, 3), 3, branches=2, sampling=DRAWN),
        request("b", (1, 2, 3, 4, 5), 1, priority=-1),
    ),
    depth=2,
)
"""A layer group that sees two positions beside one that sees all; branches start late."""

TOKENS = World(
    setup=setup(5, block_size=1, tokens=2),
    requests=(request("a", (1, 2), 3), request("b", (1, 3), 2, priority=-1)),
    depth=3,
)
"""Blocks of one token; three plans in flight."""

SWAPS = World(
    setup=setup(4, host_blocks=3, prefix_caching=False),
    requests=(
        request("a", (1, 2, 3), 3),
        request("b", (1, 2, 4), 2),
        request("c", (1, 2, 3), 2, priority=-1),
    ),
    depth=2,
)
"""A full block is swapped, one of a single token computed again; the arena holds three blocks."""

SWAPPED_BRANCHES = World(
    setup=setup(4, host_blocks=9, preemption="swap"),
    requests=(
        request("a", (1, 2, 3), 3, branches=2, sampling=DRAWN),
        request("b", (1, 2, 4), 2, priority=-1),
    ),
    depth=2,
)
"""What is swapped may be shared and cached meanwhile."""

FIRST = request("a", (1, 2, 3), 2, keep=True)
SESSIONS = World(
    setup=setup(4),
    requests=(
        FIRST,
        request("b", (*FIRST.prompt, *answer_alone(FIRST, VOCABULARY)), 1, after="a", keep=True),
        request("c", (1, 2, 3, 4), 2, priority=-1),
    ),
    flushes=True,
    cancels=False,
)
"""The second goes on from what the first left, if that is still held; the third needs the room."""

PINS = World(
    setup=setup(4, pinned_blocks=1, aging_s=5.0),
    requests=(
        request("a", (1, 2, 3), 2, pins=(Pin(2, 5.0),)),
        request("b", (1, 2, 4, 5), 1, pins=(Pin(4, 5.0),)),
        request("c", (1, 2, 3), 3, priority=1),
    ),
    passes_s=10.0,
    cancels=False,
)
"""Pins within a quota, which end when time goes by; who waits then climbs."""

LIMITS = World(
    setup=replace(
        setup(5, sequences=2), ceilings=Ceilings(sequences=2, tokens=4, watermark_blocks=6)
    ),
    requests=(request("a", (1, 2, 3), 3), request("b", (1, 4), 3), request("c", (5,), 1)),
    cancels=False,
    troubles=0,
    limits=(
        Limits(sequences=2, tokens=4, watermark_blocks=0),
        Limits(sequences=1, tokens=1, watermark_blocks=2, admission="chunked"),
        Limits(sequences=2, tokens=1, waiting=1, policy="fcfs", watermark_blocks=0),
    ),
)
"""Limits that change at any moment."""

TENANTS = World(
    setup=setup(4, policy="fair", aging_s=5.0, sequences=2),
    requests=(
        request("a", (1, 2, 3), 3, tenant="x"),
        request("b", (1, 2, 4), 2, tenant="x"),
        request("c", (1, 2, 3), 2, tenant="y"),
    ),
    passes_s=10.0,
    cancels=False,
    troubles=0,
)

TARGETS = World(
    setup=setup(4, policy="slo", aging_s=5.0, ttft_target_s=5.0, tpot_target_s=2.0),
    requests=(
        request("a", (1, 2, 3), 3, tpot_target_s=0.5),
        request("b", (1, 2, 4, 5), 2),
        request("c", (1, 2, 3), 2, priority=1, ttft_target_s=99.0),
    ),
    passes_s=10.0,
    pace=Steady(base_s=0.25, token_s=0.25),
    cancels=False,
)
"""Who is in time at first is late when time has gone by."""

WORLDS = {
    "tenants": TENANTS,
    "targets": TARGETS,
    "limits": LIMITS,
    "sessions": SESSIONS,
    "pins": PINS,
    "priorities": PRIORITIES,
    "branches": BRANCHES,
    "salts": SALTS,
    "chunks": CHUNKS,
    "predicted": PREDICTED,
    "troubles": TROUBLES,
    "groups": GROUPS,
    "windows": WINDOWS,
    "tokens": TOKENS,
    "swaps": SWAPS,
    "swapped branches": SWAPPED_BRANCHES,
}
