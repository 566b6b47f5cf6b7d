"""An engine process that dies is only a preemption: streams go on with the tokens they would have
had. The engine is a process of its own here, with the oracle in the place of a model."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from tests.engine.child import DEADLY, HANGING, REFUSING, SILENT, SLEEPING, VOCABULARY, WEARING
from tests.engine.test_client import TOKENIZER, collect, ticket
from tests.serve.scripted import IDLE

from octavo.config import EngineConfig
from octavo.core.budget import Ceilings, Limits
from octavo.engine.client import AsyncClient
from octavo.engine.supervisor import EngineProcess, Vitals
from octavo.engine.wire import News, Setup
from octavo.errors import (
    ConfigError,
    EngineError,
    EngineStopped,
    InvalidRequest,
    Overloaded,
    UnknownRequest,
)
from octavo.resolve import MachineFacts, ModelFacts, Resolved, resolve
from octavo.simulate.oracle import answer_alone
from octavo.text.assembler import Ended
from octavo.units import GIB, KIB

pytestmark = pytest.mark.anyio
CHILD = (sys.executable, "-m", "tests.engine.child")
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def resolved(limits: Limits) -> Resolved:
    config = EngineConfig(kv_cache_memory=1024 * KIB, block_size=16, max_model_len=64)
    facts = ModelFacts(
        weights_bytes=1,
        kv_token_bytes=64,
        windows=(None,),
        max_context=64,
        vocab_size=VOCABULARY,
        hidden_size=1,
        ffn_size=1,
        qkv_width=3,
    )
    found = resolve(config, facts, MachineFacts(free_bytes=4 * GIB, cores=1))
    return replace(
        found,
        blocks=64,
        limits=limits,
        ceilings=Ceilings(sequences=16, tokens=64, watermark_blocks=64),
    )


@asynccontextmanager
async def supervised(
    *, limits: Limits | None = None, stall_s: float = 0.0, model: str = "oracle"
) -> AsyncIterator[tuple[AsyncClient, EngineProcess]]:
    limits = limits or Limits(sequences=16, tokens=64)
    setup = Setup(config=EngineConfig(model=model), resolved=resolved(limits), path="")
    link = EngineProcess(setup, stall_s=stall_s, command=CHILD)
    client = AsyncClient(link)
    try:
        await client.start()
        yield client, link
    finally:
        await client.close()


def kill(link: EngineProcess) -> None:
    assert link.pid is not None
    os.kill(link.pid, signal.SIGKILL)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def _children_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


async def test_streams_go_on_when_the_engine_is_killed_again_and_again(seed: int) -> None:
    """More streams than rows, so that some wait, and less memory than they need."""
    random = Random(seed)
    tickets = [
        ticket(f"r{n}", tuple(random.choices(range(VOCABULARY), k=random.randint(1, 9))), tokens=40)
        for n in range(24)
    ]
    async with supervised() as (client, link):
        answers = [asyncio.ensure_future(collect(client, one)) for one in tickets]
        for _ in range(3):
            restarts = client.restarts
            await until(lambda: client.state == "ready" and client.status().tokens_sampled > 0)
            await asyncio.sleep(random.random() * 0.02)
            kill(link)
            await until(lambda restarts=restarts: client.restarts > restarts)
        for one, answer in zip(tickets, answers, strict=True):
            tokens, ended = await answer
            assert tokens == answer_alone(one.request, VOCABULARY)
            assert ended.finish_reason == "length"
            assert ended.receipt.completion_tokens == 40
            assert ended.receipt.preemptions >= 1
        assert client.restarts == 3
        assert client.status().running == client.status().waiting == 0


async def test_branches_and_stops_outlive_the_engine() -> None:
    own = ticket("x", tokens=40, branches=5).request.split()
    alone = [answer_alone(one, VOCABULARY) for one in own]
    stop = TOKENIZER.decode(alone[0][2:5], skip_special=False)
    async with supervised() as (client, link):
        texts, ends, killed = [""] * 5, {}, False
        async for item in client.stream(ticket("a", tokens=40, branches=5, stop=stop)):
            if isinstance(item, Ended):
                ends[item.branch] = item
                continue
            texts[item.branch] += item.text
            if not killed and client.status().tokens_sampled > 60:
                killed = True
                kill(link)
        assert client.restarts == 1
        for branch, tokens in enumerate(alone):
            whole = TOKENIZER.decode(tokens, skip_special=False)
            assert texts[branch] == whole.partition(stop)[0]
            assert (ends[branch].stop_reason == stop) == (stop in whole)
        assert sum(end.receipt.prompt_tokens for end in ends.values()) == 2


async def test_who_kills_the_engine_twice_ends_with_an_error_and_nobody_else_does() -> None:
    """Beside two innocents, which are computed in the same steps."""
    async with supervised() as (client, _):
        bad = ticket("bad", (5, DEADLY), tokens=30)
        good = [ticket(f"good{n}", (n,), tokens=30) for n in range(2)]
        outcome, *answers = await asyncio.gather(
            *(collect(client, one) for one in (bad, *good)), return_exceptions=True
        )
        assert isinstance(outcome, EngineError)
        assert "more than once" in outcome.message
        for one, answer in zip(good, answers, strict=True):
            assert not isinstance(answer, BaseException), answer
            assert answer[0] == answer_alone(one.request, VOCABULARY)
        assert 2 <= client.restarts <= 4
        assert await collect(client, ticket("later"))


async def test_alone_it_has_two_tries() -> None:
    async with supervised() as (client, _):
        with pytest.raises(EngineError, match="more than once"):
            await collect(client, ticket("bad", (DEADLY,), tokens=30))
        await until(lambda: client.state == "ready")
        assert client.restarts == 2


async def test_a_request_that_lives_through_a_token_an_engine_ends_with_an_error() -> None:
    """And those beside it, which come no further either, go on to their ends."""
    async with supervised() as (client, _):
        bad = ticket("bad", (5, WEARING), tokens=30)
        good = [ticket(f"good{n}", (n,), tokens=30) for n in range(3)]
        outcome, *answers = await asyncio.gather(
            *(collect(client, one) for one in (bad, *good)), return_exceptions=True
        )
        assert isinstance(outcome, EngineError)
        assert "more than once" in outcome.message
        for one, answer in zip(good, answers, strict=True):
            assert not isinstance(answer, BaseException), answer
            assert answer[0] == answer_alone(one.request, VOCABULARY)
        assert 2 <= client.restarts <= 5


async def test_a_hung_engine_counts_as_dead() -> None:
    async with supervised(stall_s=2.0) as (client, _):
        good = ticket("good", tokens=40)
        hanging = asyncio.ensure_future(collect(client, ticket("bad", (HANGING,), tokens=30)))
        answer = await collect(client, good)
        assert answer[0] == answer_alone(good.request, VOCABULARY)
        with pytest.raises(EngineError, match="more than once"):
            await hanging


def test_an_engine_is_stuck_when_it_has_work_and_is_silent() -> None:
    def news(running: int) -> News:
        return News(status=replace(IDLE, running=running))

    vitals = Vitals(heard_s=0.0)
    assert not vitals.stuck(1000.0, 2.0), "it has nothing to do"
    vitals.sent(1000.0)
    vitals.sent(1001.5)
    assert not vitals.stuck(1002.0, 2.0)
    assert vitals.stuck(1002.1, 2.0), "what it was sent first counts"
    vitals.heard(news(1), 1002.1)
    assert not vitals.stuck(1004.0, 2.0)
    assert vitals.stuck(1004.2, 2.0)
    vitals.heard(news(0), 1004.2)
    assert not vitals.stuck(2000.0, 2.0)


async def test_the_queue_limit_turns_nobody_away_that_was_accepted() -> None:
    """Six wait where, after the restart, nine come for one row: all are served."""
    limits = Limits(sequences=2, tokens=64, waiting=6)
    async with supervised(limits=limits) as (client, link):
        tickets = [ticket(f"r{n}", (n,), tokens=50) for n in range(8)]
        answers = [asyncio.ensure_future(collect(client, one)) for one in tickets[:2]]
        await until(lambda: client.status().running == 2)
        answers += [asyncio.ensure_future(collect(client, one)) for one in tickets[2:]]
        await until(lambda: client.status().waiting == 6)
        kill(link)
        for one, answer in zip(tickets, answers, strict=True):
            assert (await answer)[0] == answer_alone(one.request, VOCABULARY)


async def test_limits_and_questions_outlive_the_engine() -> None:
    async with supervised() as (client, link):
        await client.change_limits({"max_num_seqs": 3, "max_num_batched_tokens": 9})
        with pytest.raises(InvalidRequest) as wrong:
            await client.change_limits({"max_num_seqs": 10**6})
        assert wrong.value.param == "max_num_seqs"
        kill(link)
        assert await client.flush() == 0
        await until(lambda: client.status().limits.sequences == 3)
        assert client.status().limits.tokens == 9


async def test_lives_are_told_across_the_border() -> None:
    async with supervised() as (client, _):
        await collect(client, ticket("abc1"))
        await collect(client, ticket("abd2"))
        assert [(one.id, one.story) for one in await client.accounts()] == [
            ("abc1", ()),
            ("abd2", ()),
        ]
        with pytest.raises(UnknownRequest, match="2 requests begin"):
            await client.find_account("ab")
        assert await client.find_account("x") is None
        found = await client.find_account("abd")
        assert found is not None
        assert found.id == "abd2"
        assert found.story
        explained = await client.explain(ticket("new", (5, 6, 7, 8, 9)).request)
        assert explained.prompt_tokens == 5


async def test_what_cannot_be_built_is_said_as_it_is() -> None:
    with pytest.raises(ConfigError, match="name another") as refused:
        async with supervised(model=REFUSING):
            pass
    assert refused.value.param == "model"
    with pytest.raises(EngineError, match="exit code 7"):
        async with supervised(model=SILENT):
            pass


async def test_an_engine_that_does_not_start_again_ends_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("octavo.engine.supervisor.PAUSES_S", (0.0,))
    async with supervised() as (client, link):
        answer = asyncio.ensure_future(collect(client, ticket("open", tokens=40)))
        await until(lambda: client.status().running == 1)
        link._command = (sys.executable, "-c", "raise SystemExit(4)")
        kill(link)
        with pytest.raises(EngineStopped):
            await answer
        await asyncio.wait_for(client.lost.wait(), 60)
        assert not client.alive
        with pytest.raises(EngineStopped):
            await collect(client, ticket("late"))


async def test_refusals_cross_the_border() -> None:
    limits = Limits(sequences=1, tokens=64, waiting=1)
    async with supervised(limits=limits) as (client, _):
        first = asyncio.ensure_future(collect(client, ticket("first", tokens=40)))
        await until(lambda: client.status().running == 1)
        second = asyncio.ensure_future(collect(client, ticket("second")))
        await until(lambda: client.status().waiting == 1)
        with pytest.raises(Overloaded):
            await collect(client, ticket("third"))
        await asyncio.gather(first, second)


async def test_the_engine_ends_with_the_front() -> None:
    """The front is killed: nobody is left to tell the engine to stop."""
    front = (
        "import asyncio\n"
        "from tests.engine.test_supervisor import supervised\n"
        "async def main():\n"
        "    async with supervised() as (client, link):\n"
        "        print(link.pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", front, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    process.kill()
    await process.wait()
    await until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_an_engine_that_cannot_even_be_launched_is_tried_again_and_ends_in_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No descriptors or no memory are left, say: nobody may wait for ever."""
    monkeypatch.setattr("octavo.engine.supervisor.PAUSES_S", (0.0,))
    async with supervised() as (client, link):
        answer = asyncio.ensure_future(collect(client, ticket("open", tokens=40)))
        await until(lambda: client.status().running == 1)
        link._command = ("/there/is/no/such/program",)
        kill(link)
        with pytest.raises(EngineStopped):
            await answer
        assert client.lost.is_set()


