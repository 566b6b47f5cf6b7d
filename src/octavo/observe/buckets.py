"""Bounds of histograms: those by which vLLM's are shown, and between them those of our own.

A small model answers within what is one bucket of theirs. We count by both sets of bounds at once
(`with_finer`), so that one count serves a dashboard of either.
"""

from collections.abc import Iterator

Bounds = tuple[float, ...]

VLLM_REQUEST_S: Bounds = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
VLLM_FIRST_TOKEN_S: Bounds = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
VLLM_TOKEN_S: Bounds = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
VLLM_STEP_TOKENS: Bounds = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
VLLM_BRANCHES: Bounds = (1, 2, 5, 10, 20)
VLLM_PREEMPTIONS: Bounds = (1, 2, 3, 4, 5, 10, 20)


def with_finer(bounds: Bounds, *finer: float) -> Bounds:
    return tuple(sorted({*bounds, *finer}))


REQUEST_S = with_finer(VLLM_REQUEST_S, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2)
FIRST_TOKEN_S = with_finer(VLLM_FIRST_TOKEN_S, 0.03, 0.05, 0.15, 0.2, 0.3, 0.4)
TOKEN_S = with_finer(VLLM_TOKEN_S, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.015, 0.02, 0.035)
STEP_TOKENS = with_finer(VLLM_STEP_TOKENS, 2, 4)
PREEMPTIONS = with_finer(VLLM_PREEMPTIONS, 0)


def one_two_five(most: int) -> Bounds:
    """The bounds for counts of tokens up to `most`.

    >>> one_two_five(60)
    (1, 2, 5, 10, 20, 50)
    """
    return tuple(_series(most))


def _series(most: int) -> Iterator[int]:
    decade = 1
    while decade <= most:
        yield from (step * decade for step in (1, 2, 5) if step * decade <= most)
        decade *= 10
