"""Text and stops over the parameters that meet in them, on real server processes, with guesses and
without: what comes in pieces is the whole, and the whole is what the plain definition says."""

import codecs
import itertools
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.models.weights.gguf import GGUFFile
from octavo.text.tokenizer import Tokenizer

TOKENS = 12
BEGINNINGS = (
    "Once upon a time, the",
    "Repeat: 👩‍👧 é 👩‍👧 é 👩‍👧 é",
    "<|im_start|>one, two, three,",
)
CHOICES = ["Zwölf 👩‍👧 €", "Zwölf 🏳️‍🌈 €", "漢字 e\u0301"]

VALUES: dict[str, tuple[Any, ...]] = {
    "api": ("chat", "text"),
    "prompt": (0, 1, 2),
    "as_ids": (False, True),
    "words": ("greedy", "drawn", "bytes", "choice", "regex"),
    "n": (1, 2),
    "logprobs": (None, 0, 2),
    "echo": (False, True),
    "stop": ("none", "one", "several", "almost"),
    "include_stop_str_in_output": (False, True),
    "skip_special_tokens": (False, True),
    "stop_token_ids": (False, True),
    "min_tokens": (0, 5),
    "ignore_eos": (False, True),
    "return_token_ids": (False, True),
    "priority": (0, -3),
}
Case = dict[str, Any]


def pairwise(chance: random.Random) -> list[Case]:
    """Cases in which every two values of two parameters meet."""
    names = list(VALUES)
    open_pairs = {
        (one, first, other, second)
        for one, other in itertools.combinations(names, 2)
        for first in VALUES[one]
        for second in VALUES[other]
    }

    def pairs(case: Case) -> set[tuple[Any, ...]]:
        return {
            (one, case[one], other, case[other]) for one, other in itertools.combinations(names, 2)
        }

    cases = []
    while open_pairs:
        one, first, other, second = min(open_pairs, key=repr)
        drawn = [
            {name: chance.choice(values) for name, values in VALUES.items()}
            | {one: first, other: second}
            for _ in range(60)
        ]
        best = max(drawn, key=lambda case: len(pairs(case) & open_pairs))
        open_pairs -= pairs(best)
        cases.append(best)
    return cases


class Servers:
    """Two servers of the demo model: one that guesses ahead, and one that does not."""

    def __init__(self, plain: str, guessing: str, tokenizer: Tokenizer) -> None:
        self.plain = plain
        self.guessing = guessing
        self.tokenizer = tokenizer
        self.pool = ThreadPoolExecutor(4)
        pieces = tokenizer.pieces(tokenizer.vocab_size)
        wanted = {bytes([byte]) for byte in "👩é, \u200d".encode()} | {b" the", b"<|im_start|>"}
        self.few = [token for token, piece in enumerate(pieces) if piece in wanted]
        self.stop_ids = [token for token, piece in enumerate(pieces) if piece in (b",", b" the")]

    def text_of(self, ids: Sequence[int], *, final: bool) -> str:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(b"".join(map(self.tokenizer.token_bytes, ids)), final)


