"""What waits for a reader is merged, without loss or repeat, and stays small."""

import asyncio
import tracemalloc

import numpy as np
import pytest
from tests.engine.test_client import TOKENIZER, ticket

from octavo.core.events import Finished, PromptScored, Receipt, Score, Token
from octavo.engine.mailbox import Item, Mailbox
from octavo.errors import EngineError
from octavo.text.assembler import Delta, Ended

pytestmark = pytest.mark.anyio
RECEIPT = Receipt(
    prompt_tokens=2,
    completion_tokens=0,
    cached_tokens=0,
    recomputed_tokens=0,
    preemptions=0,
    arrival_s=0.0,
    admitted_s=0.0,
    first_token_s=0.0,
    finished_s=0.0,
    peak_blocks=1,
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def token(number: int, branch: int = 0) -> Token:
    drawn = (number * 7 + branch) % TOKENIZER.vocab_size
    return Token("a", number, drawn, -number / 7, branch)


def end(branch: int = 0) -> Finished:
    return Finished("a", "length", None, "", RECEIPT, branch)


def joined(items: list[Item], branch: int) -> tuple[str, list[int], list[float]]:
    deltas = [item for item in items if isinstance(item, Delta) and item.branch == branch]
    return (
        "".join(delta.text for delta in deltas),
        [each for delta in deltas for each in delta.token_ids],
        [each for delta in deltas for each in delta.logprobs],
    )


async def test_who_keeps_up_gets_each_piece_as_it_came() -> None:
    mailbox = Mailbox(ticket("a"))
    for number in range(9):
        assert not mailbox.put(token(number))
        (item,) = await mailbox.take()
        assert isinstance(item, Delta)
        assert item.token_ids == (token(number).token,)
    mailbox.put(end())
    (last,) = await mailbox.take()
    assert isinstance(last, Ended)
    assert mailbox.unfinished == 0


async def test_B106_however_it_is_read_the_answer_is_the_same(rng: np.random.Generator) -> None:
    whole: list[Item] = []
    for trial in range(20):
        mailbox, items = Mailbox(ticket("a", branches=3)), list[Item]()
        events = [token(number, branch) for number in range(50) for branch in range(3)]
        for event in [*events, end(2), end(0), end(1)]:
            mailbox.put(event)
            if trial and rng.random() < 0.1 * (trial % 5):
                items += await mailbox.take()
        items += await mailbox.take() if mailbox._arrived.is_set() else []
        whole = whole or items
        for branch in range(3):
            assert joined(items, branch) == joined(whole, branch)
            assert joined(items, branch)[1] == [token(n, branch).token for n in range(50)]
            of_branch = [item for item in items if item.branch == branch]
            assert [isinstance(item, Ended) for item in of_branch].index(True) == len(of_branch) - 1
    assert len(whole) == 6, "nobody read: one piece and one end of each"


async def test_B106_what_waits_costs_what_the_answer_is_long() -> None:
    count = 20_000
    mailbox = Mailbox(ticket("a"))
    tracemalloc.start()
    for number in range(count):
        mailbox.put(token(number))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    (delta,) = await mailbox.take()
    assert isinstance(delta, Delta)
    assert len(delta.token_ids) == count
    # Eight bytes an id, eight a logprob, and half as much again to grow.
    assert held < 1.5 * (16 * count + len(delta.text.encode())) + 10_000


async def test_an_error_comes_after_what_was_there() -> None:
    mailbox = Mailbox(ticket("a"))
    mailbox.put(token(0))
    mailbox.fail(EngineError("it broke"))
    (delta,) = await mailbox.take()
    assert isinstance(delta, Delta)
    for _ in range(2):
        with pytest.raises(EngineError, match="it broke"):
            await mailbox.take()


async def test_a_reader_waits_for_the_first_piece() -> None:
    mailbox = Mailbox(ticket("a"))
    reading = asyncio.ensure_future(mailbox.take())
    await asyncio.sleep(0)
    assert not reading.done()
    mailbox.put(token(0))
    assert len(await reading) == 1


async def test_a_stop_string_needs_no_reader() -> None:
    text = TOKENIZER.decode([token(1).token], skip_special=False)
    mailbox = Mailbox(ticket("a", stop=text))
    assert [mailbox.put(token(number)) for number in range(2)] == [False, True]


async def test_the_scores_of_a_prompt_wait_with_the_answer() -> None:
    scores = tuple(Score(at, -at / 7, at) for at in range(1, 9))
    mailbox = Mailbox(ticket("a"))
    for event in (
        PromptScored("a", 1, scores[:3]),
        PromptScored("a", 1, scores[:5]),  # told again from the beginning by another engine
        PromptScored("a", 6, scores[5:]),
        token(0),
        token(1),
    ):
        mailbox.put(event)
    (item,) = await mailbox.take()
    assert isinstance(item, Delta)
    assert item.prompt == scores
    assert item.token_ids == (token(0).token, token(1).token)
