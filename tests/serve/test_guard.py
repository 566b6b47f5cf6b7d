"""API keys over HTTP: who gets in, who does not, and what a key changes."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from tests.serve.oracle import oracle_server
from tests.serve.scripted import (
    ABOUT,
    Gate,
    Script,
    ScriptedClient,
    Served,
    byte_tokenizer,
    scripted_server,
)

from octavo.engine.door import Door
from octavo.serve.app import create_app
from octavo.serve.guard import RIGHTS, listed_right
from octavo.serve.keyfile import keys_of
from octavo.serve.keys import Keyring
from octavo.serve.service import ServeSettings

FILE = """
[[key]]
name = "alice"
key = "sk-alice"

[[key]]
name = "bob"
key = "sk-bob"
highest_priority = 3

[[key]]
name = "slow"
key = "sk-slow"
tokens_per_minute = 20

[[key]]
name = "rare"
key = "sk-rare"
requests_per_minute = 2

[[key]]
name = "narrow"
key = "sk-narrow"
max_concurrent = 1

[[key]]
name = "watcher"
key = "sk-watcher"
metrics = true
"""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hello", "max_tokens": 5},
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "hello", "max_output_tokens": 5},
    "/api/chat": {"messages": CHAT["messages"], "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(FILE)
    ring = Keyring(keys_of(["sk-plain", "sk-plainer"], ["sk-admin"], file))
    with scripted_server(keyring=ring) as served:
        yield served


@pytest.fixture
def visited(guarded: Served) -> Iterator[httpx.Client]:
    guarded.client.script = Script()
    guarded.client.tickets.clear()
    with httpx.Client(base_url=guarded.url, timeout=60) as http:
        yield http


def routes_of_an_app() -> list[Route]:
    tokenizer = byte_tokenizer()
    door = Door(tokenizer, max_model_len=64, vocab_size=tokenizer.vocab_size)
    settings = ServeSettings(model_names=("m",), version="0", about=ABOUT)
    app: Starlette = create_app(ScriptedClient(tokenizer), door, settings)
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.routes), "others than routes need a thought here"
    return routes


def test_every_route_is_denied_unless_it_is_listed_as_open(visited: httpx.Client) -> None:
    """The real route table, without a key and with one that is not known."""
    for route in routes_of_an_app():
        path = route.path.replace("{id}", "x").replace("{name:path}", "scripted")
        path = path.replace("{name}", "main.js").replace("{block}", "1")
        for method in route.methods or ():
            for headers in ({}, bearer("sk-wrong"), {"x-api-key": "sk-wrong"}):
                response = visited.request(method, path, headers=headers)
                wanted = 200 if listed_right(route.path) == "open" else 401
                assert response.status_code == wanted, (method, path)
    for path in ("/nothing", "/v1/models/", "/health/", "/HEALTH", "/admin"):
        assert visited.get(path).status_code == 401, path


def test_every_route_has_a_right_of_its_own_and_no_right_is_left_over() -> None:
    paths = {route.path for route in routes_of_an_app()}
    for path in paths:
        assert path in RIGHTS or f"/v1{path}" in RIGHTS, f"{path}: say who may in serve.guard"
    assert paths >= RIGHTS.keys()
    opened = {path for path, right in RIGHTS.items() if right == "open"}
    assert opened == {"/", "/web/{name}", "/health", "/health/live", "/health/ready"}


def test_what_is_not_listed_is_the_admins() -> None:
    assert listed_right("/v1/new") == listed_right("/new") == "admin"


def test_each_right_opens_its_own_paths(visited: httpx.Client) -> None:
    for route in routes_of_an_app():
        right = listed_right(route.path)
        path = route.path.replace("{id}", "x").replace("{name:path}", "scripted")
        path = path.replace("{name}", "main.js").replace("{block}", "1")
        for method in route.methods or ():
            for key, rights in (
                ("sk-plain", ("open", "use")),
                ("sk-watcher", ("open", "use", "metrics")),
                ("sk-admin", ("open", "use", "metrics", "admin")),
            ):
                response = visited.request(method, path, headers=bearer(key))
                assert response.status_code != 401
                assert (response.status_code == 403) == (right not in rights), (key, method, path)


def test_an_unknown_path_is_told_to_those_with_a_key(visited: httpx.Client) -> None:
    assert visited.get("/nothing", headers=bearer("sk-plain")).status_code == 404
    assert visited.get("/v1/completions", headers=bearer("sk-plain")).status_code == 405


@pytest.mark.parametrize("path", BODIES)
def test_errors_are_in_the_shape_of_each_api(visited: httpx.Client, path: str) -> None:
    response = visited.post(path, json=BODIES[path], headers=bearer("sk-nobody"))
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    if path == "/v1/messages":
        assert response.json()["type"] == "error"
        assert error["type"] == "authentication_error"
    elif path.startswith("/api/"):
        assert "API key" in error
    else:
        assert error["code"] == "invalid_api_key"
    assert "sk-nobody" not in response.text
    assert visited.post(path, json=BODIES[path], headers=bearer("sk-alice")).status_code == 200


def test_the_usual_clients(guarded: Served) -> None:
    def api(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)

    with api("sk-plainer") as good, api("sk-bad") as bad:
        assert good.chat.completions.create(model="scripted", **CHAT).choices
        with pytest.raises(openai.AuthenticationError, match="not known here"):
            bad.models.list()

    def claude(key: str) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=guarded.url, api_key=key, max_retries=0)

    with claude("sk-plain") as good2, claude("sk-bad") as bad2:
        assert good2.messages.create(model="scripted", **CHAT).content
        with pytest.raises(anthropic.AuthenticationError):
            bad2.messages.create(model="scripted", **CHAT)


@pytest.mark.parametrize("path", BODIES)
def test_the_tenant_and_the_namespace_come_from_the_key(
    guarded: Served, visited: httpx.Client, path: str
) -> None:
    for key, tenant, salt in (
        ("sk-alice", "alice", "5:alice"),
        ("sk-bob", "bob", "3:bob"),
        ("sk-plain", "", "0:"),
        ("sk-plainer", "", "0:"),
    ):
        assert visited.post(path, json=BODIES[path], headers=bearer(key)).status_code == 200
        asked = guarded.client.tickets[-1].request
        assert (asked.tenant, asked.salt) == (tenant, salt)
        assert asked.priority == (3 if key == "sk-bob" else 0)


def test_a_key_speaks_for_no_other_tenant(guarded: Served, visited: httpx.Client) -> None:
    path, alice = "/v1/completions", bearer("sk-alice")
    own = {"prompt": "a", "tenant": "alice", "cache_salt": "3:bob"}
    assert visited.post(path, json=own, headers=alice).status_code == 200
    assert guarded.client.tickets[-1].request.salt == "5:alice3:bob"
    for tenant in ("bob", ""):
        for stream in (False, True):
            body = own | {"tenant": tenant, "stream": stream}
            response = visited.post(path, json=body, headers=alice)
            assert response.status_code == 403
            assert response.json()["error"]["param"] == "tenant"
    assert len(guarded.client.tickets) == 1


def test_a_priority_is_no_higher_than_the_key_has(guarded: Served, visited: httpx.Client) -> None:
    path, bob = "/v1/chat/completions", bearer("sk-bob")
    assert visited.post(path, json=CHAT | {"priority": 7}, headers=bob).status_code == 200
    assert guarded.client.tickets[-1].request.priority == 7
    response = visited.post(path, json=CHAT | {"priority": 2}, headers=bob)
    assert (response.status_code, response.json()["error"]["param"]) == (403, "priority")


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/messages", "rate_limit_error"), ("/v1/completions", "rate_limit_error")],
)
def test_tokens_a_minute(guarded: Served, path: str, kind: str, tmp_path: Path) -> None:
    """Prompts and answers count; the second request waits for what the first one took."""
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    with scripted_server(keyring=Keyring(keys_of([], [], file))) as served:
        first = httpx.post(served.url + path, json=BODIES[path], headers=bearer("sk-slow"))
        assert first.status_code == 200
        ask = BODIES[path] | {"max_tokens": 40}
        httpx.post(served.url + path, json=ask, headers=bearer("sk-slow"))
        response = httpx.post(served.url + path, json=ask, headers=bearer("sk-slow"))
        assert response.status_code == 429
        assert response.json()["error"]["type"] == kind
        seconds = int(response.headers["retry-after"])
        said = re.search(r"try again in (\d+) s", response.json()["error"]["message"])
        assert said is not None
        assert 5 < seconds <= 300, "more was taken than a minute brings"
        assert seconds - int(said[1]) in (0, 1), "rounded up, and to the nearest"
        assert (
            httpx.post(served.url + path, json=ask, headers=bearer("sk-alice")).status_code == 200
        )


def test_requests_a_minute(visited: httpx.Client) -> None:
    rare = bearer("sk-rare")
    assert [visited.get("/v1/models", headers=rare).status_code for _ in range(3)] == [
        200,
        200,
        429,
    ]
    assert visited.get("/health", headers=rare).status_code == 200


def test_requests_at_once(guarded: Served, visited: httpx.Client) -> None:
    gate, narrow = Gate(), bearer("sk-narrow")
    guarded.client.script = Script(gate=gate)
    path = "/v1/completions"
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(
            httpx.post,
            guarded.url + path,
            json=BODIES[path] | {"stream": True},
            headers=narrow,
            timeout=60,
        )
        assert gate.reached.wait(60)
        assert visited.post(path, json=BODIES[path], headers=narrow).status_code == 429
        gate.open()
        assert first.result().status_code == 200
    guarded.client.script = Script()
    assert visited.post(path, json=BODIES[path], headers=narrow).status_code == 200


def test_health_tells_strangers_nothing_of_the_load(visited: httpx.Client) -> None:
    assert visited.get("/health").json() == {"status": "ok"}
    assert visited.get("/health", headers=bearer("sk-plain")).json() == {"status": "ok"}
    assert visited.get("/health", headers=bearer("sk-watcher")).json()["blocks_total"] == 100


def test_no_key_is_in_an_error_a_metric_or_a_header(visited: httpx.Client) -> None:
    for key in ("sk-watcher", "sk-alice", "sk-unheard-of"):
        for path in ("/metrics", "/v1/models/x", "/nothing", "/admin/limits", "/debug/requests"):
            response = visited.get(path, headers=bearer(key) | {"x-api-key": key})
            assert key not in response.text
            assert key not in json.dumps(dict(response.headers))


def test_odd_headers(visited: httpx.Client) -> None:
    for value in (
        "",
        "Bearer",
        "bearer sk-bad",
        "Basic sk-plain",
        "sk-plain",
        "Bearer \xff",
    ):
        headers = {"authorization": value.encode("latin-1")}
        assert visited.get("/v1/models", headers=headers).status_code == 401, value
    good = [("authorization", "Bearer sk-bad"), ("x-api-key", "sk-plain")]
    assert visited.get("/v1/models", headers=good).status_code == 200
    assert visited.get("/v1/models", params={"api_key": "sk-plain"}).status_code == 401


def test_no_key_probes_what_another_has_cached(tmp_path: Path) -> None:
    """Neither by the count of cached tokens, nor with a salt of its own, nor at /debug."""
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    body = {"prompt": "A secret that somebody else has asked about", "max_tokens": 1}
    with oracle_server(keyring=Keyring(keys_of(["sk-plain"], [], file))) as served:

        def cached(key: str, **fields: object) -> int:
            response = httpx.post(
                f"{served.url}/v1/completions", json=body | fields, headers=bearer(key), timeout=60
            )
            usage = response.json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert (cached("sk-alice"), cached("sk-alice")) == (0, 32)
        for salt in ("5:alice", "alice", "0:"):
            assert cached("sk-plain", cache_salt=salt) == cached("sk-bob", cache_salt=salt) == 0
        assert cached("sk-bob") == 0
        assert cached("sk-alice") == 32
        for path in ("/debug/cache", "/debug/requests"):
            response = httpx.request("POST", served.url + path, json=body, headers=bearer("sk-bob"))
            assert response.status_code == 403
