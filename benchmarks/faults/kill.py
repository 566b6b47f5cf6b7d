"""Kills the engine of a server again and again while streams are open, and compares every answer
with that of an undisturbed run.

    python benchmarks/faults/kill.py --kills 10 --streams 32 -- --model demo

Starts a server of its own with the flags after `--`. Streams are always so many at once; each asks
for another text, drawn with a seed. An outage lasts from a kill to the next token of any stream.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from octavo.bench.load import own_server

TOPICS = ("the sea", "a market", "two brothers", "a storm", "bread", "an engine", "the moon", "ink")


def body_of(number: int, tokens: int) -> dict[str, object]:
    topic = TOPICS[number % len(TOPICS)]
    return {
        "messages": [{"role": "user", "content": f"Story {number}, about {topic}. Begin at once."}],
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class Streams:
    """So many answers at once; what came of each, and when anything came."""

    def __init__(self, url: str, tokens: int) -> None:
        self._url = url
        self._tokens = tokens
        self.texts: dict[int, str] = {}
        self.failures: dict[int, str] = {}
        self.preemptions = 0
        self.came_s: list[float] = []

    async def run(self, numbers: Sequence[int], at_once: int) -> None:
        """Answers to all of these, so many at a time."""
        waiting = iter(numbers)
        limits = httpx.Limits(max_connections=at_once)
        async with httpx.AsyncClient(timeout=600, limits=limits) as http:

            async def work() -> None:
                for number in waiting:
                    try:
                        await self._one(http, number)
                    except (httpx.HTTPError, KeyError, ValueError) as error:
                        self.failures[number] = repr(error)

            await asyncio.gather(*(work() for _ in range(at_once)))

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        text, ended = "", False
        body = body_of(number, self._tokens)
        async with http.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    break
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ValueError(chunk["error"]["message"])
                self.came_s.append(time.monotonic())
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content", "")
                self.preemptions += chunk.get("octavo", {}).get("preemptions", 0)
        if not ended:
            raise ValueError("the stream broke off")
        self.texts[number] = text


def engine_of(server: int) -> int | None:
    """The engine process of a server process."""
    for task in Path(f"/proc/{server}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"octavo.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


async def kill_again_and_again(
    url: str, server: int, streams: Streams, count: int, draw: random.Random, apart_s: float
) -> list[float]:
    """Kills at random moments, so long apart on average; how long each outage was."""
    outages = []
    for _ in range(count):
        await asyncio.sleep(draw.uniform(0.2, 1.8) * apart_s)
        killed = engine_of(server)
        while killed is None:
            await asyncio.sleep(0.05)
            killed = engine_of(server)
        os.kill(killed, signal.SIGKILL)
        at_s, seen = time.monotonic(), len(streams.came_s)
        while engine_of(server) == killed:
            await asyncio.sleep(0.001)
        seen = len(streams.came_s)  # what was on its way before the news of the death
        while len(streams.came_s) == seen:
            await asyncio.sleep(0.005)
        outages.append(streams.came_s[seen] - at_s)
        print(f"  killed {killed}: {outages[-1]:.2f} s", file=sys.stderr)
    return outages


async def measure(url: str, server: int, arguments: argparse.Namespace) -> int:
    draw = random.Random(arguments.seed)
    numbers = range(arguments.requests)
    calm = Streams(url, arguments.tokens)
    started = time.monotonic()
    await calm.run(numbers, arguments.streams)
    calm_s = time.monotonic() - started
    print(f"undisturbed: {len(calm.texts)} answers in {calm_s:.1f} s", file=sys.stderr)
    async with httpx.AsyncClient() as http:
        await http.post(f"{url}/admin/cache/flush")
    stormy = Streams(url, arguments.tokens)
    running = asyncio.create_task(stormy.run(range(10**9), arguments.streams))
    outages = await kill_again_and_again(
        url, server, stormy, arguments.kills, draw, arguments.apart_s
    )
    last = max([*stormy.texts, *stormy.failures, -1])
    while len(stormy.texts) < len(numbers) and not stormy.failures:
        await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    both = calm.texts.keys() & stormy.texts.keys()
    other = [number for number in both if calm.texts[number] != stormy.texts[number]]
    print(f"kills {len(outages)}, streams at once {arguments.streams}, last {last}")
    print(f"answers {len(stormy.texts)}, failed {len(stormy.failures)}, compared {len(both)}")
    print(f"other than undisturbed {len(other)}, preemptions in receipts {stormy.preemptions}")
    print(
        f"outage: median {statistics.median(outages):.2f} s, longest {max(outages):.2f} s, all "
        + " ".join(f"{one:.2f}" for one in outages)
    )
    for number, failure in stormy.failures.items():
        print(f"failed {number}: {failure}")
    return int(bool(other or stormy.failures or not both))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96, help="answers of the undisturbed run")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--apart-s", type=float, default=5.0, help="mean time between two kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    arguments = parser.parse_args()
    with own_server(arguments.flags) as (url, server):
        return asyncio.run(measure(url, server, arguments))


if __name__ == "__main__":
    sys.exit(main())
