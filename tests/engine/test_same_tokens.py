"""Contract C8 on the real model: forty mixed requests, and every way to serve them.

Alone, together, in any order of arrival, in steps of 16, 64 or 2,048 tokens, with one thread or
two, from a warm prefix cache, or in a pool so small that requests are preempted again and again:
the tokens and log-probabilities of a request are equal, by ==, for each instruction set here.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.core.block_manager import BlockManager
from octavo.core.budget import Limits
from octavo.core.events import Finished, Token
from octavo.core.invariants import check
from octavo.core.prefix_cache import PrefixCache
from octavo.core.request import Request, Sampling
from octavo.core.scheduler import Scheduler
from octavo.engine.engine import Engine
from octavo.models.loader import Model, load_model
from octavo.ops.native import NativeOps, available_sets
from octavo.runtime.runner import ModelRunner
from octavo.runtime.storage import KVStorage

REQUESTS = 40
MAX_CONTEXT = 256
SEQUENCES = 40
VOCABULARY = 49152
END = 2

Answers = dict[str, tuple[tuple[int, float], ...]]


def mixed_requests(seed: int) -> list[Request]:
    """Greedy and seeded, short and long, some that share a beginning, some that may end early."""
    draw = random.Random(seed)
    preamble = tuple(draw.randrange(100, 49000) for _ in range(50))
    requests = []
    for number in range(REQUESTS):
        own = tuple(
            draw.randrange(100, 49000) for _ in range(draw.choice((1, 3, 15, 16, 17, 40, 90)))
        )
        sampling = draw.choice(
            (
                Sampling(),
                Sampling(temperature=0.8, seed=number),
                Sampling(temperature=1.2, seed=number, top_k=40, top_p=0.9),
                Sampling(temperature=1.0, seed=number, min_p=0.05),
            )
        )
        requests.append(
            Request(
                id=f"r{number}",
                prompt=preamble + own if draw.random() < 0.5 else own,
                max_tokens=draw.choice((1, 4, 17, 30)),
                min_tokens=draw.choice((0, 0, 3)),
                stop_token_ids=frozenset({END}),
                sampling=sampling,
            )
        )
    return requests


class Bench:
    """One loaded model; an engine of any size over it."""

    def __init__(self, path: Path, isa: str) -> None:
        self.path, self.isa = path, isa
        self._models: dict[int, tuple[NativeOps, Model]] = {}

    def model(self, threads: int) -> tuple[NativeOps, Model]:
        if threads not in self._models:
            ops = NativeOps(threads=threads, isa=self.isa)
            model = load_model(
                self.path, ops, 2048, max_rows=SEQUENCES, max_context=MAX_CONTEXT, threads=2
            )
            self._models[threads] = ops, model
        return self._models[threads]

    def engine(
        self, *, tokens: int = 512, threads: int = 2, blocks: int = 800, sequences: int = SEQUENCES
    ) -> Engine:
        ops, model = self.model(threads)
        storage = KVStorage(model.spec.kv_layout(16), blocks)
        storage.poison()
        runner = ModelRunner(model.decoder, ops, storage, rows=sequences, max_context=MAX_CONTEXT)
        manager = BlockManager(
            blocks=blocks, block_size=16, cache=PrefixCache(block_size=16, groups=1)
        )
        return Engine(Scheduler(manager, Limits(sequences=sequences, tokens=tokens)), runner)


def serve(engine: Engine, requests: Sequence[Request], *, each_step: int | None = None) -> Answers:
    """Submit all at once, or `each_step` before each step; return what each request got."""
    waiting, answers = list(requests), {request.id: [] for request in requests}
    ended: set[str] = set()
    while len(ended) < len(requests):
        arriving = len(waiting) if each_step is None else each_step
        for request in waiting[:arriving]:
            assert engine.submit(request) == ()
        del waiting[:arriving]
        for event in engine.step():
            if isinstance(event, Token):
                answers[event.request_id].append((event.token, event.logprob))
            elif isinstance(event, Finished):
                assert event.reason in ("stop", "length"), event
                ended.add(event.request_id)
        check(engine.scheduler)
    return {name: tuple(tokens) for name, tokens in answers.items()}


@pytest.fixture(scope="module", params=available_sets())
def bench(request: pytest.FixtureRequest, demo_model_path: Path) -> Bench:
    return Bench(demo_model_path, request.param)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests(seed=random.SystemRandom().randrange(2**32))


@pytest.fixture(scope="module")
def together(bench: Bench, requests: list[Request]) -> Answers:
    return serve(bench.engine(), requests)


def test_alone(bench: Bench, requests: list[Request], together: Answers) -> None:
    for request in requests[::4]:
        assert serve(bench.engine(), [request]) == {request.id: together[request.id]}


def test_in_any_order_of_arrival(bench: Bench, requests: list[Request], together: Answers) -> None:
    shuffled = random.Random(1).sample(requests, len(requests))
    assert serve(bench.engine(), shuffled, each_step=2) == together


@pytest.mark.parametrize("tokens", [16, 64, 2048])
def test_in_steps_of_any_size(
    bench: Bench, requests: list[Request], together: Answers, tokens: int
) -> None:
    assert (
        serve(bench.engine(tokens=tokens, sequences=min(tokens, SEQUENCES)), requests) == together
    )


def test_with_one_thread(bench: Bench, requests: list[Request], together: Answers) -> None:
    assert serve(bench.engine(threads=1), requests) == together


def test_from_a_warm_prefix_cache(bench: Bench, requests: list[Request], together: Answers) -> None:
    engine = bench.engine()
    assert serve(engine, requests) == together
    again = [replace(request, id=f"again-{request.id}") for request in requests]
    hits_before = engine.status().prefix_tokens_hit
    warm = serve(engine, again)
    assert {name.removeprefix("again-"): answer for name, answer in warm.items()} == together
    assert engine.status().prefix_tokens_hit > hits_before


def test_in_a_pool_that_preempts(bench: Bench, requests: list[Request], together: Answers) -> None:
    engine = bench.engine(blocks=16)
    assert serve(engine, requests) == together
    assert engine.status().preemptions >= 5
