"""POST /debug/cache takes the bodies of both endpoints, and says what a real engine has cached."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tests.serve.oracle import SIZE, oracle_server

HELLO = "Hello, how do you do on this fine day?"


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with oracle_server() as served, httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


def complete(http: httpx.Client, prompt: str, **fields: object) -> dict:
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def explain(http: httpx.Client, **body: object) -> dict:
    answer = http.post("/debug/cache", json=body)
    assert answer.status_code == 200, answer.text
    (prompt,) = answer.json()["prompts"]
    return prompt


def reasons(prompt: dict) -> list[tuple[int, int, str]]:
    return [(one["start"], one["stop"], one["why"]) for one in prompt["blocks"]]


def test_a_completion_is_explained_block_by_block(http: httpx.Client) -> None:
    assert reasons(explain(http, prompt=HELLO)) == [(0, 2, "never_seen"), (2, 3, "not_full")]
    complete(http, HELLO)
    told = explain(http, prompt=HELLO[:20] + "X" * 30, stream=True, n=2)
    assert reasons(told) == [
        (0, 1, "hit"),
        (1, 2, "partial"),
        (2, 3, "never_seen"),
        (3, 4, "not_full"),
    ]
    assert (told["prompt_tokens"], told["cached_tokens"], told["block_size"]) == (50, 20, SIZE)
    assert told["summary"].startswith("20 of 50 prompt tokens cached; block 1 found in part")
    assert told["blocks"][1]["differs"]["position"] == 20
    assert "a cached one begins with the same 4 tokens" in told["blocks"][1]["text"]


def test_salts_are_told_apart_and_not_told(http: httpx.Client) -> None:
    complete(http, HELLO, cache_salt="secret of others")
    answer = http.post("/debug/cache", json={"prompt": HELLO, "cache_salt": "ours"})
    assert "secret" not in answer.text
    (prompt,) = answer.json()["prompts"]
    assert reasons(prompt)[0] == (0, 2, "other_salt")
    assert prompt["summary"].endswith("blocks 0-1 cached under another salt only")
    theirs = explain(http, prompt=HELLO, cache_salt="secret of others")
    assert reasons(theirs)[0] == (0, 2, "hit")
    assert reasons(explain(http, prompt=HELLO, cache="off")) == [(0, 3, "cache_off")]


def test_salt_and_cache_change_what_an_answer_finds(http: httpx.Client) -> None:
    def cached(**fields: object) -> int:
        answer = complete(http, HELLO, **fields)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached()) == (0, 32)
    assert (cached(cache_salt="a"), cached(cache_salt="a")) == (0, 32)
    assert (cached(cache="off"), cached(cache_prompt=False)) == (0, 0)
    assert cached() == 32


def test_a_conversation_and_a_flush(http: httpx.Client) -> None:
    talk = {"messages": [{"role": "user", "content": HELLO}]}
    assert http.post("/v1/chat/completions", json=talk | {"max_tokens": 1}).status_code == 200
    assert explain(http, **talk)["blocks"][0]["why"] == "hit"
    assert http.post("/admin/cache/flush").json()["blocks_flushed"] == 3
    told = explain(http, **talk)
    assert reasons(told)[0] == (0, 3, "flushed")
    assert "emptied on demand" in told["summary"]
    assert 0 <= told["blocks"][0]["ago_s"] < 600


def test_a_kept_prompt_is_told_in_the_life_of_its_request(http: httpx.Client) -> None:
    answer = complete(http, HELLO, max_tokens=3, cache_control={"type": "ephemeral", "ttl": "1h"})
    story = http.get(f"/debug/requests/{answer['id']}").json()["request"]["story"]
    assert any("2 blocks pinned" in sentence["text"] for sentence in story)
    complete(http, HELLO, cache_salt="x" * 1024, cache_control={"type": "ephemeral"})


def test_what_the_openai_client_sends_along(http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as api:
        kept = {"type": "text", "text": HELLO, "cache_control": {"type": "ephemeral"}}

        def cached(question: str, **extra: object) -> int:
            messages: list[Any] = [
                {"role": "system", "content": [kept]},
                {"role": "user", "content": question},
            ]
            answer = api.chat.completions.create(
                model="o", messages=messages, max_tokens=2, extra_body=extra
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            return answer.usage.prompt_tokens_details.cached_tokens or 0

        assert cached("One?", cache_salt="a") == 0
        assert cached("Two?", cache_salt="a") > len(HELLO)
        assert cached("Two?", cache_salt="b") == 0
        with pytest.raises(openai.BadRequestError, match="cache_control needs the cache"):
            cached("Two?", cache="off")


def test_several_prompts_have_an_entry_each(http: httpx.Client) -> None:
    answer = http.post("/debug/cache", json={"prompt": ["a", "b" * 40]})
    assert [prompt["prompt_tokens"] for prompt in answer.json()["prompts"]] == [1, 40]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "cached": True}, "cached"),
        ({"messages": []}, "messages"),
        ({"prompt": "a" * 300}, "prompt"),
        ({"prompt": "a", "model": "other"}, "model"),
        ({}, "prompt"),
    ],
)
def test_what_the_endpoint_refuses_is_refused_here(
    http: httpx.Client, body: dict, param: str
) -> None:
    answer = http.post("/debug/cache", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_limits_change_a_real_engine(http: httpx.Client) -> None:
    assert (
        http.patch("/admin/limits", json={"max_num_seqs": 2}).json()["limits"]["max_num_seqs"] == 2
    )
    above = http.patch("/admin/limits", json={"max_num_seqs": 5})
    assert above.status_code == 400
    assert "at most 4" in above.json()["error"]["message"]
    assert http.get("/admin/limits").json()["limits"]["max_num_seqs"] == 2
    complete(http, HELLO)
