"""The asyncio client over an engine thread, with the oracle as runner."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.text.vocabulary import tokenizer_of

from octavo.core.block_manager import BlockManager
from octavo.core.budget import Limits
from octavo.core.events import Token
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request, Sampling
from octavo.core.scheduler import Scheduler
from octavo.engine.client import AsyncClient
from octavo.engine.door import Ticket
from octavo.engine.engine import Engine, EngineStatus
from octavo.engine.thread import EngineThread
from octavo.engine.wire import ANSWERS, Flush, Stop
from octavo.errors import EngineError, EngineStopped, InvalidRequest, Overloaded, RequestError
from octavo.simulate.oracle import OracleRunner, answer_alone
from octavo.text.assembler import Assembler, Delta, Ended, StopRules

VOCABULARY = 97
pytestmark = pytest.mark.anyio
TOKENIZER, _ = tokenizer_of([bytes([65 + n, 66]) for n in range(20)])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Gated:
    """A runner that waits before each step until the test lets it go on."""

    def __init__(self, oracle: OracleRunner, loop: asyncio.AbstractEventLoop) -> None:
        self._oracle = oracle
        self._loop = loop
        self._gate = asyncio.Semaphore(0)
        self.open = False

    def execute(self, plan: StepPlan) -> StepResult:
        if not self.open:
            asyncio.run_coroutine_threadsafe(self._gate.acquire(), self._loop).result()
        return self._oracle.execute(plan)

    def let_steps(self, count: int) -> None:
        for _ in range(count):
            self._gate.release()

    def let_all(self) -> None:
        self.open = True
        self._gate.release()


@asynccontextmanager
async def serving(
    *, waiting: int | None = None, waiting_tokens: int | None = None, sequences: int = 4
) -> AsyncIterator[tuple[AsyncClient, Gated, Engine]]:
    runner = Gated(
        OracleRunner(blocks=16, block_size=4, vocabulary=VOCABULARY), asyncio.get_running_loop()
    )
    limits = Limits(sequences=sequences, tokens=16, waiting=waiting, waiting_tokens=waiting_tokens)
    engine = Engine(Scheduler(BlockManager(blocks=16, block_size=4), limits), runner)
    client = AsyncClient(EngineThread(engine))
    await client.start()
    try:
        yield client, runner, engine
    finally:
        runner.let_all()
        await client.close()


def ticket(
    name: str,
    prompt: tuple[int, ...] = (5, 6),
    *,
    tokens: int = 6,
    stop: str = "",
    branches: int = 1,
) -> Ticket:
    drawn = Sampling(temperature=float(branches > 1))
    request = Request(id=name, prompt=prompt, max_tokens=tokens, branches=branches, sampling=drawn)
    rules = StopRules(strings=(stop,) if stop else ())
    return Ticket(
        request,
        tuple(
            Assembler(TOKENIZER, rules, skip_special=False, branch=branch)
            for branch in range(branches)
        ),
    )


async def collect(client: AsyncClient, one: Ticket) -> tuple[tuple[int, ...], Ended]:
    tokens: list[int] = []
    async for item in client.stream(one):
        if isinstance(item, Ended):
            return tuple(tokens), item
        tokens += item.token_ids
    raise AssertionError("the stream had no end")


async def test_branches_come_side_by_side_and_each_ends() -> None:
    """A stop string that only some of them draw ends those alone."""
    own = ticket("x", tokens=9, branches=5).request.split()
    alone = [answer_alone(one, VOCABULARY) for one in own]
    stop = TOKENIZER.decode(alone[0][2:5], skip_special=False)
    async with serving() as (client, runner, engine):
        runner.let_all()
        texts, ends = [""] * 5, {}
        async for item in client.stream(ticket("a", tokens=9, branches=5, stop=stop)):
            if isinstance(item, Ended):
                ends[item.branch] = item
            else:
                texts[item.branch] += item.text
        assert sorted(ends) == list(range(5))
        assert ends[0].stop_reason == stop
        for branch, tokens in enumerate(alone):
            whole = TOKENIZER.decode(tokens, skip_special=False)
            assert texts[branch] == whole.partition(stop)[0]
            assert (ends[branch].stop_reason == stop) == (stop in whole)
        assert sum(end.receipt.prompt_tokens for end in ends.values()) == 2
        await settled(lambda: engine.idle)


async def test_B111_an_answer_that_cannot_be_put_into_words_is_the_only_one_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tickets = [ticket(f"r{number}", (5, number)) for number in range(4)]
    take = Assembler.take

    def broken(assembler: Assembler, event: object) -> object:
        if assembler is tickets[2].assemblers[0] and getattr(event, "number", 0) == 3:
            raise ZeroDivisionError
        return take(assembler, event)  # type: ignore[arg-type]

    monkeypatch.setattr(Assembler, "take", broken)
    async with serving() as (client, runner, engine):
        runner.let_all()
        results = await asyncio.gather(
            *[collect(client, one) for one in tickets], return_exceptions=True
        )
        assert isinstance(results[2], EngineError)
        for index in (0, 1, 3):
            result = results[index]
            assert not isinstance(result, BaseException)
            assert result[0] == answer_alone(tickets[index].request, VOCABULARY)
        await settled(lambda: engine.idle)


async def test_what_the_front_cannot_take_in_ends_that_answer_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A defect in its books, say, while several tokens come in one message."""
    async with serving() as (client, runner, engine):
        take = client._ledger.token

        def broken(event: Token, now: float) -> str | None:
            if event.request_id == "r2" and event.number == 3:
                raise ZeroDivisionError
            return take(event, now)

        monkeypatch.setattr(client._ledger, "token", broken)
        tickets = [ticket(f"r{number}", (5, number)) for number in range(4)]
        runner.let_all()
        results = await asyncio.gather(
            *[collect(client, one) for one in tickets], return_exceptions=True
        )
        assert isinstance(results[2], EngineError)
        for index in (0, 1, 3):
            result = results[index]
            assert not isinstance(result, BaseException)
            assert result[0] == answer_alone(tickets[index].request, VOCABULARY)
        await settled(lambda: engine.idle)


