"""Streams that have nothing to say for long, and those that fail after that."""

from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.serve.scripted import Gate, Script, Served

from octavo.errors import Overloaded
from octavo.serve import stream

HELLO = [{"role": "user", "content": "Hello"}]
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": HELLO}, ": nothing yet"),
    "/v1/completions": ({"prompt": "Hello", "max_tokens": 99}, ": nothing yet"),
    "/v1/responses": ({"input": "Hello"}, ": nothing yet"),
    "/v1/messages": ({"messages": HELLO, "max_tokens": 99}, 'data: {"type":"ping"}'),
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each silence is broken soon."""
    monkeypatch.setattr(stream, "SILENCE_S", 0.01)


@pytest.mark.parametrize("path", CASES)
@pytest.mark.parametrize("pause_at", [0, 5])
def test_a_silence_is_broken(
    http: httpx.Client, served: Served, impatient: None, path: str, pause_at: int
) -> None:
    """Before the first token, when the response has not begun, and in the middle; the rest is as
    without it."""
    body, alive = CASES[path]
    gate = Gate()
    served.client.script = Script(gate=gate, pause_at=pause_at)
    with http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        # A ping of Anthropic's comes once at the start of each stream.
        heard = list(lines_until(lines, alive, 4))
        gate.open()
        heard += lines
    served.client.script = Script()
    plain = http.post(path, json=body | {"stream": True}).text.splitlines()
    quiet = [line for line in heard if line and alive not in line and "event: ping" not in line]
    expected = [line for line in plain if line and alive not in line and "event: ping" not in line]
    assert [shape(line) for line in quiet] == [shape(line) for line in expected]


def lines_until(lines: Any, wanted: str, times: int) -> Any:
    """Lines up to the one that has been there so often."""
    for line in lines:
        yield line
        times -= line == wanted
        if not times:
            return


def shape(line: str) -> str:
    """What of a line does not change from one answer to another."""
    return line.partition('"delta"')[2] or line.partition('"text"')[2] or line[:20]


def test_an_error_after_a_silence_is_an_event(
    http: httpx.Client, served: Served, impatient: None
) -> None:
    gate = Gate()
    served.client.script = Script(gate=gate, error=Overloaded("full"))
    with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        list(lines_until(lines, ": nothing yet", 1))
        gate.open()
        rest = [line for line in lines if line and not line.startswith(":")]
    assert '"code":"queue_full"' in rest[0]
    assert rest[1:] == ["data: [DONE]"]


def test_a_client_that_goes_in_a_silence_cancels(
    http: httpx.Client, served: Served, impatient: None
) -> None:
    gate = Gate()
    served.client.script = Script(gate=gate)
    with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        list(lines_until(response.iter_lines(), ": nothing yet", 2))
        assert not served.client.was_cancelled.is_set()
    assert served.client.was_cancelled.wait(60)
    gate.open()


def test_clients_do_not_notice(served: Served, api: openai.OpenAI, impatient: None) -> None:
    gate = Gate()
    served.client.script = Script(gate=gate, pause_at=3)
    messages: list[Any] = HELLO
    chunks = iter(api.chat.completions.create(model="scripted", messages=messages, stream=True))
    texts = [next(chunks).choices[0].delta.content for _ in range(4)]
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as claude:
        other = Gate()
        served.client.script = Script(gate=other, pause_at=3)
        with claude.messages.stream(model="scripted", messages=messages, max_tokens=99) as talk:
            said = [next(talk.text_stream) for _ in range(3)]
            gate.open()
            other.open()
            said += talk.text_stream
    texts += [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(text or "" for text in texts) == "".join(said) == Script().text
