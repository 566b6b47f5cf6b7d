"""Streams of an answer, and work that ends when the client goes."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import OctavoError
from octavo.serve.dialect import OPENAI, Dialect

logger = logging.getLogger(__name__)

T = TypeVar("T")
Chunks = AsyncGenerator[msgspec.Struct, None]

SILENCE_S = 15.0
"""How long a stream may be silent, where its dialect has words for "nothing yet": proxies give up
connections on which nothing comes for a minute, and a queue or a prompt may take longer."""

_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes or this call is cancelled.

    Raises  ClientDisconnect, and whatever `work` raises.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def stream_response(receive: Receive, chunks: Chunks, dialect: Dialect = OPENAI) -> Response:
    """The chunks as a response. It begins when the first chunk is there, so that a request which
    the engine refuses still gets a status of its own; or when that takes too long to be silent."""
    first = asyncio.ensure_future(_next(chunks))
    try:
        await while_connected(receive, _begun(first, SILENCE_S if dialect.alive else None))
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await chunks.aclose()
        raise
    return ChunkStream(first, chunks, dialect)


async def _next(chunks: Chunks) -> msgspec.Struct:
    return await anext(chunks)


async def _begun(first: "asyncio.Future[msgspec.Struct]", patience_s: float | None) -> None:
    """Returns when the first chunk is there, or this was waited for it. Raises what that raises."""
    done, _ = await asyncio.wait({first}, timeout=patience_s)
    if done:
        first.result()


class ChunkStream(Response):
    """Chunks as the dialect writes them, then its end. An error after the start is a chunk too.

    Keeps  the chunks are closed, and the request behind them is cancelled, when the client goes.
    """

    def __init__(
        self, first: "asyncio.Future[msgspec.Struct]", chunks: Chunks, dialect: Dialect
    ) -> None:
        super().__init__()
        self._first = first
        self._chunks = chunks
        self._dialect = dialect
        self._sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Nobody is left to be told.
        with suppress(ClientDisconnect):
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        headers = [(b"content-type", self._dialect.media_type), *_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        alive = asyncio.ensure_future(self._stay_alive(send))
        async with aclosing(self._chunks):
            try:
                await self._send_chunk(send, await self._first)
                async for chunk in self._chunks:
                    await self._send_chunk(send, chunk)
            except Exception as error:
                if not isinstance(error, OctavoError):
                    logger.exception("a stream failed")
                await _send_body(send, self._dialect.last_words(error))
            finally:
                alive.cancel()
        await _send_body(send, self._dialect.end, more=False)

    async def _send_chunk(self, send: Send, chunk: msgspec.Struct) -> None:
        self._sent += 1
        await _send_body(send, self._dialect.frame(chunk))

    async def _stay_alive(self, send: Send) -> None:
        """Break each silence that gets too long."""
        while self._dialect.alive:
            sent = self._sent
            await asyncio.sleep(SILENCE_S)
            if self._sent == sent:
                await _send_body(send, self._dialect.alive)


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
