"""Usage in streams: once, in a last chunk of its own, and only where it was asked for."""

import json
from typing import Any

import httpx
import pytest
from tests.serve.scripted import Script, Served

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
}


def chunks_of(http: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = http.post(path, json=PATHS[path] | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    *events, end, nothing = response.text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"max_tokens": 1}, {"stop": "scripted"}, {"n": 2, "max_tokens": 5}]
)
def test_B119_usage_comes_once_at_the_end(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    whole = http.post(path, json=PATHS[path] | fields).json()["usage"]
    *others, last = chunks_of(http, path, stream_options={"include_usage": True}, **fields)
    assert others
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
    assert last["choices"] == []
    assert last["usage"] == whole


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [..., None, {}, {"include_usage": False}])
def test_B120_no_usage_where_none_was_asked_for(
    http: httpx.Client, path: str, options: dict[str, Any] | None
) -> None:
    fields = {} if options is ... else {"stream_options": options}
    chunks = chunks_of(http, path, **fields)
    assert all(chunk.get("usage") is None for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
def test_B120_options_of_a_stream_need_one(
    http: httpx.Client, path: str, stream: dict[str, Any]
) -> None:
    body = PATHS[path] | {"stream_options": {"include_usage": True}} | stream
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize("path", PATHS)
def test_B119_a_stream_that_fails_has_no_usage(
    http: httpx.Client, served: Served, path: str
) -> None:
    """What it cost is not known; the error is the last thing it says."""
    served.client.script = Script(reason="error")
    *others, last = chunks_of(http, path, stream_options={"include_usage": True})
    assert "error" in last
    assert all(chunk["usage"] is None for chunk in others)
