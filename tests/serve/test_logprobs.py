"""Log-probabilities and echo: both endpoints, streamed and not, with the real client."""

from itertools import product
from typing import Any

import httpx
import openai
import pytest
from tests.serve.scripted import Script, Served

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TEXT = "Zwölf 👩‍👧 €"
SPELLED = [*TEXT.encode()]


def streamed_chat(api: openai.OpenAI, **settings: Any) -> list[tuple[str, list[Any] | None]]:
    """Text and log-probabilities of each choice, joined."""
    count = settings.get("n", 1)
    texts, entries = [""] * count, [[] for _ in range(count)]  # type: ignore[var-annotated]
    for chunk in api.chat.completions.create(
        model="scripted", messages=HELLO, stream=True, **settings
    ):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.logprobs is not None:
            entries[choice.index] += choice.logprobs.model_dump()["content"]
    asked = settings.get("logprobs", False)
    return [(text, entry if asked else None) for text, entry in zip(texts, entries, strict=True)]


def whole_chat(api: openai.OpenAI, **settings: Any) -> list[tuple[str, list[Any] | None]]:
    answer = api.chat.completions.create(model="scripted", messages=HELLO, **settings)
    return [
        (
            choice.message.content or "",
            choice.logprobs.model_dump()["content"] if choice.logprobs else None,
        )
        for choice in answer.choices
    ]


COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def streamed_text(api: openai.OpenAI, prompt: Any, **settings: Any) -> list[Any]:
    count = settings.get("n", 1)
    texts = [""] * count
    columns: list[dict[str, list[Any]]] = [{name: [] for name in COLUMNS} for _ in range(count)]
    for chunk in api.completions.create(
        model="scripted", prompt=prompt, stream=True, max_tokens=50, **settings
    ):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            for name in COLUMNS:
                columns[choice.index][name] += getattr(choice.logprobs, name)
    asked = settings.get("logprobs") is not None
    return [(text, own if asked else None) for text, own in zip(texts, columns, strict=True)]


def whole_text(api: openai.OpenAI, prompt: Any, **settings: Any) -> list[Any]:
    answer = api.completions.create(model="scripted", prompt=prompt, max_tokens=50, **settings)
    return [
        (choice.text, choice.logprobs.model_dump() if choice.logprobs else None)
        for choice in answer.choices
    ]


def test_chat_has_an_entry_for_each_token(api: openai.OpenAI, served: Served) -> None:
    served.client.script = Script(text=TEXT)
    ((text, entries),) = whole_chat(api, logprobs=True, top_logprobs=2)
    assert text == TEXT
    assert entries is not None
    *spelling, end = entries
    assert [byte for entry in spelling for byte in entry["bytes"]] == SPELLED
    assert spelling[0]["token"] == "Z"
    assert spelling[2]["token"] == "\\xc3"  # a half of ö
    assert bytes(spelling[2]["bytes"]) == b"\xc3"
    assert {entry["logprob"] for entry in entries} == {-0.25}
    for entry in spelling:
        first, second = entry["top_logprobs"]
        assert (first["token"], first["logprob"]) == (entry["token"], -0.25)
        assert second["logprob"] == -1.25
    assert end["token"] == served.door.tokenizer.token_bytes(0).decode()
    assert "\ufffd" not in str(entries)


