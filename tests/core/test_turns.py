"""Whose turn it is, seen from outside: nobody starves, and a change of policy holds at once."""

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import get_args
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.serving import Serving, Setup, random_request, random_setup

from octavo.core.budget import AdmissionRule, Limits, Policy
from octavo.core.calls import CoreSetup
from octavo.core.events import Admitted, Chunked, Deferred, Finished, Preempted, Token
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.setup import scheduler_of
from octavo.simulate.cost import Cost, CostRunner


def request(name: str, length: int = 4, answer: int = 4, **fields: object) -> Request:
    prompt = tuple(own_token(name, position) for position in range(length))
    return Request(id=name, prompt=prompt, max_tokens=answer, **fields)


def own_token(name: str, position: int) -> int:
    """A token of its own for each request, so that nobody shares blocks."""
    return crc32(name.encode()) * 4096 + position


def admitted(serving: Serving) -> list[str]:
    return [d.request_id for d in serving.of(Admitted) if isinstance(d, Admitted) and not d.resumed]


# --- aging


@given(
    aging_s=st.floats(1.0, 60.0),
    priority=st.integers(1, 4),
    rows=st.integers(1, 3),
    blocks=st.integers(8, 30),
    depth=st.integers(1, 2),
    answer=st.integers(1, 8),
)
def test_low_priority_ends_under_an_endless_flood_of_high(
    aging_s: float, priority: int, rows: int, blocks: int, depth: int, answer: int
) -> None:
    """More high ones than can be served come at every step, for ever."""
    serving = Serving(
        Setup(sequences=rows, blocks=blocks, tokens=32, aging_s=aging_s, depth=depth, cached=False)
    )
    serving.submit(request("low", priority=priority, answer=answer))
    # It is first once it is in their class; those that ran then, and it, take their steps.
    bound = int(aging_s * priority) + 60
    for step in range(bound):
        if "low" in serving.endings:
            break
        serving.submit(*(request(f"high {step} {n}", answer=8) for n in range(2)))
        serving.step()
    assert "low" in serving.endings, f"still waits after {bound} steps"


def test_without_aging_low_priority_waits_for_as_long_as_high_ones_come() -> None:
    """What the test above would see if nobody climbed."""
    serving = Serving(Setup(sequences=1, tokens=32))
    serving.submit(request("low", priority=1))
    for step in range(300):
        serving.submit(request(f"high {step}"))
        serving.step()
    assert "low" not in serving.endings
    serving.finish()


def test_who_climbed_keeps_its_place_while_it_runs() -> None:
    """One of high priority that comes then takes nothing from it: else both would go in circles."""
    serving = Serving(Setup(sequences=1, tokens=32, aging_s=10.0))
    serving.submit(request("first", answer=12))
    serving.step()
    serving.submit(request("low", priority=1, answer=12), request("other", priority=1))
    for _ in range(12):
        serving.step()
    serving.submit(request("high"))
    while "low" not in serving.endings:
        serving.step()
    assert not serving.of(Preempted)
    serving.finish()
    assert admitted(serving)[:2] == ["first", "low"]


# --- a change of policy


def test_a_change_of_policy_orders_anew_those_that_wait() -> None:
    names = {"a": 2, "b": 0, "c": 1}
    for policies, expected in (
        (["fcfs", "priority"], ["a", "b", "c"]),
        (["priority", "fcfs"], ["b", "a", "c"]),
    ):
        serving = Serving(Setup(sequences=1, blocks=99, tokens=99, policy=policies[0]))
        for name, priority in names.items():
            serving.submit(request(name, priority=priority))
        serving.step()
        limits = serving.scheduler.limits
        serving.scheduler.limits = replace(limits, policy=policies[1], aging_s=1e9)
        serving.finish()
        assert admitted(serving) == expected


POLICIES, ADMISSIONS = get_args(Policy), get_args(AdmissionRule)


