"""Load over HTTP on any server that speaks OpenAI's completions API: TTFT, TPOT, goodput, errors.

Requests come at their own times (open loop), or the next comes when one has ended (closed loop).
Greedy, end of sequence ignored, exact answer lengths. Each request has a thread and a connection of
its own, and is timed from when it was due: a client that is late counts against the server.
"""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from random import Random
from urllib.parse import urlsplit

from octavo.bench.record import percentile
from octavo.errors import ConfigError, EngineError, RequestError
from octavo.simulate.workload import WorkItem

TIMEOUT_S = 3600.0
"""Of one answer: a queue may be long."""
WARM_UP_TOKENS = 8
DATA, END = b"data: ", b"[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Seconds; None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How one request fared. Times count from the start of the run; `error` is empty if it got all
    its tokens."""

    due_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.output_tokens - 1)

    def meets(self, targets: Targets) -> bool:
        return (
            not self.error
            and (targets.ttft_s is None or self.ttft_s <= targets.ttft_s)
            and (targets.tpot_s is None or self.tpot_s <= targets.tpot_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRow:
    """One run of one workload. `goodput_per_s` counts requests without error and within the
    targets; percentiles are those of requests without error."""

    workload: str
    arrivals: str
    requests: int
    errors: int
    first_error: str
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    ttft_target_s: float | None
    tpot_target_s: float | None
    goodput_per_s: float
    goodput_share: float


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask, and the name of the model there. `here`: both ends of a connection have the
    same address, so it runs on this machine."""

    host: str
    port: int
    model: str
    here: bool


def server_at(url: str) -> Server:
    """The server at http://HOST:PORT, with the first model that it lists.

    Raises   RequestError: no server of that API is there.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise RequestError(f"{url} is no address of a server; give http://HOST:PORT")
    try:
        with closing(HTTPConnection(parts.hostname, parts.port or 80, timeout=60)) as connection:
            connection.connect()
            here = connection.sock.getsockname()[0] == connection.sock.getpeername()[0]
            connection.request("GET", "/v1/models")
            answer = json.loads(connection.getresponse().read())
        return Server(parts.hostname, parts.port or 80, answer["data"][0]["id"], here)
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise RequestError(f"no list of models from {url}: {error}; is a server there?") from error


@contextmanager
def own_server(flags: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The address and the process id of a server of this Octavo, started with these flags on a free
    port.

    Raises   ConfigError: it did not start; its own complaint is on standard error.
    """
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                words = [word for word in line.split() if word.startswith("http://")]
                if words:
                    yield words[0], process.pid
                    break
            else:
                raise ConfigError(f"the server did not start: it ended with {process.wait()}")
        finally:
            process.terminate()


def arrivals(items: Sequence[WorkItem], rate: float | None, seed: int = 1) -> list[float]:
    """When each request comes: as the workload says, or by chance, `rate` a second (Poisson)."""
    if rate is None:
        return [item.arrival_s for item in items]
    draw, at_s, found = Random(seed), 0.0, []
    for _ in items:
        at_s += draw.expovariate(rate)
        found.append(at_s)
    return found


def run_open(server: Server, items: Sequence[WorkItem], due: Sequence[float]) -> list[Timing]:
    """Each request when it is due, whatever became of the others."""
    timings: list[Timing] = []
    started = time.monotonic()
    threads = []
    for item, due_s in sorted(zip(items, due, strict=True), key=lambda pair: pair[1]):
        time.sleep(max(0.0, due_s - (time.monotonic() - started)))
        thread = threading.Thread(
            target=lambda i=item, d=due_s: timings.append(timed(server, i, started, d))
        )
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return timings


def run_closed(server: Server, items: Sequence[WorkItem], at_once: int) -> list[Timing]:
    """So many at once, the next when one has ended."""
    waiting: queue.SimpleQueue[WorkItem] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    timings: list[Timing] = []
    started = time.monotonic()

    def work() -> None:
        while True:
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            timings.append(timed(server, item, started, time.monotonic() - started))

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return timings


def warm_up(server: Server, items: Sequence[WorkItem]) -> None:
    """One short request that no other begins like: what comes first is often slow.

    Raises   EngineError: the server does not answer it.
    """
    prompt = items[0].prompt_token_ids[-WARM_UP_TOKENS:][::-1]
    short = WorkItem(prompt_token_ids=prompt, output_len=2)
    if error := timed(server, short, time.monotonic(), 0.0).error:
        raise EngineError(f"the server does not answer: {error}")


def timed(server: Server, item: WorkItem, started: float, due_s: float) -> Timing:
    """Ask, and read the stream to its end."""
    body = {
        "model": server.model,
        "prompt": list(item.prompt_token_ids),
        "max_tokens": item.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        with closing(HTTPConnection(server.host, server.port, timeout=TIMEOUT_S)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise EngineError(f"status {response.status}: {response.read(300)!r}")
            return _read(response, item, lambda: time.monotonic() - started, due_s)
    except (OSError, HTTPException, ValueError, LookupError, EngineError) as error:
        return Timing(due_s=due_s, error=f"{type(error).__name__}: {error}")


def _read(response: HTTPResponse, item: WorkItem, now: Callable[[], float], due_s: float) -> Timing:
    first_s, last_s, usage = 0.0, 0.0, dict[str, int]()
    for line in response:
        if not line.startswith(DATA):
            continue
        if line[len(DATA) :].strip() == END:
            break
        chunk = json.loads(line[len(DATA) :])
        if "error" in chunk:
            raise EngineError(str(chunk["error"]))
        if chunk.get("choices"):
            last_s = now()
            first_s = first_s or last_s
        usage = chunk.get("usage") or usage
    tokens = usage.get("completion_tokens", 0)
    short = "" if tokens == item.output_len else f"{tokens} tokens in place of {item.output_len}"
    return Timing(
        due_s=due_s,
        first_s=first_s,
        last_s=last_s,
        prompt_tokens=len(item.prompt_token_ids),
        output_tokens=tokens,
        error=short,
    )


def serve_row(workload: str, came: str, timings: Sequence[Timing], targets: Targets) -> ServeRow:
    """What the timings of one run say."""
    whole = [timing for timing in timings if not timing.error]
    errors = [timing.error for timing in timings if timing.error]
    wall_s = max((timing.last_s for timing in whole), default=0.0)
    per_s = 1 / wall_s if wall_s else 0.0
    output = sum(timing.output_tokens for timing in whole)
    ttft = [timing.ttft_s for timing in whole]
    tpot = [timing.tpot_s for timing in whole if timing.output_tokens > 1]
    good = sum(timing.meets(targets) for timing in timings)
    return ServeRow(
        workload=workload,
        arrivals=came,
        requests=len(timings),
        errors=len(errors),
        first_error=errors[0] if errors else "",
        prompt_tokens=sum(timing.prompt_tokens for timing in whole),
        output_tokens=output,
        wall_s=wall_s,
        output_tokens_per_s=output * per_s,
        ttft_p50_s=percentile(ttft, 50),
        ttft_p99_s=percentile(ttft, 99),
        tpot_p50_s=percentile(tpot, 50),
        tpot_p99_s=percentile(tpot, 99),
        ttft_target_s=targets.ttft_s,
        tpot_target_s=targets.tpot_s,
        goodput_per_s=good * per_s,
        goodput_share=good / len(timings),
    )