async def test_a_question_whose_answer_cannot_be_read_ends_for_who_asked_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as (client, runner, _):
        runner.let_all()
        monkeypatch.setitem(ANSWERS, Flush, str)
        with pytest.raises(EngineError, match="could not be read"):
            await client.flush()
        assert await collect(client, ticket("served"))


async def test_trouble_of_who_is_told_of_a_death_is_none_of_the_answers() -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with serving() as (client, runner, engine):
        client.on_death, client.on_ready = broken, broken
        client.died([])
        client.ready(engine.status())
        runner.let_all()
        assert await collect(client, ticket("served"))


@pytest.mark.parametrize("limit", [{"waiting": 3}, {"waiting_tokens": 6}])
async def test_queue_limits_hold_while_an_engine_is_started_again(limit: dict[str, int]) -> None:
    """One is under way; of those that come while there is no engine, three may wait."""
    async with serving(**limit, sequences=1) as (client, runner, engine):
        first = asyncio.ensure_future(collect(client, ticket("first", tokens=9)))
        await settled(lambda: bool(engine.scheduler.running))
        runner.let_steps(2)
        await settled(lambda: bool(client._ledger._answers["first", 0].emitted))
        client.died([])
        coming = [asyncio.ensure_future(collect(client, ticket(f"r{n}"))) for n in range(5)]
        outcomes = await asyncio.wait_for(asyncio.gather(*coming[3:], return_exceptions=True), 60)
        assert [type(outcome) for outcome in outcomes] == [Overloaded] * 2
        runner.let_all()
        await settled(lambda: engine.idle)
        client.ready(engine.status())
        answers = await asyncio.gather(*coming[:3])
        assert all(ended.finish_reason == "length" for _, ended in answers)
        first.cancel()


async def test_the_engine_is_busy_while_an_answer_is_not_whole() -> None:
    async with serving() as (client, runner, engine):
        assert client.busy_since_s is None
        stream = client.stream(ticket("a", tokens=9))
        reading = asyncio.ensure_future(anext(stream))
        await settled(lambda: bool(engine.scheduler.running))
        assert client.busy_since_s is not None
        runner.let_all()
        await reading
        await settled(lambda: client.busy_since_s is None)
        await stream.aclose()


async def settled(condition: Callable[[], bool]) -> None:
    """Wait until the engine's thread has come to where `condition` holds."""
    while not condition():
        await asyncio.sleep(0)


async def test_many_streams_get_what_each_would_get_alone() -> None:
    async with serving() as (client, runner, _):
        runner.let_all()
        tickets = [ticket(f"r{n}", (n, n + 1, n + 2), tokens=3 + n) for n in range(7)]
        answers = await asyncio.gather(*(collect(client, one) for one in tickets))
    for one, (tokens, ended) in zip(tickets, answers, strict=True):
        assert tokens == answer_alone(one.request, VOCABULARY)
        assert ended.finish_reason == "length"


async def test_closing_a_stream_frees_its_blocks() -> None:
    async with serving() as (client, runner, engine):
        runner.let_steps(2)
        stream = client.stream(ticket("gone", tokens=40))
        assert isinstance(await anext(stream), Delta)
        await stream.aclose()
        runner.let_all()
        await settled(lambda: engine.idle)
        assert engine.scheduler.manager.pool.owned == 0


async def test_cancelling_the_task_that_reads_cancels_the_request() -> None:
    async with serving() as (client, runner, engine):
        task = asyncio.ensure_future(collect(client, ticket("gone", tokens=40)))
        await settled(lambda: bool(engine.scheduler.running))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        runner.let_all()
        await settled(lambda: engine.idle)
        assert engine.scheduler.counters.finished == {"abort": 1}


