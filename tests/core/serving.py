"""Serving: a scheduler and the oracle, with plans in flight between them, audited at every step."""

from collections import deque
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, get_args

from tests.core.audit import check_pins, check_plan, check_told
from tests.core.beams import beams_alone
from tests.core.contents import check_contents

from octavo.core.block_manager import BlockManager
from octavo.core.budget import AdmissionRule, Ceilings, Limits, Policy, Preemption
from octavo.core.events import (
    CancelReason,
    Decision,
    Event,
    Finished,
    PromptScored,
    Refused,
    Score,
    Token,
)
from octavo.core.invariants import check
from octavo.core.plan import RowFailed, StepPlan, StepResult
from octavo.core.prefix_cache import Context, HashFunction, PrefixCache, sha256
from octavo.core.request import Grammar, Penalty, Pin, Request, Sampling
from octavo.core.scheduler import Scheduler
from octavo.core.swap import HostArena, SwapSetup
from octavo.core.windows import Windows
from octavo.simulate.oracle import OracleRunner, answer_alone


def constant_hash(content: bytes) -> bytes:
    """The worst hash there is: every key is the same."""
    return b"same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Sizes of one engine."""

    blocks: int = 64
    block_size: int = 4
    windows: Windows = (None,)
    sequences: int = 8
    tokens: int = 64
    watermark_blocks: int = 1
    waiting: int | None = None
    waiting_tokens: int | None = None
    policy: Policy = "priority"
    aging_s: float | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    token_s: float = 0.0
    """How much longer a step takes for each token that it computes."""
    admission: AdmissionRule = "full"
    pinned_blocks: int = 0
    depth: int = 1
    drafts: int = 0
    cached: bool = True
    hash_function: HashFunction = sha256
    vocabulary: int = 97
    host_blocks: int = 0
    preemption: Preemption = "auto"

    def swap(self) -> SwapSetup | None:
        """A block of `block_size` tokens there and back takes as long as computing two tokens."""
        if not self.host_blocks:
            return None
        return SwapSetup(
            host_blocks=self.host_blocks, block_bytes=1000, bytes_per_s=1e5, tokens_per_s=100.0
        )

    def manager(self) -> BlockManager:
        cache = None
        if self.cached:
            cache = PrefixCache(
                block_size=self.block_size, windows=self.windows, hash_function=self.hash_function
            )
        swap = self.swap()
        return BlockManager(
            blocks=self.blocks,
            block_size=self.block_size,
            windows=self.windows,
            cache=cache,
            arena=None if swap is None else HostArena(swap),
        )

    def limits(self) -> Limits:
        return Limits(
            sequences=self.sequences,
            tokens=self.tokens,
            watermark_blocks=self.watermark_blocks,
            waiting=self.waiting,
            waiting_tokens=self.waiting_tokens,
            policy=self.policy,
            aging_s=self.aging_s,
            drafts=self.drafts,
            ttft_target_s=self.ttft_target_s,
            tpot_target_s=self.tpot_target_s,
            admission=self.admission,
            pinned_blocks=self.pinned_blocks,
            preemption=self.preemption,
        )

    def ceilings(self) -> Ceilings:
        """There is some room to raise limits."""
        return Ceilings(
            sequences=self.sequences + 3, tokens=self.tokens + 8, watermark_blocks=self.blocks
        )

    def oracle(self) -> OracleRunner:
        return OracleRunner(
            blocks=self.blocks,
            block_size=self.block_size,
            windows=self.windows,
            vocabulary=self.vocabulary,
        )


WINDOWS: list[Windows] = [(None,), (None,), (None, None), (None, 5), (1, 7, None), (3,), (8, 24)]
"""Of layer groups: full ones, sliding ones, both."""


def random_setup(random: Random) -> Setup:
    """Small, so that pools run dry, budgets end and prefixes are evicted all the time."""
    return Setup(
        blocks=random.randint(3, 30),
        block_size=random.choice([1, 2, 4]),
        windows=random.choice(WINDOWS),
        sequences=random.randint(1, 6),
        tokens=random.randint(1, 20),
        watermark_blocks=random.randint(0, 2),
        admission=random.choice(get_args(AdmissionRule)),
        policy=random.choice(get_args(Policy)),
        aging_s=random.choice([None, None, 1.0, 20.0]),
        pinned_blocks=random.choice([0, random.randint(1, 9)]),
        ttft_target_s=random.choice([None, 0.5, 5.0, 20.0]),
        tpot_target_s=random.choice([None, 0.5, 1.5, 4.0]),
        token_s=random.choice([0.0, 0.125]),
        depth=random.randint(1, 3),
        drafts=Random(hash(random.getstate()[1])).choice([0, 0, 1, 3, 9]),
        cached=random.random() < 0.8,
        hash_function=random.choice([sha256, sha256, constant_hash]),
        vocabulary=random.choice([3, 97]),
        host_blocks=random.choice([0, 3, 12, 60]),
        preemption=random.choice(["auto", "swap", "swap", "recompute"]),
    )


