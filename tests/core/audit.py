"""What every plan must keep to, besides the books that `invariants.check` knows."""

from collections import Counter
from collections.abc import Iterable

from octavo.core.events import Admitted, Chunked, Deferred, Pinned, Preempted
from octavo.core.invariants import check_writes
from octavo.core.plan import StepPlan
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence, State


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """A plan that was just made keeps to the limits, names only sequences that own what it needs,
    and says of nobody that they wait for what is there.

    Raises  AssertionError
    """
    check_writes(scheduler, plan)
    rows = {sequence.row: sequence for sequence in scheduler.running}
    running = {sequence.id: sequence for sequence in scheduler.running}
    waiting = {sequence.id: sequence for sequence in scheduler.waiting}
    limits, size = scheduler.limits, scheduler.manager.block_size
    spent = sum(span.stop - span.start + span.drafts for span in plan.spans)
    assert spent <= limits.tokens, f"{spent} tokens in one step"
    happened = [one for one in plan.decisions if not isinstance(one, Deferred | Chunked)]
    assert spent or plan.moves or happened, "a step for nothing"
    assert len({span.row for span in plan.spans}) == len(plan.spans)
    for span in plan.spans:
        assert span.start < span.stop
        assert span.drafts <= limits.drafts
        assert not span.drafts or (span.samples and span.stop == span.start + 1)
        for table in rows[span.row].tables:
            reach = span.stop + span.drafts
            assert reach <= len(table) * size, f"row {span.row} writes beyond its table"
    served = {rows[span.row].id for span in plan.spans}
    awaiting = {
        one.request_id
        for one in plan.decisions
        if isinstance(one, Deferred) and one.limit == "in_transfer"
    }
    preempted = {one.request_id for one in plan.decisions if isinstance(one, Preempted)}
    for decision in plan.decisions:
        match decision:
            case Preempted(victim, beneficiary):
                assert beneficiary in served | awaiting, "preempted for one who is not served"
                assert victim not in served
                assert _yields(waiting[victim], (running | waiting)[beneficiary]), "rank"
            case Deferred(name, "tokens") if name in waiting.keys() - preempted:
                assert spent == limits.tokens, f"{name} waits for tokens, and some are left"
    admitted = [running[one.request_id] for one in plan.decisions if isinstance(one, Admitted)]
    if admitted:
        assert len(running) <= limits.sequences, "admitted above the limit"
    if admitted and len(running) > 1:
        _check_headroom(scheduler, plan, admitted[-1].preemptions)


def check_told(scheduler: Scheduler, plans: Iterable[StepPlan]) -> None:
    """Every preemption of who is live still has been told, in one of these plans."""
    told: Counter[str] = Counter()
    for plan in plans:
        for decision in plan.decisions:
            if isinstance(decision, Preempted):
                told[decision.request_id] += 1
            elif isinstance(decision, Admitted) and not decision.resumed:
                told[decision.request_id] = 0
    for one in (*scheduler.running, *scheduler.waiting):
        assert one.preemptions == told[one.id], f"{one.id} was told of {told[one.id]} preemptions"


def check_pins(scheduler: Scheduler, now: float) -> None:
    """No pin outlives its time."""
    for hold in scheduler.holds:
        assert hold.until_s >= now, f"{hold.id} should have ended at {hold.until_s}"


def _yields(victim: Sequence, beneficiary: Sequence) -> bool:
    """Whether it ranks below; to one that does not run yet only lower classes yield, and those
    that have nothing to do."""
    if victim.barred:
        return True
    if beneficiary.state is State.RUNNING:
        return (victim.rank, victim.number) > (beneficiary.rank, beneficiary.number)
    return victim.rank[0] > beneficiary.request.priority


def _check_headroom(scheduler: Scheduler, plan: StepPlan, preemptions: int) -> None:
    """Whoever is admitted beside others leaves room for them, twice as much each time it had to
    yield: that bounds how often it will. What it has pinned since is room too, if nobody else has
    it: a hold goes before anyone must yield."""
    watermark, pool = scheduler.limits.watermark_blocks, scheduler.manager.pool
    least = max(watermark, 1) << preemptions if preemptions else watermark
    pins = {one.name for one in plan.decisions if isinstance(one, Pinned)}
    pinned = {block for hold in scheduler.holds if hold.id in pins for block in hold.blocks()}
    room = pool.available + sum(pool.yields(block) for block in pinned)
    assert room >= min(least, pool.total), f"{room} of {least} held back"