async def test_a_stop_string_ends_the_request_at_the_engine() -> None:
    plain = answer_alone(ticket("x", tokens=20).request, VOCABULARY)
    text = TOKENIZER.decode(plain[5:6])
    async with serving() as (client, runner, engine):
        runner.let_all()
        tokens, ended = await collect(client, ticket("stopped", tokens=20, stop=text))
        await settled(lambda: engine.idle)
    assert ended.finish_reason == "stop"
    assert ended.stop_reason == text
    assert len(tokens) <= 6
    assert plain[: len(tokens)] == tokens


@pytest.mark.parametrize("limit", [{"waiting": 1}, {"waiting_tokens": 3}])
async def test_refusals_are_errors_of_the_caller(limit: dict[str, int]) -> None:
    """The third has no place in a queue for one, nor have its two tokens in one for three."""
    async with serving(**limit, sequences=1) as (client, runner, engine):
        with pytest.raises(RequestError, match="needs? .*blocks"):
            await collect(client, ticket("huge", (1,) * 60, tokens=30))
        first = asyncio.ensure_future(collect(client, ticket("first")))
        await settled(lambda: bool(engine.scheduler.running))
        second = asyncio.ensure_future(collect(client, ticket("second")))
        third = asyncio.ensure_future(collect(client, ticket("third")))
        runner.let_all()
        outcomes = await asyncio.gather(first, second, third, return_exceptions=True)
    (refused,) = (outcome for outcome in outcomes if isinstance(outcome, Overloaded))
    assert (refused.status, refused.code) == (429, "queue_full")
    assert "at most" in refused.message


async def test_closing_ends_open_streams_with_an_error() -> None:
    async with serving() as (client, runner, engine):
        task = asyncio.ensure_future(collect(client, ticket("open", tokens=40)))
        await settled(lambda: bool(engine.scheduler.running))
        closing = asyncio.ensure_future(client.close())
        runner.let_steps(1)
        await closing
        with pytest.raises(EngineStopped):
            await task
        with pytest.raises(EngineStopped):
            await collect(client, ticket("late"))


async def test_an_engine_that_dies_ends_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (client, runner, engine):

        def broken(now: float) -> None:
            raise RuntimeError("a defect in the planner")

        monkeypatch.setattr(engine.scheduler, "plan", broken)
        runner.let_all()
        with pytest.raises(EngineStopped):
            await collect(client, ticket("unlucky"))
        assert not client.alive


async def test_limits_cross_to_the_engine_and_back() -> None:
    async with serving(sequences=2) as (client, runner, engine):
        assert client.status().limits.sequences == 2
        limits = await client.change_limits({"max_num_seqs": 1, "max_num_batched_tokens": 7})
        assert (limits.sequences, limits.tokens) == (1, 7)
        assert client.status().limits == engine.scheduler.limits == limits
        for wrong in ({"max_num_seqs": 3}, {"max_num_seqs": 1, "maximum": 3}):
            with pytest.raises(InvalidRequest):
                await client.change_limits(wrong)
        assert engine.scheduler.limits == limits
        runner.let_all()
        await collect(client, ticket("served"))


async def test_limits_change_between_steps_while_requests_run() -> None:
    async with serving() as (client, runner, engine):
        tasks = [asyncio.ensure_future(collect(client, ticket(f"r{n}", (n,)))) for n in range(4)]
        await settled(lambda: bool(engine.scheduler.running))
        changing = asyncio.ensure_future(client.change_limits({"max_num_seqs": 1}))
        runner.let_all()
        assert (await changing).sequences == 1
        answers = await asyncio.gather(*tasks)
    for n, (tokens, _) in enumerate(answers):
        assert tokens == answer_alone(ticket(f"r{n}", (n,)).request, VOCABULARY)


async def test_a_question_to_an_engine_that_ends_is_answered() -> None:
    async with serving() as (client, runner, engine):
        task = asyncio.ensure_future(collect(client, ticket("open", tokens=40)))
        await settled(lambda: bool(engine.scheduler.running))
        client._link.send(Stop())
        asked = asyncio.ensure_future(client.change_limits({"max_num_seqs": 1}))
        runner.let_all()
        for waiting in (task, asked):
            with pytest.raises(EngineStopped):
                await waiting
        with pytest.raises(EngineStopped):
            await client.change_limits({"max_num_seqs": 1})


async def test_the_last_that_an_engine_said_is_told_when_it_dies() -> None:
    async with serving() as (client, runner, engine):
        runner.let_all()
        assert [item async for item in client.stream(ticket("a"))]
        told: list[EngineStatus] = []
        client.on_death = told.append
        client.died([])
        assert [status.tokens_sampled for status in told] == [engine.status().tokens_sampled]
        client.ready(engine.status())
        assert len(told) == 1