async def test_a_limit_that_no_message_can_hold_is_refused_and_leaves_nothing_behind() -> None:
    async with supervised() as (client, link):
        with pytest.raises(InvalidRequest):
            await client.change_limits({"max_num_seqs": 10**30})
        kill(link)
        one = ticket("later")
        assert (await collect(client, one))[0] == answer_alone(one.request, VOCABULARY)


async def test_who_comes_while_a_dead_engine_is_put_away_is_served_by_the_next() -> None:
    async with supervised() as (client, link):
        link._ready = False  # the link knows of the death already, the client does not yet
        assert client.state == "ready"
        one = ticket("between")
        answer = asyncio.ensure_future(collect(client, one))
        await asyncio.sleep(0)
        kill(link)
        assert (await answer)[0] == answer_alone(one.request, VOCABULARY)


async def test_closing_while_another_engine_starts_ends() -> None:
    async with supervised() as (client, link):
        kill(link)
        await until(lambda: client.state == "restarting")
        async with asyncio.timeout(60):
            await client.close()
        assert not client.alive


async def test_an_engine_that_hangs_while_it_loads_again_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one never is ready; the third is."""
    monkeypatch.setattr("octavo.engine.supervisor.LOADS", 3.0)
    async with supervised(stall_s=2.0, model=SLEEPING) as (client, link):
        one = ticket("open", tokens=40)
        answer = asyncio.ensure_future(collect(client, one))
        await until(lambda: client.status().running == 1)
        kill(link)
        assert (await answer)[0] == answer_alone(one.request, VOCABULARY)
        assert link._setup.restarts >= 2


async def test_a_front_that_fails_on_the_news_is_no_death_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with supervised() as (client, link):
        told, pid = client.told, link.pid

        def broken(news: News) -> None:
            told(news)
            raise ZeroDivisionError

        monkeypatch.setattr(client, "told", broken)
        one = ticket("served")
        assert (await collect(client, one))[0] == answer_alone(one.request, VOCABULARY)
        assert (client.restarts, link.pid) == (0, pid)


async def test_who_closes_it_too_waits_for_the_end_as_well() -> None:
    async with supervised() as (client, link):
        first = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        await client.close()
        assert not client.alive
        assert link._life is not None
        assert link._life.process.returncode is not None
        await first
