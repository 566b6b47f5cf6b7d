"""The demo model behind the server: what a user of the `openai` client sees."""

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from tests.serve.scripted import serving

from octavo.config import EngineConfig
from octavo.engine.build import build
from octavo.engine.client import AsyncClient
from octavo.engine.thread import EngineThread
from octavo.serve.app import create_app
from octavo.serve.service import ServeSettings

CONTEXT = 384
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "How many legs does a spider have?",
    "Write one line about the sea.",
)


@pytest.fixture(scope="module")
def url(demo_model_path: Path) -> Iterator[str]:
    built = build(EngineConfig(model=str(demo_model_path), max_model_len=CONTEXT, threads=2))
    client = AsyncClient(EngineThread(built.engine))
    app = create_app(client, built.door, ServeSettings(model_names=("demo",), version="0"))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await client.start()
        yield
        await client.close()

    app.router.lifespan_context = lifespan
    with serving(app) as url:
        yield url


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        yield api


def ask(api: openai.OpenAI, question: str, **more: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": question}]
    options = {"temperature": 0.0, "max_tokens": 24} | more
    return api.chat.completions.create(model="demo", messages=messages, **options)


def streamed(api: openai.OpenAI, question: str, **more: Any) -> str:
    chunks = ask(api, question, stream=True, **more)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_every_api_gives_the_same_answer(url: str, api: openai.OpenAI) -> None:
    """One conversation through all of them: only the clothes differ."""
    messages: list[Any] = [{"role": "user", "content": QUESTIONS[2]}]
    answers = [
        ask(api, QUESTIONS[2], top_p=1.0).choices[0].message.content,
        api.responses.create(
            model="demo", input=QUESTIONS[2], temperature=0, max_output_tokens=24
        ).output_text,
    ]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"messages": messages, "max_tokens": 24, "temperature": 0},
        "/api/chat": {"messages": messages, "options": {"num_predict": 24, "temperature": 0}},
        "/api/generate": {
            "prompt": QUESTIONS[2],
            "options": {"num_predict": 24, "temperature": 0},
        },
    }
    for path, body in bodies.items():
        answer = httpx.post(url + path, json=body | {"stream": False}, timeout=60).json()
        answers.append(
            answer.get("response")
            or answer.get("message", {}).get("content")
            or answer["content"][0]["text"]
        )
    assert len(set(answers)) == 1, answers


def test_it_knows_the_capital_of_france(api: openai.OpenAI) -> None:
    answer = ask(api, QUESTIONS[0])
    assert "Paris" in answer.choices[0].message.content
    assert streamed(api, QUESTIONS[0]) == answer.choices[0].message.content


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}])
def test_company_changes_nothing(api: openai.OpenAI, sampling: dict[str, Any]) -> None:
    alone = [streamed(api, question, **sampling) for question in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        together = list(threads.map(lambda q: streamed(api, q, **sampling), QUESTIONS))
    assert together == alone
    assert len(set(alone)) == len(alone)


def test_the_second_time_the_prompt_is_cached(api: openai.OpenAI, seed: int) -> None:
    question = f"Repeat after me: {seed} is a number that nobody has ever seen before today."
    first, second = (ask(api, question) for _ in range(2))
    assert second.choices[0].message.content == first.choices[0].message.content
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached > first.usage.prompt_tokens_details.cached_tokens
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.model_dump()["octavo"]["cached_tokens"] == cached


def test_a_stop_string(api: openai.OpenAI) -> None:
    whole = streamed(api, QUESTIONS[0])
    stop = whole[5:9]
    for answer in (
        streamed(api, QUESTIONS[0], stop=stop),
        ask(api, QUESTIONS[0], stop=[stop]).choices[0].message.content,
    ):
        assert answer == whole[: whole.index(stop)]


def test_without_a_limit_the_answer_ends_with_the_context(api: openai.OpenAI) -> None:
    prompt = [11] * (CONTEXT - 10)
    answer = api.completions.create(model="demo", prompt=prompt, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="demo", prompt=[11] * CONTEXT)
    assert caught.value.code == "context_length_exceeded"


def test_bad_requests_beside_good_ones(api: openai.OpenAI) -> None:
    alone = streamed(api, QUESTIONS[1])
    with ThreadPoolExecutor(2) as threads:
        good = threads.submit(streamed, api, QUESTIONS[1])
        for prompt in ("", [10**6], [-1], "word " * CONTEXT):
            with pytest.raises(openai.BadRequestError):
                api.completions.create(model="demo", prompt=prompt)  # type: ignore[arg-type]
        assert good.result() == alone


def test_a_reader_that_leaves_frees_the_engine(api: openai.OpenAI, url: str) -> None:
    chunks = ask(
        api, "Count to a thousand.", stream=True, max_tokens=None, extra_body={"ignore_eos": True}
    )
    assert len(list(islice(chunks, 3))) == 3
    chunks.close()
    with httpx.Client(base_url=url) as http:
        looks = (http.get("/health").json()["running"] for _ in range(10_000))
        assert next((running for running in looks if running == 0), None) == 0
        text = http.get("/metrics").text
    assert 'octavo_requests_total{finish_reason="abort"} 1.0' in text
