"""Any engine, any traffic: the books balance and every request gets the answer it gets alone."""

from dataclasses import replace
from operator import attrgetter
from random import Random
from typing import Any, get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.core.serving import (
    DRAWN,
    WINDOWS,
    Serving,
    Setup,
    constant_hash,
    random_run,
)
from tests.core.soak import CASES, one_of

from octavo.core.budget import AdmissionRule, Policy, Preemption
from octavo.core.prefix_cache import sha256
from octavo.core.request import Pin, Request, Sampling
from octavo.simulate.oracle import answer_alone

SETUPS = st.builds(
    Setup,
    blocks=st.integers(3, 24),
    block_size=st.sampled_from([1, 2, 4]),
    windows=st.sampled_from(WINDOWS),
    sequences=st.integers(1, 5),
    tokens=st.integers(1, 16),
    watermark_blocks=st.integers(0, 2),
    policy=st.sampled_from(get_args(Policy)),
    aging_s=st.sampled_from([None, 1.0, 20.0]),
    ttft_target_s=st.sampled_from([None, 0.5, 5.0, 20.0]),
    tpot_target_s=st.sampled_from([None, 0.5, 1.5, 4.0]),
    token_s=st.sampled_from([0.0, 0.125]),
    admission=st.sampled_from(get_args(AdmissionRule)),
    pinned_blocks=st.integers(0, 9),
    depth=st.integers(1, 3),
    drafts=st.sampled_from([0, 0, 2, 7]),
    cached=st.booleans(),
    hash_function=st.sampled_from([sha256, constant_hash]),
    vocabulary=st.sampled_from([3, 97]),
    host_blocks=st.sampled_from([0, 2, 9, 60]),
    preemption=st.sampled_from(["auto", "swap", "recompute"]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """`Serving` audits the books after every call; the end of a run must be reached."""

    @initialize(setup=SETUPS)
    def open(self, setup: Setup) -> None:
        self.serving = Serving(setup)

    @rule(
        head=st.integers(0, 8),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        stops=st.frozensets(st.integers(0, 96), max_size=2),
        priority=st.sampled_from([0, 0, -1, 1]),
        tenant=st.sampled_from(["", "a", "b"]),
        salt=st.sampled_from(["", "other"]),
        use_cache=st.booleans(),
        emitted=st.integers(0, 3),
        branches=st.sampled_from([1, 1, 2, 3, 6]),
        sampling=st.sampled_from([Sampling(), DRAWN, DRAWN]),
        keep=st.booleans(),
        pins=st.lists(st.builds(Pin, st.integers(1, 12), st.floats(0, 20)), max_size=2),
    )
    def submit(
        self,
        head: int,
        tail: list[int],
        max_tokens: int,
        min_tokens: int,
        stops: frozenset[int],
        priority: int,
        tenant: str,
        salt: str,
        use_cache: bool,
        emitted: int,
        branches: int,
        sampling: Sampling,
        keep: bool,
        pins: list[Pin],
    ) -> None:
        prompt = tuple(range(1, head + 1)) + tuple(tail)
        request = Request(
            id=f"r{len(self.serving.requests)}",  # branches count too: still a fresh name
            prompt=prompt,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            priority=priority,
            tenant=tenant,
            salt=salt,
            use_cache=use_cache,
            branches=branches,
            sampling=sampling,
            keep=keep,
            pins=tuple(sorted(pins, key=attrgetter("tokens"))),
        )
        self.serving.submit(restarted(request, emitted, self.serving.setup.vocabulary))

    @precondition(lambda self: self.serving.scheduler.holds.sessions)
    @rule(
        data=st.data(),
        share=st.sampled_from([1.0, 1.0, 0.5]),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=4),
        max_tokens=st.integers(1, 12),
        branches=st.sampled_from([1, 1, 3]),
    )
    def go_on(
        self, data: st.DataObject, share: float, tail: list[int], max_tokens: int, branches: int
    ) -> None:
        """From what is held, or a part of it."""
        hold = one_of(data, self.serving.scheduler.holds.sessions)
        self.serving.submit(
            Request(
                id=f"r{len(self.serving.requests)}",
                prompt=(*hold.tokens[: int(len(hold.tokens) * share)], *tail),
                max_tokens=max_tokens,
                salt=hold.context.salt,
                branches=branches,
                keep=True,
                after=hold.id,
            )
        )

    @precondition(lambda self: self.serving.scheduler.holds.sessions)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        hold = one_of(data, list(self.serving.scheduler.holds))
        self.serving.drop(hold.id)

    @rule()
    def flush(self) -> None:
        self.serving.flush()

    @precondition(lambda self: self.serving.live)
    @rule(data=st.data(), alone=st.booleans(), reason=st.sampled_from(["abort", "stop", "timeout"]))
    def cancel(self, data: st.DataObject, alone: bool, reason: str) -> None:
        """A whole request, or one of its branches."""
        request = one_of(data, self.serving.live).request
        self.serving.cancel(request.id, request.sampling.branch if alone else None, reason)

    @precondition(lambda self: self.serving.live)
    @rule(data=st.data(), position=st.integers(0, 20))
    def fail(self, data: st.DataObject, position: int) -> None:
        """From now on the work of one request fails; its neighbours do not notice."""
        live = [sequence.request.id for sequence in self.serving.live]
        name = data.draw(st.sampled_from(live))
        self.serving.oracle.failing = {**self.serving.oracle.failing, name: position}

    @precondition(lambda self: not self.serving.in_flight)
    @rule()
    def break_step(self) -> None:
        self.serving.break_step()

    @rule(
        sequences=st.integers(1, 8),
        tokens=st.integers(1, 24),
        waiting=st.sampled_from([None, 1, 3]),
        others=st.fixed_dictionaries(
            {},
            optional={
                "watermark_blocks": st.integers(0, 3),
                "admission": st.sampled_from(get_args(AdmissionRule)),
                "policy": st.sampled_from(get_args(Policy)),
                "preemption": st.sampled_from(get_args(Preemption)),
                "aging_s": st.sampled_from([None, 1.0, 20.0]),
            },
        ),
    )
    def set_limits(
        self, sequences: int, tokens: int, waiting: int | None, others: dict[str, Any]
    ) -> None:
        """At any moment, with plans in flight: raised or lowered, within the ceilings."""
        most = self.serving.setup.ceilings()
        self.serving.set_limits(
            sequences=min(sequences, most.sequences),
            tokens=min(tokens, most.tokens),
            waiting=waiting,
            **others,
        )

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.serving.step()

    def teardown(self) -> None:
        if hasattr(self, "serving"):
            self.serving.finish()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=CASES)


def restarted(request: Request, emitted: int, vocabulary: int) -> Request:
    """The same request as a restarted engine sees it, when `emitted` tokens had been sent."""
    return replace(request, emitted=answer_alone(request, vocabulary)[:emitted])


def test_any_serving_gives_each_request_the_answer_it_gets_alone(seed: int) -> None:
    """Long random runs, which reach further than the machine above."""
    for run in range(CASES):
        random_run(Random(f"{seed} {run}"))
