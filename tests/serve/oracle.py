"""A server around a real engine whose model is the oracle; each byte is a token."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.applications import Starlette
from tests.serve.scripted import byte_tokenizer, serving

from octavo.core.budget import Limits
from octavo.core.calls import CoreSetup
from octavo.core.plan import Runner
from octavo.core.setup import scheduler_of
from octavo.engine.client import AsyncClient
from octavo.engine.door import Door
from octavo.engine.engine import Engine
from octavo.engine.thread import EngineThread
from octavo.observe.lives import Lives
from octavo.serve.app import create_app
from octavo.serve.service import ServeSettings, Service
from octavo.simulate.oracle import OracleRunner

SIZE, BLOCKS = 16, 64


@dataclass
class OracleServed:
    url: str
    client: AsyncClient
    engine: Engine
    service: Service
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    """Runs something on the server's own event loop."""


@contextmanager
def oracle_server(
    *,
    limits: Limits | None = None,
    max_model_len: int = 256,
    blocks: int = BLOCKS,
    wrap: Callable[[Runner], Runner] = lambda oracle: oracle,
    clock: Callable[[], float] = time.monotonic,
    send_buffer: int = 0,
    **settings: object,
) -> Iterator[OracleServed]:
    """`wrap` may put something around the oracle."""
    tokenizer, lives = byte_tokenizer(), Lives()
    limits = limits or Limits(sequences=4, tokens=64, pinned_blocks=8)
    setup = CoreSetup(blocks=blocks, block_size=SIZE, limits=limits)
    oracle = OracleRunner(blocks=blocks, block_size=SIZE, vocabulary=60)
    engine = Engine(scheduler_of(setup), wrap(oracle), clock=clock, observers=[lives])
    client = AsyncClient(EngineThread(engine, lives))
    door = Door(tokenizer, max_model_len=max_model_len, vocab_size=tokenizer.vocab_size)
    known = ServeSettings(model_names=("o",), version="0")
    app = create_app(client, door, replace(known, **settings))  # type: ignore[arg-type]

    loops: list[asyncio.AbstractEventLoop] = []

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loops.append(asyncio.get_running_loop())
        await client.start()
        yield
        await client.close()

    app.router.lifespan_context = lifespan
    with serving(app, send_buffer=send_buffer) as url:
        yield OracleServed(
            url,
            client,
            engine,
            app.state.service,
            lambda work: asyncio.run_coroutine_threadsafe(work, loops[0]).result(60),
        )