DRAWN = Sampling(temperature=1.0)
LOOKS_BACK = Sampling(temperature=1.0, penalty=Penalty(presence=1.0))
"""With it the oracle answers each branch differently; without it all are equal."""
RUNS = Sampling(temperature=1.0, grammar=Grammar("lark", "of the oracle"))
"""With it the oracle gives several tokens at once, and ends an answer before its time."""


def prompt(random: Random, length: int) -> tuple[int, ...]:
    """Of tokens that no answer has, and that no two prompts have in common: nothing is found in
    the cache by chance, so that tests may count."""
    return tuple(random.choices(range(1000, 10**9), k=length))


def random_request(random: Random, name: str) -> Request:
    """Of few different beginnings, so that prefixes meet."""
    start = random.choice([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9], [5]])
    tokens = start[: random.randint(1, 8)] + random.choices(range(6), k=random.randint(0, 8))
    return Request(
        id=name,
        prompt=tuple(tokens),
        max_tokens=random.randint(1, 12),
        min_tokens=random.randint(0, 3),
        stop_token_ids=frozenset(random.choices(range(97), k=random.randint(0, 2))),
        priority=random.choice([0, 0, 0, 1, -1]),
        salt=random.choice(["", "", "other"]),
        use_cache=random.random() < 0.9,
        branches=random.choice([1, 1, 1, 2, 3, 7]),
        tenant=random.choice(["", "", "a", "b"]),
        sampling=random.choice(
            [Sampling(), DRAWN, LOOKS_BACK, RUNS, Sampling(temperature=1.0, branch=2)]
        ),
        keep=random.random() < 0.2,
        after=random.choice([None, None, f"r{random.randint(0, 9)}"]),
        prompt_logprobs=random.choice([None, None, None, None, 0]),
    )


def random_follower(random: Random, serving: "Serving", name: str) -> Request:
    """One that goes on from a hold, or nearly; or any, when there is none."""
    request, holds = random_request(random, name), serving.scheduler.holds.sessions
    if not holds:
        return request
    hold = random.choice(holds)
    tokens = hold.tokens[: random.choice([len(hold.tokens), random.randint(0, len(hold.tokens))])]
    tail = tuple(random.choices(range(6), k=random.randint(1, 4)))
    salt = random.choice([hold.context.salt, hold.context.salt, "third"])
    return replace(request, prompt=(*tokens, *tail), after=hold.id, salt=salt)


def pinning(random: Random, request: Request) -> Request:
    """The same request, which asks for a pin."""
    if not request.use_cache:
        return request
    ends = sorted(random.choices(range(1, 21), k=random.choice([1, 1, 2])))
    return replace(request, pins=tuple(Pin(end, float(random.randint(0, 40))) for end in ends))


def random_limits(random: Random, setup: Setup) -> dict[str, Any]:
    """Some limits changed, up or down, within the ceilings."""
    most = setup.ceilings()
    changes: dict[str, Any] = {
        "sequences": random.randint(1, most.sequences),
        "tokens": random.randint(1, most.tokens),
        "watermark_blocks": random.randint(0, 3),
        "waiting": random.choice([None, 1, 4]),
        "pinned_blocks": random.randint(0, setup.pinned_blocks),
        "admission": random.choice(get_args(AdmissionRule)),
        "policy": random.choice(get_args(Policy)),
        "preemption": random.choice(get_args(Preemption)),
        "aging_s": random.choice([None, 1.0, 20.0]),
        "ttft_target_s": random.choice([None, 0.5, 20.0]),
        "tpot_target_s": random.choice([None, 0.5, 4.0]),
    }
    return {name: changes[name] for name in random.sample(sorted(changes), random.randint(1, 4))}


def branches_of(request: Request) -> list[tuple[str, Request]]:
    """Each branch as a request of its own, under the name that decisions give it."""
    return [
        (f"{request.id}#{number}" if number else request.id, own)
        for number, own in enumerate(request.split())
    ]


