"""What the engine shows of itself crosses the wire, and agrees with what it counts."""

from collections import Counter
from random import Random

import pytest
from tests.core.serving import random_request

from octavo.core.block_manager import BlockManager
from octavo.core.budget import Limits
from octavo.core.prefix_cache import PrefixCache
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.view import STATE_BITS, STATES
from octavo.engine.crank import Crank
from octavo.engine.engine import Engine
from octavo.engine.showing import BlockShown, PoolShown
from octavo.engine.wire import ANSWERS, Ask, Question, ShowBlock, ShowPool, Submit, decode, error_of
from octavo.errors import InvalidRequest
from octavo.observe.lives import Lives
from octavo.simulate.oracle import OracleRunner


class Clock:
    """Goes on by a second each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def crank_of(blocks: int = 12, sequences: int = 3) -> Crank:
    lives = Lives()
    manager = BlockManager(blocks=blocks, block_size=4, cache=PrefixCache(block_size=4))
    limits = Limits(sequences=sequences, tokens=16, watermark_blocks=0)
    oracle = OracleRunner(blocks=blocks, block_size=4, vocabulary=97)
    return Crank(
        Engine(Scheduler(manager, limits), oracle, clock=Clock(), observers=[lives]), lives
    )


def ask(crank: Crank, question: Question) -> object:
    [reply] = crank.obey([Ask(7, question)]).replies
    if reply.problem is not None:
        raise error_of(reply.problem)
    return decode(reply.answer, ANSWERS[type(question)])


def pool_of(crank: Crank, most: int = 100) -> PoolShown:
    shown = ask(crank, ShowPool(most))
    assert isinstance(shown, PoolShown)
    return shown


def block_of(crank: Crank, block: int) -> BlockShown:
    shown = ask(crank, ShowBlock(block))
    assert isinstance(shown, BlockShown)
    return shown


def test_cells_are_what_the_engine_counts(seed: int) -> None:
    random = Random(seed)
    for _ in range(10):
        crank = crank_of(blocks=random.randint(6, 20), sequences=random.randint(1, 4))
        for number in range(8):
            crank.obey([Submit(random_request(random, f"r{number}"))])
            crank.step()
            shown = pool_of(crank)
            states = Counter(STATES[cell & STATE_BITS] for cell in shown.view.cells)
            status = shown.status
            assert states["free"] == status.blocks_free
            assert states["cached"] == status.blocks_cached
            assert states["owned"] + states["shared"] == status.blocks_owned
            assert states["held"] == status.blocks_held
            assert states["fenced"] == status.blocks_fenced
            assert states.total() == status.blocks_total
            assert len(shown.running) == len(shown.view.running) == status.running
            assert len(shown.waiting) == len(shown.view.waiting) == status.waiting
            assert all(one.reason for one in (*shown.running, *shown.waiting))


def test_each_request_says_where_it_is_and_why() -> None:
    crank = crank_of(blocks=6, sequences=2)
    for name, length in (("elder", 10), ("younger", 5), ("third", 3)):
        prompt = tuple(range(100 * length, 101 * length))
        crank.obey([Submit(Request(id=name, prompt=prompt, max_tokens=12))])
    crank.step()
    shown = pool_of(crank)
    assert [one.phase for one in shown.running] == ["decode", "decode"]
    assert shown.running[0].reason.startswith("admitted in row 0: 10 tokens, none cached")
    assert [one.id for one in shown.view.waiting] == ["third"]
    assert shown.waiting[0].reason == "first in the queue: all rows were taken"
    while not shown.view.running[0].preemptions and len(shown.view.running) == 2:
        crank.step()
        shown = pool_of(crank)
    assert shown.running[0].reason == "needed room: younger yielded 2 blocks"
    crank.step()
    shown = pool_of(crank)
    [victim] = [
        standing
        for one, standing in zip(shown.view.waiting, shown.waiting, strict=True)
        if one.id == "younger"
    ]
    assert victim.phase == "preempted"
    assert victim.reason.startswith("preempted (recompute) for elder: 2 blocks released")
    assert "; first in the queue: KV blocks short by" in victim.reason


def test_who_has_just_come_waits_for_the_next_step() -> None:
    crank = crank_of()
    crank.obey([Submit(Request(id="a", prompt=(1, 2), max_tokens=2, branches=2))])
    shown = pool_of(crank)
    said = {one.id: how.reason for one, how in zip(shown.view.waiting, shown.waiting, strict=True)}
    assert said == {"a": "waits for the next step", "a#1": "waits for a, which has the same prompt"}


def test_a_block_says_when_it_was_last_given_out() -> None:
    crank = crank_of()
    crank.obey([Submit(Request(id="a", prompt=(1, 2, 3, 4, 5), max_tokens=1))])
    crank.step()
    told = [block_of(crank, block) for block in range(12)]
    used = [one for one in told if one.given_ago_s is not None]
    assert len(used) == 2
    assert [one.view.key != "" for one in used] == [True, False]
    for _ in range(9):
        crank.engine.now()
    before = block_of(crank, used[0].view.block).given_ago_s
    crank.obey([Submit(Request(id="b", prompt=(1, 2, 3, 4, 6), max_tokens=1))])
    crank.step()
    again = block_of(crank, used[0].view.block)
    assert again.given_ago_s is not None
    assert before is not None
    assert again.given_ago_s < before, "a block that was found is given out again"
    assert again.view.epoch == 1


@pytest.mark.parametrize("block", [-1, 12, 10**9])
def test_a_block_that_is_not_there_is_refused(block: int) -> None:
    with pytest.raises(InvalidRequest, match=r"from 0 to 11") as refused:
        block_of(crank_of(), block)
    assert refused.value.param == "block"


def test_asking_changes_nothing(seed: int) -> None:
    """The same requests have the same answers and steps, whether somebody looks or not."""
    told = []
    for looks in (False, True):
        random, crank, events = Random(seed), crank_of(), []
        for number in range(6):
            crank.obey([Submit(random_request(random, f"r{number}"))])
            for _ in range(2):
                news = crank.step()
                events += [*news.tokens, *((end.request_id, end.reason) for end in news.ends)]
                if looks:
                    pool_of(crank)
                    block_of(crank, 3)
        told.append(events)
    assert told[0] == told[1]
