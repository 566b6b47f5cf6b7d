"""A crowd of clients for minutes: some hang up at random, some read a byte a second.

    python benchmarks/faults/crowd.py --minutes 5 -- --model demo --kv-cache-memory 256MiB

Starts a server of its own with the flags after `--`. Each client asks again when it has its answer.
Told are errors of those who behave, the memory of front and engine each minute, and whether at the
end every block is free or cached and nothing runs or waits. Memory of the KV pool counts as it is
first written: a pool that is full after a minute shows what else grows.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from kill import engine_of

from octavo.bench.load import own_server

WORDS = [
    "sea",
    "market",
    "brother",
    "storm",
    "bread",
    "engine",
    "moon",
    "ink",
    "harbour",
    "letter",
    "winter",
    "clock",
]
GROWTH_SHARE = 0.03
"""What memory may grow by after the first minute."""


def request_of(draw: random.Random) -> bytes:
    words = " ".join(draw.choices(WORDS, k=draw.randint(5, 60)))
    stream = draw.random() < 0.8
    body: dict[str, object] = {
        "prompt": f"Write about these: {words}.",
        "max_tokens": draw.randint(4, 48),
        "temperature": draw.choice([0, 0.8]),
        "ignore_eos": True,
        "n": draw.choice([1, 1, 1, 2]),
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: crowd\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


class Crowd:
    """What became of the requests of all clients."""

    def __init__(self, url: str, until_s: float, draw: random.Random) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = parts.hostname, parts.port
        self._until_s = until_s
        self._draw = draw
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    async def client(self, *, leaves: bool, slow: bool) -> None:
        while time.monotonic() < self._until_s:
            try:
                await (self._dawdle() if slow else self._ask(leaves))
            except OSError as error:
                if not slow:  # whoever reads too slowly is dropped some time
                    self.errors[repr(error)] += 1
                await asyncio.sleep(0.1)

    async def _ask(self, leaves: bool) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(request_of(self._draw))
            if leaves and self._draw.random() < 0.5:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(), self._draw.random() * 5)
                self.outcomes["left"] += 1
                return
            answer = await reader.read()
        finally:
            writer.close()
        status = answer.split(b" ", 2)[1:2]
        if status != [b"200"]:
            self.errors[repr(answer[:200])] += 1
        elif b'"error"' in answer:
            self.errors[repr(answer[-300:])] += 1
        elif b'"total_tokens"' not in answer:
            self.errors[f"cut off: {answer[-100:]!r}"] += 1
        else:
            self.outcomes["whole"] += 1

    async def _dawdle(self) -> None:
        """A byte a second, with a window as small as the system allows."""
        import socket

        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        plain.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(plain, self._address)
            await loop.sock_sendall(plain, request_of(self._draw))
            while time.monotonic() < self._until_s:
                if not await loop.sock_recv(plain, 1):
                    self.outcomes["dawdled to the end"] += 1
                    return
                await asyncio.sleep(1)
        finally:
            plain.close()


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


async def watch(front: int, engine: int, until_s: float) -> list[tuple[int, int]]:
    """Memory of both each ten seconds."""
    seen = []
    while time.monotonic() < until_s:
        await asyncio.sleep(10)
        seen.append((resident_bytes(front), resident_bytes(engine)))
        print("  MiB", *(f"{one / 2**20:.1f}" for one in seen[-1]), file=sys.stderr)
    return seen


async def at_rest(url: str) -> dict[str, Any]:
    """The server's health once nothing runs or waits."""
    async with httpx.AsyncClient(timeout=30) as http:
        for _ in range(600):
            health: dict[str, Any] = (await http.get(f"{url}/health")).json()
            if health["running"] == health["waiting"] == 0:
                break
            await asyncio.sleep(0.1)
        return health


async def gather(url: str, front: int, arguments: argparse.Namespace) -> int:
    draw = random.Random(arguments.seed)
    until_s = time.monotonic() + 60 * arguments.minutes
    engine = engine_of(front)
    assert engine is not None
    crowd = Crowd(url, until_s, draw)
    kinds = ["slow"] * (arguments.clients // 20) + ["leaves"] * (arguments.clients // 5)
    kinds += ["good"] * (arguments.clients - len(kinds))
    clients = [crowd.client(leaves=kind == "leaves", slow=kind == "slow") for kind in kinds]
    seen, *_ = await asyncio.gather(watch(front, engine, until_s), *clients)
    health = await at_rest(url)
    print(f"clients {len(clients)}: {dict(crowd.outcomes)}, errors {sum(crowd.errors.values())}")
    for error, count in crowd.errors.most_common(5):
        print(f"  {count} × {error}")
    grew = []
    for name, column in zip(("front", "engine"), zip(*seen, strict=True), strict=True):
        after = column[min(5, len(column) - 1) :]
        grew.append(max(after) / after[0] - 1)
        print(f"{name}: {after[0] / 2**20:.1f} MiB after a minute, then at most {grew[-1]:+.1%}")
    lost = health["blocks_total"] - health["blocks_free"] - health["blocks_cached"]
    print(f"at rest: {health}; blocks neither free nor cached: {lost}")
    busy = health["running"] or health["waiting"] or lost
    return int(bool(crowd.errors or busy or max(grew) > GROWTH_SHARE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    arguments = parser.parse_args()
    with own_server(arguments.flags) as (url, front):
        return asyncio.run(gather(url, front, arguments))


if __name__ == "__main__":
    sys.exit(main())
