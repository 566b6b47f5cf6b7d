"""Text to tokens and back, in vLLM's shape."""

from typing import Any

import httpx
import pytest
from tests.serve.scripted import CONTEXT, Served, scripted_server

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


def tokenize(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == CONTEXT
    return answer


def test_a_prompt(http: httpx.Client, served: Served) -> None:
    answer = tokenize(http, model="scripted", prompt="aé")
    assert answer["tokens"] == served.door.encode("aé", add_special=True)
    assert answer["token_strs"] is None
    texts = tokenize(http, prompt="aé", return_token_strs=True)["token_strs"]
    assert texts == ["a", "\ufffd", "\ufffd"]
    assert tokenize(http, prompt="")["tokens"] == []


@pytest.mark.parametrize("add", [None, True, False])
def test_special_tokens_around_a_prompt(
    http: httpx.Client, served: Served, add: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt has them unless it says otherwise, messages have not."""
    seen: list[bool] = []
    encode = served.door.encode

    def watched(text: str, *, add_special: bool) -> list[int]:
        seen.append(add_special)
        return encode(text, add_special=add_special)

    monkeypatch.setattr(served.door, "encode", watched)
    tokenize(http, prompt="a", add_special_tokens=add)
    tokenize(http, messages=HELLO, add_special_tokens=add)
    assert seen == [add is not False, add is True]


def test_messages(http: httpx.Client, served: Served) -> None:
    def text_of(messages: list[Any], **fields: Any) -> str:
        tokens = tokenize(http, messages=messages, **fields)["tokens"]
        return served.door.tokenizer.decode(tokens)

    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    assert text_of(HELLO) == "<|start|>user:Hi<|other|><|start|>assistant:"
    assert text_of(HELLO, add_generation_prompt=False) == "<|start|>user:Hi<|other|>"
    continued = text_of(begun, add_generation_prompt=False, continue_final_message=True)
    assert continued == "<|start|>user:Hi<|other|><|start|>assistant:Well"


def test_the_tokens_are_those_of_a_chat(http: httpx.Client, served: Served) -> None:
    http.post("/v1/chat/completions", json={"messages": HELLO})
    prompt = served.client.tickets[0].request.prompt
    assert tuple(tokenize(http, messages=HELLO)["tokens"]) == prompt


@pytest.mark.parametrize("text", ["", "aé👩‍👧\n", "<|start|>x<|other|>"])
def test_there_and_back(http: httpx.Client, text: str) -> None:
    tokens = tokenize(http, prompt=text)["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x" * 99_000}, "prompt"),
        ("/tokenize", {"messages": "a"}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": HELLO, "tools": [{}]}, "tools"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [1], "text": "a"}, "text"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)
    unknown = http.post(path, json=body | {"model": "other"} | {"prompt": "a", "tokens": [1]})
    assert unknown.status_code in (400, 404)


def test_an_unknown_model(http: httpx.Client) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert http.post(path, json=body | {"model": "other"}).status_code == 404


def test_large_texts_are_tokenised_too() -> None:
    with scripted_server(max_body_bytes=10**6) as served:
        body = {"tokens": [100] * 100_000}
        assert len(httpx.post(f"{served.url}/detokenize", json=body).json()["prompt"]) == 10**5