@pytest.mark.parametrize("first", POLICIES)
def test_policies_may_change_at_any_time(first: Policy, seed: int) -> None:
    """All that was promised to each request holds across changes."""
    for run in range(20):
        random = Random(f"{seed} {run}")
        serving = Serving(Setup(sequences=3, blocks=14, tokens=9, policy=first))
        for number in range(12):
            serving.submit(request(f"{number}", 5, 6, priority=random.choice([0, 1, -1])))
            limits = serving.scheduler.limits
            policy, aging_s = random.choice(POLICIES), random.choice([None, 2.0])
            serving.scheduler.limits = replace(limits, policy=policy, aging_s=aging_s)
            for _ in range(random.randint(0, 4)):
                serving.step()
        serving.finish()


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=settings.default.max_examples // 8)
@given(seed=st.integers(0, 2**32))
def test_every_request_ends(policy: Policy, admission: AdmissionRule, seed: int) -> None:
    """Under each policy and rule of admission, whatever comes and when, with targets and without:
    `finish` counts the steps and the preemptions of each."""
    random = Random(seed)
    setup = replace(random_setup(random), policy=policy, admission=admission)
    serving = Serving(setup)
    for number in range(random.randint(1, 8)):
        wish = random_request(random, f"r{number}")
        targets = {
            name: random.choice([None, 0.5, 5.0]) for name in ("ttft_target_s", "tpot_target_s")
        }
        serving.submit(replace(wish, **targets))
        for _ in range(random.randint(0, 5)):
            serving.step()
    serving.finish()


# --- fair between tenants


def test_a_tenant_that_floods_keeps_nobody_waiting_for_long() -> None:
    """Of two hundred that wait, the one of another tenant is next; by arrival it would be last."""
    ahead = {}
    for policy in ("priority", "fair"):
        serving = Serving(Setup(sequences=2, blocks=99, tokens=64, policy=policy, cached=False))
        serving.submit(*(request(f"f{n}", tenant="flood") for n in range(200)))
        serving.step()
        serving.submit(request("modest", tenant="modest"))
        serving.finish()
        ahead[policy] = admitted(serving).index("modest")
    assert ahead == {"priority": 200, "fair": 2}


@pytest.mark.parametrize("stops", [frozenset(), frozenset({0, 1})])
def test_every_token_of_a_prompt_and_an_answer_is_charged_once(stops: frozenset[int]) -> None:
    serving = Serving(Setup(sequences=3, blocks=99, tokens=64, policy="fair", cached=False))
    for tenant, answer in (("a", 40), ("b", 7), ("a", 1), ("b", 29)):
        name = f"{tenant} {answer}"
        serving.submit(request(name, 5, answer, tenant=tenant, stop_token_ids=stops))
    serving.finish()
    for tenant in "ab":
        answers = sum(len(sent) for name, sent in serving.tokens.items() if name[0] == tenant)
        assert serving.scheduler.roster.service.of(tenant) == 2 * 5 + 2 * answers


