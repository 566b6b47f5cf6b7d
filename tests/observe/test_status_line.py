"""The status line says what happened since the one before, and nothing when nothing did."""

from dataclasses import replace

from tests.serve.scripted import IDLE

from octavo.engine.engine import EngineStatus
from octavo.observe.status import Kept
from octavo.observe.status_line import Line, StatusLine


class Watched:
    """A status line beside an engine whose status a test sets."""

    def __init__(self, status: EngineStatus) -> None:
        self.kept = Kept()
        self.kept.take(status)
        self.line = StatusLine(self.kept, 100.0)
        self.now = 100.0

    def after(self, seconds: float, status: EngineStatus) -> Line | None:
        self.now += seconds
        self.kept.take(status)
        return self.line.next(self.now)


def test_nothing_is_said_while_nothing_happens() -> None:
    watched = Watched(IDLE)
    assert watched.after(10, IDLE) is None
    assert watched.after(10, replace(IDLE, blocks_free=50, blocks_cached=40)) is None


def test_rates_are_those_since_the_line_before() -> None:
    watched = Watched(IDLE)
    busy = replace(
        IDLE,
        running=12,
        waiting=3,
        prompt_tokens=IDLE.prompt_tokens + 1200,
        tokens_sampled=IDLE.tokens_sampled + 3405,
        prefix_tokens_queried=IDLE.prefix_tokens_queried + 200,
        prefix_tokens_hit=IDLE.prefix_tokens_hit + 90,
        preemptions=IDLE.preemptions + 2,
        blocks_owned=60,
        blocks_free=10,
    )
    assert str(watched.after(10, busy)) == (
        "running 12, waiting 3, in 120 tokens/s, out 340 tokens/s, pool 60%, cache hits 45%,"
        " preemptions 2"
    )
    still = watched.after(5, replace(busy, tokens_sampled=busy.tokens_sampled + 50))
    assert still is not None
    assert (still.prompt_tokens_per_s, still.completion_tokens_per_s) == (0, 10)
    assert (still.prefix_cache_hit_ratio, still.preemptions) == (None, 0)


def test_what_came_and_went_between_two_lines_is_told_once() -> None:
    watched = Watched(IDLE)
    done = replace(IDLE, tokens_sampled=IDLE.tokens_sampled + 7)
    told = watched.after(10, done)
    assert told is not None
    assert (told.running, told.completion_tokens_per_s) == (0, 0.7)
    assert watched.after(10, done) is None


def test_another_engine_is_told_and_its_counts_go_on() -> None:
    watched = Watched(IDLE)
    fresh = replace(IDLE, started_s=50.0, tokens_sampled=20, failed_steps=1)
    told = watched.after(10, fresh)
    assert told is not None
    assert told.completion_tokens_per_s == 2.0
    assert str(told).endswith("failed steps 1, engine restarts 1")
    assert watched.after(10, fresh) is None


def test_a_clock_that_stands_still_divides_by_nothing() -> None:
    watched = Watched(IDLE)
    assert watched.after(0, replace(IDLE, tokens_sampled=IDLE.tokens_sampled + 1)) is not None
