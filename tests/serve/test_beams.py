"""Beam search through both completion endpoints, on an engine whose model is the oracle."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.core.beams import beams_alone
from tests.serve.oracle import OracleServed, oracle_server

from octavo.core.request import Beams, Request

VOCABULARY = 60
PROMPT = tuple(range(5, 25))
BODY: dict[str, Any] = {"prompt": list(PROMPT), "max_tokens": 7, "ignore_eos": True}
SEARCH: dict[str, Any] = {"use_beam_search": True, "n": 3, "return_token_ids": True}


@pytest.fixture(scope="module")
def served() -> Iterator[OracleServed]:
    with oracle_server() as served:
        yield served


@pytest.fixture
def http(served: OracleServed) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


def expected(**fields: Any) -> list[tuple[int, ...]]:
    beams = Beams(width=3, **fields)
    request = Request(id="a", prompt=PROMPT, max_tokens=7, branches=3, beams=beams)
    return [tokens for _, tokens in beams_alone(request, VOCABULARY)]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_choices_are_the_beams_the_best_first(
    http: httpx.Client, length_penalty: float, early_stopping: bool | str
) -> None:
    asked = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    answer = http.post("/v1/completions", json=BODY | SEARCH | asked | {"logprobs": 1}).json()
    choices = answer["choices"]
    assert [one["index"] for one in choices] == [0, 1, 2]
    assert [tuple(one["token_ids"]) for one in choices] == expected(**asked)
    assert {one["finish_reason"] for one in choices} == {"length"}
    assert [len(one["logprobs"]["token_logprobs"]) for one in choices] == [7, 7, 7]
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == 21


def test_groups_differ(http: httpx.Client) -> None:
    groups = {"num_beam_groups": 3, "diversity_penalty": 9.0}
    choices = http.post("/v1/completions", json=BODY | SEARCH | groups).json()["choices"]
    answers = [tuple(one["token_ids"]) for one in choices]
    assert answers == expected(groups=3, diversity_penalty=9.0)
    assert len({answer[0] for answer in answers}) == 3


def test_a_stop_token_ends_a_beam_but_not_before_min_tokens(http: httpx.Client) -> None:
    stop = expected()[0][1]
    fields = BODY | SEARCH | {"stop_token_ids": [stop], "length_penalty": 0.0}  # the short win
    for least in (0, 4):
        choices = http.post("/v1/completions", json=fields | {"min_tokens": least}).json()[
            "choices"
        ]
        for one in choices:
            ended = one["token_ids"][-1] == stop
            assert one["finish_reason"] == ("stop" if ended else "length")
            assert one["stop_reason"] == (stop if ended else None)
            assert len(one["token_ids"]) > least
            assert stop not in one["token_ids"][:-1]
    plain = http.post("/v1/completions", json=fields).json()["choices"]
    assert any(one["finish_reason"] == "stop" for one in plain)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_brings_the_same_at_the_end(http: httpx.Client, kind: str) -> None:
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    body = BODY | SEARCH
    if kind == "chat":
        body = body | {"messages": [{"role": "user", "content": "Hello"}]}
        del body["prompt"]
    whole = http.post(path, json=body).json()
    texts = {
        one["index"]: one["message"]["content"] if kind == "chat" else one["text"]
        for one in whole["choices"]
    }
    options = {"stream": True, "stream_options": {"include_usage": True}}
    said: dict[int, str] = dict.fromkeys(texts, "")
    ends: list[int] = []
    usage = None
    with http.stream("POST", path, json=body | options) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for one in chunk["choices"]:
                piece = one["delta"].get("content") if kind == "chat" else one["text"]
                said[one["index"]] += piece or ""
                ends += [one["index"]] if one["finish_reason"] else []
    assert said == texts
    assert sorted(ends) == [0, 1, 2]
    assert usage is not None
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] == 21


def test_no_other_api_has_beams(http: httpx.Client) -> None:
    for path, body in (
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
    ):
        response = http.post(path, json=body | {"use_beam_search": True})
        assert response.status_code == 400
        assert "use_beam_search" in response.text
