"""One server for all tests; its script starts fresh in each."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from tests.serve.scripted import IDLE, Script, Served, scripted_server


@pytest.fixture(scope="session")
def _server() -> Iterator[Served]:
    with scripted_server(max_body_bytes=100_000) as served:
        yield served


@pytest.fixture
def served(_server: Served) -> Served:
    client = _server.client
    client.script, client.state = Script(), IDLE
    client.alive, client.draining, client.restarting = True, False, False
    client.tickets.clear()
    client.cancelled.clear()
    client.was_cancelled.clear()
    return _server


@pytest.fixture(scope="session")
def _api(_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{_server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture(scope="session")
def _http(_server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=_server.url, timeout=60) as http:
        yield http


@pytest.fixture
def api(served: Served, _api: openai.OpenAI) -> openai.OpenAI:
    return _api


@pytest.fixture
def http(served: Served, _http: httpx.Client) -> httpx.Client:
    return _http
