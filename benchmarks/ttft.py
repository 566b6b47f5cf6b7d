"""What HTTP and the second process add to the time to the first token, one request at a time.

    python benchmarks/ttft.py --model demo --rounds 200

The same prompt is asked in turns: of an engine in this process, and of a server over a connection
that stays open, and over a new one each time. The prompt is in the prefix cache of both, so that
the first token costs a step of one position and what is around it shows.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

from octavo import LLM, SamplingParams
from octavo.bench.load import own_server

PROMPT = "Once upon a time, in a small town by the sea, there lived an old printer. " * 4
TOKENS = 2
PATH = "/v1/completions"


def offline(llm: LLM) -> float:
    """Seconds to the first piece of an answer."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    began_s = time.perf_counter()
    answer = llm.stream(PROMPT, params)
    next(answer)
    took_s = time.perf_counter() - began_s
    for _ in answer:
        pass
    return took_s


def over(connection: HTTPConnection) -> float:
    """Seconds to the first event of a stream."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    began_s = time.perf_counter()
    connection.request("POST", PATH, json.dumps(body | {"stream": True}), headers)
    response = connection.getresponse()
    assert response.readline().startswith(b"data: {"), response.status
    took_s = time.perf_counter() - began_s
    response.read()
    return took_s


def connected(address: Callable[[], HTTPConnection]) -> float:
    """The same, over a connection of its own."""
    with closing(address()) as connection:
        return over(connection)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    arguments = parser.parse_args()
    memory = ["--kv-cache-memory", "64MiB"]
    llm = LLM(arguments.model, kv_cache_memory="64MiB")
    with own_server(["--model", arguments.model, *memory, *arguments.flags]) as (url, _):
        parts = urlsplit(url)

        def address() -> HTTPConnection:
            assert parts.hostname is not None
            return HTTPConnection(parts.hostname, parts.port, timeout=60)

        with closing(address()) as kept:
            ways = {
                "offline": lambda: offline(llm),
                "HTTP": lambda: over(kept),
                "HTTP, new connection": lambda: connected(address),
            }
            times: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(arguments.rounds + 10):
                for name, ask in ways.items():
                    took_s = ask()
                    if number >= 10:
                        times[name].append(took_s)
    base_s = statistics.median(times["offline"])
    for name, took in times.items():
        middle_s = statistics.median(took)
        p90_s = statistics.quantiles(took, n=10)[-1]
        print(
            f"{name:21} median {1e3 * middle_s:7.2f} ms, 90 % within {1e3 * p90_s:7.2f} ms,"
            f" added {1e3 * (middle_s - base_s):+6.2f} ms"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