def _work(request: Request) -> int:
    """How many positions it takes to serve a branch: of a beam perhaps all again at each token."""
    length = len(request.prompt) + request.max_tokens
    return length if request.beams is None else length * (1 + request.max_tokens)


@dataclass(slots=True)
class Serving:
    """Drives a scheduler as an engine does: plans go to the oracle in order, `depth` ahead."""

    setup: Setup = field(default_factory=Setup)
    scheduler: Scheduler = field(init=False)
    oracle: OracleRunner = field(init=False)
    in_flight: deque[StepPlan] = field(default_factory=deque)
    plans: list[StepPlan] = field(default_factory=list)
    requests: dict[str, Request] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """By the names that decisions give to branches."""
    scored: dict[str, list[Score]] = field(default_factory=dict)
    endings: dict[str, Finished | Refused] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    """Whose answers the caller ended."""
    told: int = 0
    """Tokens of answers."""
    now: float = 0.0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.setup.manager(),
            self.setup.limits(),
            context=Context(model="oracle"),
            ceilings=self.setup.ceilings(),
        )
        self.oracle = self.setup.oracle()

    @property
    def decisions(self) -> list[Decision]:
        return [decision for plan in self.plans for decision in plan.decisions]

    def of(self, kind: type, request_id: str | None = None) -> list[Decision]:
        """Every decision of one kind so far, about one request or all."""
        found = [decision for decision in self.decisions if isinstance(decision, kind)]
        return [d for d in found if request_id is None or d.request_id == request_id]

    def submit(self, *requests: Request) -> None:
        for request in requests:
            for name, own in branches_of(request):
                self.requests[name] = own
                self.tokens[name] = list(request.emitted)
                self.scored[name] = []
            self._take(self.scheduler.submit(request, self.now))
            check(self.scheduler)

    def cancel(
        self, request_id: str, only: int | None = None, reason: CancelReason = "abort"
    ) -> None:
        events = self.scheduler.cancel(request_id, self.now, only, reason)
        if reason == "stop":
            self.stopped |= {name for event in events for name in self._names(event)}
        self._take(events)
        check(self.scheduler)

    def drop(self, hold: str) -> None:
        self._take(self.scheduler.drop(hold, self.now))
        check(self.scheduler)

    def flush(self) -> None:
        self._take(self.scheduler.flush(self.now))
        check(self.scheduler)
        assert not self.scheduler.manager.pool.cached

    def set_limits(self, **changes: Any) -> None:
        self.scheduler.set_limits(replace(self.scheduler.limits, **changes))
        check(self.scheduler)

    def launch(self) -> StepPlan | None:
        """Plan one step and put it in flight."""
        self.now += 1
        plan = self.scheduler.plan(self.now)
        check(self.scheduler)
        check_pins(self.scheduler, self.now)
        if plan is not None:
            check_plan(self.scheduler, plan)
            self.plans.append(plan)
            self.in_flight.append(plan)
        check_told(self.scheduler, self.plans)
        return plan

    def land(self) -> None:
        """Carry out and commit the oldest plan in flight."""
        plan = self.in_flight.popleft()
        self.now += self.setup.token_s * sum(span.stop - span.start for span in plan.spans)
        self._take(self.scheduler.commit(plan, self.oracle.execute(plan), self.now))
        check(self.scheduler)
        if not self.in_flight:
            check_contents(self.scheduler, self.oracle)

    def break_step(self, *, without_moves: bool = True) -> None:
        """Plan one step, of which nothing is carried out: its rows fail, nothing is moved. Only if
        it has moves, unless those `without_moves` break too."""
        assert not self.in_flight, "the steps after a broken one would miss what it was to do"
        plan = self.launch()
        if plan is not None and (plan.moves or without_moves):
            self.in_flight.remove(plan)
            failed = tuple(RowFailed(span.row, "the step broke") for span in plan.spans)
            self._take(self.scheduler.commit(plan, StepResult(plan.id, failed), self.now))
            check(self.scheduler)

    def step(self) -> StepPlan | None:
        plan = self.launch()
        assert plan is not None or self.in_flight or self.scheduler.idle, "nothing can move"
        if self.in_flight and (plan is None or len(self.in_flight) >= self.setup.depth):
            self.land()
        return plan

    def finish(self) -> None:
        """Run until nothing is left, within the steps that suffice if all were served in turn."""
        preemptions = 2 + self.setup.blocks.bit_length()
        before = {sequence.id: sequence.preemptions for sequence in self.live}
        work = sum(_work(request) for request in map(self._request, before))
        bound = (1 + preemptions) * (work + self.setup.depth) + 2 * self.setup.depth
        seen = list(self.live)
        while not self.scheduler.idle:
            assert bound > 0, f"{self.scheduler.running} and {self.scheduler.waiting} go on"
            bound -= 1
            self.step()
        for sequence in seen:
            if sequence.company is not None:
                continue  # its beams take turns when the pool does not hold all of them
            assert sequence.preemptions - before[sequence.id] <= preemptions, sequence.id
        self.assert_at_rest()

    @property
    def live(self) -> tuple:
        return (*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.held)

    def assert_at_rest(self) -> None:
        pool, arena = self.scheduler.manager.pool, self.scheduler.manager.arena
        assert pool.available + pool.yielding == pool.total
        assert arena is None or arena.used == 0
        assert self.scheduler.holds.pinned_blocks <= self.setup.pinned_blocks
        assert self.endings.keys() == self.requests.keys()
        assert self.scheduler.counters.tokens_sampled == self.told
        for name in self.requests:
            self.assert_answer(name)

    def assert_answer(self, name: str) -> None:
        """What was sent is what a request of this one branch gets alone: all of it, or a head if
        it was cut off."""
        request = self.requests[name]
        ending, sent = self.endings[name], tuple(self.tokens[name])
        alone = self._alone(name)
        whole = isinstance(ending, Finished) and ending.reason in ("stop", "length")
        if whole and name not in self.stopped:
            assert sent == alone
            assert ending.receipt.completion_tokens == len(sent)
            assert ending.receipt.prompt_tokens == (0 if "#" in name else len(request.prompt))
            if request.sampling.grammar is None:
                assert (ending.stop_id is not None) == (ending.reason == "stop")
        else:
            assert sent == alone[: len(sent)]

    def _alone(self, name: str) -> tuple[int, ...]:
        request = self.requests[name]
        if request.beams is None:
            return answer_alone(request, self.setup.vocabulary)
        found = beams_alone(request, self.setup.vocabulary)
        number = request.sampling.branch
        return found[number][1] if number < len(found) else ()

    def assert_scored(self, name: str) -> None:
        """All of the prompt was scored, if that was asked, and nothing else."""
        request = self.requests[name]
        asked = request.prompt_logprobs is not None and not request.emitted
        tokens = enumerate(request.prompt[1:] if asked else (), 1)
        assert self.scored[name] == [Score(token, -float(at), 1) for at, token in tokens], name

    def _request(self, request_id: str) -> Request:
        return self.requests[request_id]

    def _take(self, events: tuple[Event, ...]) -> None:
        for event in events:
            for name in self._names(event):
                assert name not in self.endings, "an event after the terminal one"
                if isinstance(event, Token):
                    sent = self.tokens[name]
                    assert event.number == len(sent), "an answer with a gap or a repeat"
                    sent.append(event.token)
                    self.told += 1
                    self.assert_scored(name)
                elif isinstance(event, PromptScored):
                    assert event.first == 1 + len(self.scored[name]), "a gap or a repeat"
                    self.scored[name] += event.scores
                else:
                    self.endings[name] = event

    def _names(self, event: Event) -> list[str]:
        """Which branches an event is about: a refusal is about all."""
        return [
            name
            for name, own in self.requests.items()
            if own.id == event.request_id
            and (isinstance(event, Refused) or own.sampling.branch == event.branch)
        ]


def random_run(random: Random) -> Serving:
    """One engine and some requests, of which some are cancelled, fail or let go what they hold: to
    the end of all."""
    serving = Serving(random_setup(random))
    for number in range(random.randint(1, 12)):
        request = random_follower(random, serving, f"r{number}")
        serving.submit(pinning(random, request) if random.random() < 0.2 else request)
        if random.random() < 0.2:
            only, reason = random.choice([None, 0, 2]), random.choice(["abort", "stop", "timeout"])
            serving.cancel(f"r{random.randint(0, number)}", only, reason)
        if random.random() < 0.1:
            serving.drop(f"r{random.randint(0, number)}")
        if random.random() < 0.05:
            serving.flush()
        if random.random() < 0.1:
            name = f"r{random.randint(0, number)}"
            serving.oracle.failing = {**serving.oracle.failing, name: random.randint(0, 20)}
        if random.random() < 0.2:
            serving.set_limits(**random_limits(random, serving.setup))
        for _ in range(random.randint(0, 6)):
            if not serving.in_flight and random.random() < 0.2:
                serving.break_step(without_moves=random.random() < 0.1)
            serving.step()
    serving.finish()
    return serving