def started(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://\S+", line):
            return process, found[0]
    pytest.fail(f"the server ended with {process.wait()}")


@pytest.fixture(scope="module")
def servers(demo_model_path: Path) -> Iterator[Servers]:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--model", str(demo_model_path)]
    command += ["--port", "0", "--max-model-len", "256", "--kv-cache-memory", "48MiB"]
    command += ["--log-level", "warning", "--max-logprobs", "-1", "--max-draft-tokens"]
    both = [started([*command, drafts]) for drafts in ("0", "4")]
    metadata = dict(GGUFFile.open(demo_model_path).metadata)
    yield Servers(both[0][1], both[1][1], Tokenizer.from_gguf(metadata))
    for process, _ in both:
        process.terminate()
        process.communicate(timeout=300)


def body_of(case: Case, servers: Servers, stops: Sequence[str]) -> dict[str, Any]:
    """The request; without what changes only how its answer is shown when there are no stops."""
    prompt: Any = BEGINNINGS[case["prompt"]]
    body: dict[str, Any] = {
        name: case[name] for name in ("n", "min_tokens", "ignore_eos", "priority")
    } | {"max_tokens": TOKENS, "seed": 7, "temperature": 0.0}
    if case["stop_token_ids"] and not structured(case):  # which might need one of them too early
        body["stop_token_ids"] = servers.stop_ids
    match case["words"]:
        case "drawn":
            body["temperature"] = 1.2
        case "bytes":
            body |= {"temperature": 3.0, "allowed_token_ids": servers.few}
        case "choice":
            body |= {"temperature": 2.0, "structured_outputs": {"choice": CHOICES}}
        case "regex":
            body |= {"temperature": 1.0, "structured_outputs": {"regex": "([a-z]{3} é, ){3,9}"}}
    if case["api"] == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
        if case["logprobs"] is not None:
            body |= {"logprobs": True, "top_logprobs": case["logprobs"]}
    else:
        ids = servers.tokenizer.encode(prompt, parse_special=True, add_special=False)
        body |= {"prompt": ids if case["as_ids"] else prompt, "logprobs": case["logprobs"]}
    if stops:
        body["stop"] = list(stops)
    return body


def shown_as(case: Case) -> dict[str, Any]:
    names = ("include_stop_str_in_output", "skip_special_tokens", "return_token_ids")
    echo = {"echo": case["echo"]} if case["api"] == "text" else {}
    return {name: case[name] for name in names} | echo


def path_of(case: Case) -> str:
    return "/v1/chat/completions" if case["api"] == "chat" else "/v1/completions"


Choice = dict[str, Any]


def whole(url: str, path: str, body: dict[str, Any]) -> tuple[list[Choice], Any]:
    response = httpx.post(url + path, json=body, timeout=600)
    assert response.status_code == 200, response.text
    answer = response.json()
    choices = [
        {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "logprobs": choice["logprobs"],
            "token_ids": choice.get("token_ids"),
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in answer["choices"]
    ]
    return choices, answer["usage"]["completion_tokens"]


def streamed(url: str, path: str, body: dict[str, Any]) -> tuple[list[Choice], Any]:
    """The same of the joined pieces."""
    blank: Choice = {"text": "", "logprobs": None, "token_ids": None}
    choices: list[Choice] = [dict(blank) for _ in range(body["n"])]
    usage = None
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", url + path, json=body, timeout=600) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk["usage"] or usage
            for piece in chunk["choices"]:
                add(choices[piece["index"]], piece)
    assert usage is not None
    return choices, usage["completion_tokens"]


def add(choice: Choice, piece: dict[str, Any]) -> None:
    assert "finish_reason" not in choice, "a piece after the end"
    text = piece["delta"].get("content", "") if "delta" in piece else piece["text"]
    choice["text"] += text
    if piece.get("token_ids") is not None:
        choice["token_ids"] = (choice["token_ids"] or []) + piece["token_ids"]
    if (scores := piece.get("logprobs")) is not None:
        known = choice["logprobs"] or {name: [] for name in scores}
        choice["logprobs"] = {
            name: None if column is None else known[name] + column
            for name, column in scores.items()
        }
    if piece["finish_reason"] is not None:
        choice |= {name: piece[name] for name in ("finish_reason", "stop_reason")}


def stops_for(kind: str, texts: Sequence[str], chance: random.Random) -> list[str]:
    """Stop strings that begin in the middle of an answer, wherever its tokens meet."""
    text = max(texts, key=len)
    if kind == "none" or not text:
        return []
    at = chance.randrange(len(text))
    found = text[at : at + chance.randrange(1, 6)]
    return {
        "one": [found],
        "several": [f"{found}x", found, text[at : at + 9], text[-1]],
        "almost": [f"{found}\x01", f"{text}\x01"],
    }[kind]


def ended(
    ids: Sequence[int], base: Choice, case: Case, stops: Sequence[str], servers: Servers
) -> Choice:
    """What an answer of these tokens is by the plain definition: it ends where a stop is complete
    first, though not before `min_tokens` tokens."""
    tokenizer = servers.tokenizer
    # A grammar may end it without a token that says so.
    by_token = ids[-1] in tokenizer.eos_ids or ids[-1] == base["stop_reason"]
    ends_it = base["finish_reason"] == "stop" and by_token
    ends_it = ends_it and not case["include_stop_str_in_output"]
    shown = [
        [] if skipped(token, case, tokenizer) or (ends_it and index == len(ids) - 1) else [token]
        for index, token in enumerate(ids)
    ]

    def upto(count: int, *, final: bool = False) -> str:
        return servers.text_of(list(itertools.chain(*shown[:count])), final=final)

    earliest = len(upto(max(case["min_tokens"] - 1, 0)))
    text = upto(len(ids))
    ends = [
        (at + len(stop), -len(stop), stop)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > earliest
    ]
    if not ends:
        kept = {name: base[name] for name in ("finish_reason", "stop_reason")}
        return kept | {"text": upto(len(ids), final=True), "tokens": len(ids)}
    at, length, stop = min(ends)
    count = next(count for count in range(len(ids) + 1) if len(upto(count)) >= at)
    left = text[: at if case["include_stop_str_in_output"] else at + length]
    return {"finish_reason": "stop", "stop_reason": stop, "text": left, "tokens": count}


def structured(case: Case) -> bool:
    return case["words"] in ("choice", "regex")


def skipped(token: int, case: Case, tokenizer: Tokenizer) -> bool:
    return bool(case["skip_special_tokens"]) and token in tokenizer.special_ids


def test_every_two_values_meet(servers: Servers, seed: int) -> None:
    chance = random.Random(seed)
    for number, case in enumerate(pairwise(chance)):
        check(case, servers, chance, f"case {number} of seed {seed}: {case}")


def check(case: Case, servers: Servers, chance: random.Random, where: str) -> None:
    path = path_of(case)
    plain = body_of(case, servers, ()) | {"return_token_ids": True, "skip_special_tokens": False}
    base, _ = whole(servers.plain, path, plain)
    texts = [servers.text_of(one["token_ids"], final=False) for one in base]
    stops = stops_for(case["stop"], texts, chance)
    body = body_of(case, servers, stops) | shown_as(case)
    asked = [
        servers.pool.submit(how, url, path, body)
        for url in (servers.plain, servers.guessing)
        for how in (whole, streamed)
    ]
    (choices, tokens), *others = (one.result() for one in asked)
    for other in others:
        assert other == (choices, tokens), where
    echo, echoed = echo_of(body, servers.tokenizer)
    total = 0
    for choice, one in zip(choices, base, strict=True):
        wanted = ended(one["token_ids"], one, case, stops, servers)
        count = wanted.pop("tokens")
        total += count
        seen = {name: choice[name] for name in ("text", "finish_reason", "stop_reason")}
        assert seen == wanted | {"text": echo + wanted["text"]}, where
        if case["return_token_ids"]:
            assert choice["token_ids"] == one["token_ids"][:count], where
        if case["logprobs"] is not None:
            columns = choice["logprobs"]
            entries = columns["content"] if case["api"] == "chat" else columns["tokens"]
            assert len(entries) == echoed + count, where
    assert tokens == total, where


def echo_of(body: dict[str, Any], tokenizer: Tokenizer) -> tuple[str, int]:
    """The text that comes before the answer, and how many tokens it has."""
    if not body.get("echo"):
        return "", 0
    prompt = body["prompt"]
    if isinstance(prompt, str):
        return prompt, len(tokenizer.encode(prompt, parse_special=True, add_special=False))
    return tokenizer.decode(prompt, skip_special=body["skip_special_tokens"]), len(prompt)


def test_all_of_the_vocabulary(servers: Servers) -> None:
    """With --max-logprobs -1 a request may ask for every token's log-probability."""
    size = servers.tokenizer.vocab_size
    body = {"prompt": "Water boils at", "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    few, all_of_it = (
        httpx.post(
            f"{servers.plain}/v1/completions", json=body | {"prompt_logprobs": count}, timeout=600
        ).json()["choices"][0]["prompt_logprobs"][1]
        for count in (20, -1)
    )
    assert len(all_of_it) == size
    assert few.items() <= all_of_it.items()
    ranks = [one["rank"] for one in all_of_it.values()]
    assert sorted(ranks) == list(range(1, size + 1))
    assert math.fsum(math.exp(one["logprob"]) for one in all_of_it.values()) == pytest.approx(
        1, abs=1e-3
    )
    answer = httpx.post(
        f"{servers.plain}/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": -1,
        },
        timeout=600,
    ).json()
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    logprobs = [one["logprob"] for one in entry["top_logprobs"]]
    assert len(logprobs) == size
    assert logprobs == sorted(logprobs, reverse=True)
