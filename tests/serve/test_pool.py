"""The pool over HTTP: pictures, taken once for all who look, and what is in them."""

import asyncio
import gzip
import json
from dataclasses import replace
from struct import unpack
from typing import Any

import httpx
import pytest
from tests.engine.test_showing import crank_of
from tests.serve.scripted import IDLE, Served
from tests.serve.test_debug import app_over

from octavo.core.request import Request
from octavo.core.view import STATES
from octavo.engine.crank import Crank
from octavo.engine.showing import PoolShown, show_pool
from octavo.engine.wire import Submit
from octavo.observe.metrics import Metrics
from octavo.serve.frame import document, frame
from octavo.serve.history import History, Point
from octavo.serve.pool import FRAME_TYPE
from octavo.serve.watch import LEAST_S, REST_S, Watch

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def at_work() -> Crank:
    """Two that run, of which one has two branches that share; one that waits."""
    crank = crank_of(blocks=12, sequences=3)
    requests = (("a", (1, 2, 3, 4, 5), 2), ("b", (9, 8), 1), ("c", (7,), 1))
    for name, prompt, branches in requests:
        request = Request(id=name, prompt=prompt, max_tokens=6, branches=branches)
        crank.obey([Submit(request)])
    for _ in range(2):
        crank.step()
    return crank


def shown_by(crank: Crank, *, most: int = 50) -> PoolShown:
    return show_pool(crank.engine, crank._lives, most=most)


def parts_of(body: bytes) -> tuple[dict[str, Any], list[list[int]], bytes]:
    """Head, tables and cells, taken apart as the page does it."""
    start = 4 + int.from_bytes(body[:4], "little")
    assert start % 4 == 0, "tables would not lie where a page may read them"
    head = json.loads(body[4:start])
    tables = []
    for owner in (*head["running"], *head["holds"]):
        for _, length in owner["tables"]:
            tables.append(list(unpack(f"<{length}i", body[start : start + 4 * length])))
            start += 4 * length
    return head, tables, body[start:]


def test_a_frame_and_a_document_say_the_same() -> None:
    crank = at_work()
    shown = shown_by(crank)
    head, tables, cells = parts_of(frame(3, shown))
    assert cells == shown.view.cells
    assert head["number"] == 3
    assert head["blocks"] == 12
    own = [list(table.blocks) for one in crank.engine.scheduler.running for table in one.tables]
    assert tables == own
    whole = json.loads(document(3, shown))
    runs = [byte for state, marks, count in whole["cells"] for byte in [state | marks] * count]
    assert bytes(runs) == cells
    assert whole["states"] == list(STATES)
    listed = [table["blocks"] for one in whole["pool"]["running"] for table in one["tables"]]
    assert listed == own
    for rows in ("running", "waiting"):
        for one, other in zip(head[rows], whole["pool"][rows], strict=True):
            assert {**one, "tables": 0} == {**other, "tables": 0}
    assert head["counts"] == {
        "free": shown.status.blocks_free,
        "cached": shown.status.blocks_cached,
        "owned": shown.status.blocks_owned,
        "held": shown.status.blocks_held,
        "fenced": shown.status.blocks_fenced,
        "pinned": shown.status.blocks_pinned,
    }
    assert {"id", "phase", "reason", "computed", "tables", "age_s"} <= head["running"][0].keys()


def test_no_token_of_a_prompt_is_shown() -> None:
    crank = crank_of()
    secret = 88_888_888
    crank.obey([Submit(Request(id="a", prompt=(secret,) * 9, max_tokens=2))])
    crank.step()
    assert str(secret).encode() not in document(1, shown_by(crank))
    assert secret.to_bytes(4, "little") not in frame(1, shown_by(crank))


