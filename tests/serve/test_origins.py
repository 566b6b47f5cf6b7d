"""Pages of other origins are refused before anything is done, unless they are allowed."""

from collections.abc import Iterator

import httpx
import pytest
from tests.serve.scripted import Served, scripted_server

from octavo.errors import ConfigError
from octavo.serve.keyfile import keys_of
from octavo.serve.keys import Keyring
from octavo.serve.origins import check_origins

FRIEND, STRANGER = "https://chat.example.org", "https://evil.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}


@pytest.fixture(scope="module")
def friendly() -> Iterator[Served]:
    with scripted_server(allowed_origins=(FRIEND,)) as served:
        yield served


def post(served: Served, path: str, origin: str | None, **headers: str) -> httpx.Response:
    named = {} if origin is None else {"origin": origin}
    return httpx.post(served.url + path, json={"prompt": "x"}, headers={**headers, **named})


def test_by_default_only_pages_of_the_server_itself(served: Served) -> None:
    path = "/v1/completions"
    for origin in (STRANGER, FRIEND, "null", "file://", "", served.url.replace("127.0.0.1", "x")):
        response = post(served, path, origin)
        assert response.status_code == 403, origin
        assert response.json()["error"]["code"] == "permission_denied"
        assert "access-control-allow-origin" not in response.headers
    assert served.client.tickets == []
    for origin in (None, served.url, served.url.replace("http:", "https:")):
        response = post(served, path, origin)
        assert response.status_code == 200, origin
        assert "access-control-allow-origin" not in response.headers


def test_a_page_elsewhere_cannot_flush_the_cache(served: Served) -> None:
    """A form needs no preflight, and its page could not read the answer; the harm would be done."""
    assert post(served, "/admin/cache/flush", STRANGER).status_code == 403
    assert httpx.options(f"{served.url}/admin/limits", headers={"origin": STRANGER} | PREFLIGHT)


def test_an_allowed_origin(friendly: Served) -> None:
    response = post(friendly, "/v1/completions", FRIEND)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == FRIEND
    assert post(friendly, "/v1/completions", STRANGER).status_code == 403
    asked = httpx.options(f"{friendly.url}/v1/completions", headers={"origin": FRIEND} | PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == FRIEND
    assert "x-api-key" in asked.headers["access-control-allow-headers"]
    asked = httpx.options(
        f"{friendly.url}/v1/completions", headers={"origin": STRANGER} | PREFLIGHT
    )
    assert asked.status_code == 403


def test_every_origin_and_keys_beside() -> None:
    """A preflight brings no key; the request needs one, and its refusal can be read."""
    ring = Keyring(keys_of(["sk-a"], [], None))
    with scripted_server(allowed_origins=("*",), keyring=ring) as served:
        url = f"{served.url}/v1/completions"
        assert httpx.options(url, headers={"origin": STRANGER} | PREFLIGHT).status_code == 200
        refused = post(served, "/v1/completions", STRANGER)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "*"
        key = {"authorization": "Bearer sk-a"}
        assert post(served, "/v1/completions", STRANGER, **key).status_code == 200
        assert httpx.get(f"{served.url}/version", headers={"origin": STRANGER}).status_code == 401


@pytest.mark.parametrize("origin", ["example.org", "https://a.org/", "https://", "null", "*.org"])
def test_what_is_no_origin(origin: str) -> None:
    check_origins((FRIEND, "*", "http://localhost:3000", "app://octavo"))
    with pytest.raises(ConfigError, match="is no origin"):
        check_origins((FRIEND, origin))
