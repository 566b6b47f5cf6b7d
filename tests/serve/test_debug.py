"""The debug pages: the lives of the last requests, and 404 for others."""

import asyncio

import httpx
from tests.core.serving import Setup
from tests.observe.recording import watched
from tests.serve.scripted import ScriptedClient, byte_tokenizer

from octavo.core.request import Request
from octavo.engine.door import Door
from octavo.observe.lives import Lives
from octavo.serve.app import create_app
from octavo.serve.service import ServeSettings


def app_over(lives: Lives | None) -> object:
    tokenizer = byte_tokenizer()
    door = Door(tokenizer, max_model_len=64, vocab_size=tokenizer.vocab_size)
    settings = ServeSettings(model_names=("scripted",), version="1.2.3")
    return create_app(ScriptedClient(tokenizer), door, settings, lives)


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


def test_an_unknown_request_is_404_in_the_shape_of_errors() -> None:
    answer = get(app_over(lives_of("a")), "/debug/requests/nobody")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "request_not_found"
    assert "'nobody'" in error["message"]


def test_without_requests_the_list_is_empty() -> None:
    assert get(app_over(None), "/debug/requests").json() == {"requests": []}