@pytest.mark.parametrize(
    "settings",
    [
        {"logprobs": asked, "n": n, **top, **stop}
        for asked, n, top, stop in product(
            (True, False),
            (1, 2),
            ({}, {"top_logprobs": 3}),
            ({}, {"stop": [" €", "👩"]}, {"max_tokens": 4}),
        )
        if asked or not top
    ],
    ids=str,
)
def test_a_streamed_chat_is_the_whole_one(
    api: openai.OpenAI, served: Served, settings: dict[str, Any]
) -> None:
    served.client.script = Script(text=TEXT)
    assert streamed_chat(api, **settings) == whole_chat(api, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"echo": echo, "n": n, **logprobs, **stop}
        for echo, n, logprobs, stop in product(
            (True, False), (1, 2), ({}, {"logprobs": 0}, {"logprobs": 3}), ({}, {"stop": "👩"})
        )
    ],
    ids=str,
)
def test_B077_a_streamed_completion_is_the_whole_one(
    api: openai.OpenAI, served: Served, settings: dict[str, Any]
) -> None:
    served.client.script = Script(text=TEXT)
    whole = whole_text(api, "Ünd", **settings)
    assert streamed_text(api, "Ünd", **settings) == whole
    for text, columns in whole:
        assert text.startswith("Ünd") == settings["echo"]
        if columns is None:
            continue
        offsets = columns["text_offset"]
        assert offsets == sorted(offsets)
        assert len({len(columns[name]) for name in COLUMNS}) == 1
        if "stop" not in settings:
            assert offsets[-1] == len(text)
            for token, offset in zip(columns["tokens"][:-1], offsets, strict=False):
                assert token.startswith("\\x") or text[offset] == token
        prompt = len("Ünd".encode()) if settings["echo"] else 0
        if prompt:
            assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
            assert offsets[:prompt] == [0, 0, 1, 2]
        rows = list(
            zip(columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True)
        )
        for token, own, top in rows[1 if prompt else 0 : prompt]:
            assert top[token] == own == -1.5
            assert len(top) == max(settings["logprobs"], 1)
        for token, own, top in rows[prompt:]:
            assert top[token] == own == -0.25
            assert len(top) == max(settings["logprobs"], 1)


def test_an_echo_of_ids_is_their_text(api: openai.OpenAI, served: Served) -> None:
    ids = served.door.tokenizer.encode("Ünd", parse_special=False, add_special=False)
    served.client.script = Script(text="Hallo")
    assert whole_text(api, ids, echo=True) == [("ÜndHallo", None)]
    prompts = ["a", "b"]
    texts = [text for text, _ in whole_text(api, prompts, echo=True, n=2)]
    assert [text[:2] for text in texts] == ["aH", "a1", "bH", "b1"]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_scores_of_a_prompt(http: httpx.Client, served: Served, count: int) -> None:
    """As vLLM shows them: of each token but the first a map by ids, with ranks."""
    body = {"prompt": ["ab", "abc"], "n": 2, "prompt_logprobs": count}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [2, 2, 3, 3]
    assert all(ticket.request.prompt_logprobs == count for ticket in served.client.tickets)
    tokens = served.client.tickets[1].request.prompt
    nothing, *entries = choices[2]["prompt_logprobs"]
    assert nothing is None
    for entry, token in zip(entries, tokens[1:], strict=True):
        own = {"logprob": -1.5, "rank": 2, "decoded_token": chr(entry_byte(served, token))}
        assert entry[str(token)] == own
        assert len(entry) == max(count, 2 if count == 1 else 1)
        if count:
            assert entry[str(token + 1)]["rank"] == 1
    chat = http.post("/v1/chat/completions", json={"messages": HELLO, "prompt_logprobs": count})
    assert len(chat.json()["prompt_logprobs"]) == len(served.client.tickets[2].request.prompt)
    plain = http.post("/v1/chat/completions", json={"messages": HELLO})
    assert "prompt_logprobs" not in plain.json()


def entry_byte(served: Served, token: int) -> int:
    (byte,) = served.door.tokenizer.token_bytes(token)
    return byte


def refused(response: httpx.Response, field: str, text: str) -> None:
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert text in error["message"]


def test_what_cannot_be_given_is_refused_by_name(http: httpx.Client) -> None:
    chat = {"messages": HELLO}
    for fields, field, text in (
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "at most 20 here, not -1 (all "),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "at least -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "--max-logprobs allows more"),
        ({"prompt_logprobs": -2}, "prompt_logprobs", "at least -1"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream: false"),
    ):
        refused(http.post("/v1/chat/completions", json=chat | fields), field, text)
    for fields, field, text in (
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"logprobs": -1}, "logprobs", "at most 20 here, not -1 (all "),
        ({"logprobs": -2}, "logprobs", "at least -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "at most 20 here"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream: false"),
    ):
        refused(http.post("/v1/completions", json={"prompt": "a"} | fields), field, text)
    assert http.post("/v1/chat/completions", json=chat | {"top_logprobs": 0}).status_code == 200