class Engine:
    """Answers when it is let to, and counts who asks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked = 0
        self.shown = shown_by(at_work())
        self.slept: list[float] = []
        self.happens_after: int | None = 0
        """After so many sleeps something happens, or never for None."""

    async def ask(self) -> PoolShown:
        self.asked += 1
        await asyncio.sleep(0)
        return self.shown

    def status(self) -> object:
        happened = self.happens_after is not None and len(self.slept) >= self.happens_after
        return replace(self.shown.status, steps=99) if happened else self.shown.status

    async def sleep(self, duration_s: float) -> None:
        self.now += duration_s
        self.slept.append(duration_s)

    def watch(self) -> Watch:
        return Watch(self.ask, self.status, clock=lambda: self.now, sleep=self.sleep)


async def test_ten_who_look_cost_as_much_as_one() -> None:
    engine = Engine()
    watch = engine.watch()
    first = await asyncio.gather(*(watch.picture() for _ in range(10)))
    assert engine.asked == 1
    assert {id(one) for one in first} == {id(first[0])}
    second = await asyncio.gather(*(watch.picture(after=1) for _ in range(10)))
    assert engine.asked == 2
    assert {one.number for one in second} == {2}
    bodies = await asyncio.gather(*(one.form(frame) for one in second))
    assert len({id(body) for body in bodies}) == 1, "it was made more than once"


async def test_nobody_who_looks_costs_nothing() -> None:
    engine = Engine()
    engine.watch()
    await asyncio.sleep(0)
    assert engine.asked == 0


async def test_pictures_keep_their_distance() -> None:
    engine = Engine()
    watch = engine.watch()
    await watch.picture()
    engine.now += 0.1
    assert (await watch.picture()).number == 1, "the latest is new enough for who has none"
    assert (await watch.picture(after=1)).number == 2
    assert engine.now == pytest.approx(LEAST_S)
    engine.shown = PoolShown(
        view=engine.shown.view,
        running=engine.shown.running,
        waiting=engine.shown.waiting,
        status=engine.shown.status,
        at_s=0.0,
        took_s=0.02,
    )
    third = await watch.picture(after=2)
    before = engine.now
    await watch.picture(after=third.number)
    assert engine.now - before == pytest.approx(2.0), "a hundredth of the engine's time at most"


async def test_an_engine_that_does_nothing_is_left_alone() -> None:
    engine = Engine()
    engine.happens_after = None
    watch = engine.watch()
    await watch.picture()
    await watch.picture(after=1)
    assert engine.now == pytest.approx(REST_S, abs=LEAST_S)
    engine.happens_after = len(engine.slept) + 3
    before = engine.now
    await watch.picture(after=2)
    assert engine.now - before < REST_S / 2


async def test_a_server_that_drains_lets_nobody_wait() -> None:
    """Else pages that are open would hold up its end."""
    engine = Engine()
    engine.happens_after = None
    watch = Watch(
        engine.ask,
        engine.status,
        lambda: engine.asked > 0 and engine.now >= 1.0,
        clock=lambda: engine.now,
        sleep=engine.sleep,
    )
    await watch.picture()
    waited = await watch.picture(after=1)
    assert (waited.number, engine.now) == (2, pytest.approx(1.0, abs=LEAST_S))
    assert await watch.picture(after=2) is waited
    engine.now += LEAST_S
    before = len(engine.slept)
    assert (await watch.picture(after=2)).number == 3
    assert len(engine.slept) == before


async def test_one_who_goes_takes_nothing_from_the_others() -> None:
    engine = Engine()
    watch = engine.watch()
    looking = [asyncio.create_task(watch.picture()) for _ in range(2)]
    await asyncio.sleep(0)
    looking[0].cancel()
    assert (await looking[1]).number == 1


async def test_an_engine_that_fails_is_asked_again() -> None:
    engine = Engine()
    asks = iter([RuntimeError("gone"), None])

    async def ask() -> PoolShown:
        error = next(asks)
        if error is not None:
            raise error
        return engine.shown

    watch = Watch(ask, engine.status, clock=lambda: engine.now, sleep=engine.sleep)
    with pytest.raises(RuntimeError):
        await watch.picture()
    assert (await watch.picture()).number == 1


# --- endpoints


def test_the_pool_over_http(http: httpx.Client) -> None:
    whole = http.get("/debug/pool").json()
    assert whole["cells"] == [[0, 0, 16]]
    assert whole["pool"]["block_size"] == 4
    answer = http.get("/debug/pool/frame")
    assert answer.headers["content-type"] == FRAME_TYPE
    assert answer.headers["cache-control"] == "no-store"
    assert "content-encoding" not in answer.headers, "on one machine packing costs more"
    head, tables, cells = parts_of(answer.content)
    assert (head["blocks"], tables, cells) == (16, [], bytes(16))


@pytest.mark.parametrize("after", ["", "x", "-1", "1.5", "9" * 30])
def test_a_number_that_is_none_is_refused(http: httpx.Client, after: str) -> None:
    answer = http.get(f"/debug/pool/frame?after={after}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "after"


def test_far_away_pages_get_packed_frames() -> None:
    async def ask() -> tuple[httpx.Response, bytes]:
        transport = httpx.ASGITransport(app=app_over(None), client=("192.0.2.7", 1))  # type: ignore[arg-type]
        client = httpx.AsyncClient(transport=transport, base_url="http://server")
        async with client, client.stream("GET", "/debug/pool/frame") as answer:
            return answer, b"".join([piece async for piece in answer.aiter_raw()])

    answer, body = asyncio.run(ask())
    assert answer.headers["content-encoding"] == "gzip"
    assert parts_of(gzip.decompress(body))[0]["blocks"] == 16


def test_a_block_over_http(http: httpx.Client) -> None:
    block = http.get("/debug/pool/blocks/3").json()
    assert block == {
        "block": 3,
        "state": "free",
        "pinned": False,
        "moving": False,
        "epoch": 0,
        "owners": [],
        "key": "",
        "prefix_tokens": 0,
        "evicted_after": None,
        "given_ago_s": None,
    }
    refused = http.get("/debug/pool/blocks/16")
    assert refused.status_code == 400
    assert "from 0 to 15" in refused.json()["error"]["message"]
    assert http.get("/debug/pool/blocks/x").json()["error"]["param"] == "block"


# --- history


class Told:
    def __init__(self) -> None:
        self.now = 1000.0
        self.history = History(Metrics(), clock=lambda: self.now)

    def take(self, **changes: Any) -> None:
        self.history.take(replace(IDLE, **changes))
        self.now += 2.0


def test_points_say_how_it_fares() -> None:
    told = Told()
    told.take(running=2, table_entries=12, blocks_owned=10, preemptions=0, blocks_total=100)
    told.take(running=4, table_entries=12, blocks_owned=50, preemptions=1)
    first, last = told.history.since(0.0)
    assert (first.utilisation, last.utilisation) == (0.1, 0.5)
    assert (first.table_depth, last.table_depth) == (6.0, 3.0)
    assert (first.preemptions_a_minute, last.preemptions_a_minute) == (0.0, 30.0)
    assert told.history.since(first.at_s) == (last,)


def test_a_hit_ratio_is_that_of_the_last_seconds() -> None:
    told = Told()
    told.take(prefix_tokens_queried=1000, prefix_tokens_hit=0)
    told.take(prefix_tokens_queried=1100, prefix_tokens_hit=75)
    for _ in range(9):
        told.take(prefix_tokens_queried=1100, prefix_tokens_hit=75)
    ratios = [point.hit_ratio for point in told.history.since(0.0)]
    assert ratios[:2] == [None, 0.75]
    assert ratios[-1] is None, "nothing was looked up lately"


def test_points_come_no_faster_than_they_should() -> None:
    told = Told()
    told.take()
    told.now -= 1.5
    told.take()
    assert len(told.history.since(0.0)) == 1


def test_an_engine_that_starts_anew_shows_no_negative_rate() -> None:
    told = Told()
    told.take(preemptions=50, started_s=0.0)
    told.take(preemptions=1, started_s=9.0)
    assert told.history.since(0.0)[-1].preemptions_a_minute == 30.0


def test_the_history_over_http(served: Served, http: httpx.Client) -> None:
    told = http.get("/debug/history").json()
    assert told["status"] == "ok"
    assert told["fields"] == list(Point.__struct_fields__)
    assert len(told["points"][-1]) == len(told["fields"])
    last = told["points"][-1][0]
    assert all(
        at_s > last for at_s, *_ in http.get(f"/debug/history?after={last}").json()["points"]
    )
    assert http.get("/debug/history?after=x").json()["error"]["param"] == "after"
    served.client.draining = True
    assert http.get("/debug/history").json()["status"] == "draining"