@settings(max_examples=settings.default.max_examples // 8)
@given(
    rows=st.integers(1, 4),
    tenants=st.integers(2, 4),
    lengths=st.lists(st.integers(1, 12), min_size=4, max_size=12),
    aging_s=st.sampled_from([None, 3.0, 50.0]),
)
def test_tenants_that_want_more_than_there_is_get_alike(
    rows: int, tenants: int, lengths: list[int], aging_s: float | None
) -> None:
    """The first brings five times as much as the others; all have some that wait all the time. What
    they were served differs by no more than what runs at once can be charged."""
    fair = Limits(sequences=rows, tokens=64, policy="fair", aging_s=aging_s)
    scheduler, runner = (
        scheduler_of(CoreSetup(blocks=200, block_size=4, limits=fair)),
        CostRunner(COST),
    )
    served = dict.fromkeys(map(str, range(tenants)), 0)
    sizes: dict[str, int] = {}
    for tenant in served:
        for number in range(250 if tenant == "0" else 50):
            length, answer = 1 + number % 12, lengths[number % len(lengths)]
            one = request(f"{tenant} {number}", length, answer, tenant=tenant)
            sizes[one.id] = length
            scheduler.submit(one, 0.0)
    while {one.request.tenant for one in scheduler.waiting} == served.keys():
        plan = scheduler.plan(runner.now)
        assert plan is not None
        for decision in plan.decisions:
            if isinstance(decision, Admitted):
                served[decision.request_id.split()[0]] += sizes[decision.request_id]
        for event in scheduler.commit(plan, runner.execute(plan), runner.now):
            served[event.request_id.split()[0]] += 2 * isinstance(event, Token)
    most = (12 + 2 * max(lengths)) * (rows + 1)
    assert max(served.values()) - min(served.values()) <= most


def test_who_floods_does_not_climb_above_others_by_waiting_behind_itself() -> None:
    """Its oldest had waited longest, climbed to the class of those of high priority, and went
    before all that others sent."""
    serving = Serving(Setup(sequences=2, blocks=199, tokens=64, policy="fair", aging_s=40.0))
    serving.submit(request("urgent", answer=400, tenant="other"))
    serving.submit(*(request(f"f{n}", priority=1, tenant="flood") for n in range(60)))
    for _ in range(70):
        serving.step()
    serving.submit(*(request(f"m{n}", priority=1, tenant="modest") for n in range(3)))
    serving.finish()
    after = admitted(serving)
    assert after.index("m2") - after.index("m0") <= 4
    assert after.index("m0") < 20


# --- in time


COST = Cost(base_s=0.020, token_s=0.005)


def in_time(
    limits: Limits, arrivals: Iterable[tuple[float, Request]]
) -> tuple[Scheduler, list[object], dict[str, Finished]]:
    """(scheduler, decisions, endings) of a run in virtual time."""
    scheduler = scheduler_of(CoreSetup(blocks=2000, block_size=4, limits=limits))
    runner, coming = CostRunner(COST), sorted(arrivals, key=lambda one: -one[0])
    decisions: list[object] = []
    endings: dict[str, Finished] = {}
    while coming or not scheduler.idle:
        if scheduler.idle:
            runner.now = max(runner.now, coming[-1][0])
        while coming and coming[-1][0] <= runner.now:
            at_s, one = coming.pop()
            scheduler.submit(one, at_s)
        plan = scheduler.plan(runner.now)
        assert plan is not None
        decisions += plan.decisions
        for event in scheduler.commit(plan, runner.execute(plan), runner.now):
            if isinstance(event, Finished):
                endings[event.request_id] = event
    return scheduler, decisions, endings


def limits(sequences: int = 32, **fields: object) -> Limits:
    return Limits(sequences=sequences, tokens=512, policy="slo", **fields)


def first_after(ending: Finished) -> float:
    assert ending.receipt.first_token_s is not None
    return ending.receipt.first_token_s - ending.receipt.arrival_s


def tpot(ending: Finished) -> float:
    receipt = ending.receipt
    assert receipt.first_token_s is not None
    return (receipt.finished_s - receipt.first_token_s) / (receipt.completion_tokens - 1)


def test_chunks_shrink_so_that_answers_under_way_keep_their_pace() -> None:
    """Four answer when a prompt of 2,000 tokens comes: whole, it would hold them up for seconds."""
    arrivals = [(0.0, request(f"a{n}", 8, 60)) for n in range(4)]
    arrivals.append((1.0, request("long", 2000, 4)))
    paces = {}
    for policy in ("priority", "slo"):
        chosen = limits(ttft_target_s=30.0, tpot_target_s=0.15)
        _, decisions, endings = in_time(replace(chosen, policy=policy), arrivals)
        paces[policy] = max(tpot(endings[f"a{n}"]) for n in range(4))
        causes = {d.limit for d in decisions if isinstance(d, Chunked)}
        assert causes == ({"slo"} if policy == "slo" else {"tokens"})
        assert endings["long"].reason == "length"
    assert paces["slo"] <= 0.15 < paces["priority"]


def test_a_tight_target_does_not_keep_others_out_for_ever() -> None:
    """Beside one that answers as fast as can be nobody else fits; who has climbed comes in."""
    arrivals = [(0.0, request("tight", 8, 400, tpot_target_s=0.026))]
    arrivals.append((0.5, request("other", 40, 4)))
    waits = {}
    for aging_s in (None, 2.0):
        _, _, endings = in_time(limits(ttft_target_s=1000.0, aging_s=aging_s), arrivals)
        waits[aging_s] = first_after(endings["other"])
    assert waits[2.0] < 2.5 < 9 < waits[None]


def test_no_more_run_than_can_keep_their_pace() -> None:
    """Steps of 25 tokens take 145 ms: 9 that answer, and the least that prompts get."""
    arrivals = [(1.0, request(f"r{n:02}", 4, 30)) for n in range(40)]
    chosen = limits(ttft_target_s=1000.0, tpot_target_s=0.15)
    _, decisions, endings = in_time(chosen, [(0.0, request("before", 4, 3)), *arrivals])
    assert max(tpot(one) for one in endings.values()) <= 0.15
    waits = [d for d in decisions if isinstance(d, Deferred) and d.limit == "slo"]
    assert waits
    assert all(d.missing > 0 for d in waits)


def test_who_cannot_be_in_time_goes_behind_who_can() -> None:
    """A prompt of 2,000 tokens takes 10 s: it yields to those that can be there in 3 s."""
    arrivals = [(0.0, request("before", 300, 2))]
    arrivals += [(0.1, request("hopeless", 2000, 2))]
    arrivals += [(0.2 + n / 100, request(f"quick {n}", 20, 2)) for n in range(5)]
    _, _, endings = in_time(limits(ttft_target_s=3.0, tpot_target_s=1.0), arrivals)
    for n in range(5):
        assert first_after(endings[f"quick {n}"]) <= 3.0
    assert endings["hopeless"].reason == "length"


def test_who_is_late_ends_under_an_endless_flood_of_those_in_time() -> None:
    """It falls a class behind and climbs back by waiting."""
    flood = [(n * 0.1, request(f"f{n}", 30, 4)) for n in range(400)]
    ends = {}
    for aging_s in (None, 5.0):
        chosen = limits(ttft_target_s=1.0, tpot_target_s=0.12, aging_s=aging_s)
        _, _, endings = in_time(chosen, [(0.5, request("late", 600, 4)), *flood])
        ends[aging_s] = endings["late"].receipt.finished_s
    assert ends[5.0] < 20 < 40 <= ends[None]


def test_the_backlog_of_an_overload_takes_no_more_than_its_share() -> None:
    """Ten seconds of waiting are worth a class. After twenty those that are late have climbed: did
    they come first, nobody would be in time any more."""
    arrivals = [(n * 0.25, request(f"{n}", 40, 10)) for n in range(400)]
    chosen = limits(ttft_target_s=2.0, tpot_target_s=0.15, aging_s=10.0)
    _, _, endings = in_time(chosen, arrivals)
    good = [first_after(endings[f"{n}"]) <= 2.0 for n in range(400)]
    assert sum(good[300:]) > 20


def test_who_is_late_yields_to_those_in_time_once() -> None:
    """Else each that came in time would throw out, again and again, one that was late."""
    late = [(0.5, request(f"late {n}", 200, 100, ttft_target_s=0.01)) for n in range(4)]
    quick = [(1.0 + n, request(f"quick {n}", 8, 3)) for n in range(40)]
    chosen = limits(sequences=2, ttft_target_s=2.0, tpot_target_s=0.2)
    _, _, endings = in_time(chosen, [(0.0, request("before", 8, 3)), *late, *quick])
    preemptions = [endings[name].receipt.preemptions for name in endings if name.startswith("late")]
    assert max(preemptions) == 1
    assert first_after(endings["quick 0"]) < 1.0


def test_more_are_in_time_than_by_arrival(seed: int) -> None:
    random = Random(seed)
    arrivals, now = [], 0.0
    for number in range(150):
        now += random.expovariate(2.0)
        arrivals.append((now, request(f"{number}", random.randint(8, 200), random.randint(4, 60))))
    good = {}
    for policy in ("fcfs", "slo"):
        chosen = replace(limits(ttft_target_s=3.0, tpot_target_s=0.2), policy=policy)
        _, _, endings = in_time(chosen, arrivals)
        assert len(endings) == 150
        good[policy] = sum(first_after(e) <= 3.0 and tpot(e) <= 0.2 for e in endings.values())
    assert good["slo"] > 2 * good["fcfs"]
