"""The debug pages: the lives of the last requests, and 404 for others."""

import asyncio
from pathlib import Path
from random import Random

import httpx
import msgspec
from tests.core.serving import Setup
from tests.observe.recording import core_setup, random_run, small_setup, watched
from tests.serve.scripted import ScriptedClient, byte_tokenizer

from octavo.core.request import Request
from octavo.engine.door import Door
from octavo.observe.explain import account
from octavo.observe.journal import Entry, Journal, read_journal
from octavo.observe.lives import Lives
from octavo.serve.app import create_app
from octavo.serve.service import ServeSettings


def app_over(lives: Lives | None) -> object:
    tokenizer = byte_tokenizer()
    door = Door(tokenizer, max_model_len=64, vocab_size=tokenizer.vocab_size)
    settings = ServeSettings(model_names=("scripted",), version="1.2.3")
    client = ScriptedClient(tokenizer)
    client.lives = lives or Lives()
    return create_app(client, door, settings)


def get(app: object, path: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(path)

    return asyncio.run(ask())


def lives_of(*names: str) -> Lives:
    lives = Lives()
    run = watched(Setup(), lives)
    for name in names:
        run.submit(Request(id=name, prompt=(1, 2, 3), max_tokens=2))
    run.finish()
    return lives


def test_the_list_and_one_request() -> None:
    app = app_over(lives_of("a", "b"))
    listed = get(app, "/debug/requests").json()["requests"]
    assert [(each["id"], each["state"], each["story"]) for each in listed] == [
        ("a", "length", []),
        ("b", "length", []),
    ]
    for name in ("b", "cmpl-b", "chatcmpl-b"):
        told = get(app, f"/debug/requests/{name}").json()["request"]
        assert (told["id"], told["prompt_tokens"], told["answer_tokens"]) == ("b", 3, 2)
        assert told["story"][0]["text"].startswith("arrived")
        assert told["receipt"]["peak_blocks"] == told["peak_blocks"] > 0


def test_a_beginning_of_an_id_is_enough() -> None:
    app = app_over(lives_of("abc", "abd", "b"))
    for name in ("abd", "msg_abd", "resp_abd", "cmpl-abd"):
        assert get(app, f"/debug/requests/{name}").json()["request"]["id"] == "abd"
    assert get(app, "/debug/requests/chatcmpl-abc").json()["request"]["id"] == "abc"
    several = get(app, "/debug/requests/ab")
    assert several.status_code == 404
    assert "2 requests begin with 'ab'" in several.json()["error"]["message"]
    assert get(app, "/debug/requests/abe").status_code == 404


def test_an_unknown_request_is_404_in_the_shape_of_errors() -> None:
    answer = get(app_over(lives_of("a")), "/debug/requests/nobody")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "request_not_found"
    assert "'nobody'" in error["message"]


def test_without_requests_the_list_is_empty() -> None:
    assert get(app_over(None), "/debug/requests").json() == {"requests": []}


def test_a_life_is_told_as_from_the_journal(tmp_path: Path, seed: int) -> None:
    """At work and when it has ended: what `octavo explain` reads is what the server tells."""
    random = Random(seed)
    for number in range(5):
        setup, live = small_setup(random), Lives()
        file = tmp_path / str(number)
        journal = Journal(file, core_setup(setup), octavo="1", started_at=0.0)
        run = watched(setup, live, journal)
        run.submit(*(Request(id=name, prompt=(7, 8), max_tokens=9) for name in "abc"))
        run.step()
        for _ in range(2):
            read = Lives(ended=None)
            for line in read_journal(file):
                if isinstance(line, Entry):
                    read.observe(line.call, line.answer)
            assert len(read.all()) >= 3
            for life in read.all():
                told = get(app_over(live), f"/debug/requests/{life.id.replace('#', '%23')}")
                kept = read.named(life.id)
                assert kept is not None
                expected = account(kept, read.started_s or 0.0)
                assert told.json()["request"] == msgspec.json.decode(msgspec.json.encode(expected))
            if not run.scheduler.idle:
                random_run(random, run)
        journal.close()
