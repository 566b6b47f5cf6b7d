"""What a server writes to its log: never a prompt, an answer or a key, at any level."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

MARK = "Wolpertinger"
KEY = "sk-octavo-secret-4711"
OTHER_KEY = "sk-octavo-plain-4711"
WRONG_KEY = "sk-octavo-wrong-4711"
HEADERS = {"authorization": f"Bearer {KEY}", "x-api-key": KEY, "traceparent": "00-zz-zz-00"}


@contextmanager
def logged(model: Path, *flags: str) -> Iterator[tuple[str, list[str]]]:
    """A server in a process of its own; when it has ended, all that it wrote is in the list."""
    command = [sys.executable, "-m", "octavo.cli.main", "serve", str(model), "--port", "0"]
    command += ["--kv-cache-memory", "32MiB", "--max-model-len", "256", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "OCTAVO_API_KEY": OTHER_KEY, "OCTAVO_ADMIN_API_KEY": KEY},
    )
    written: list[str] = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            written.append(line)
            if found := re.search(r"at (http://\S+)", line):
                break
        else:
            pytest.fail("the server ended before it listened")
        yield found[1], written
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        written += [*out.splitlines(), *err.splitlines()]
    finally:
        process.kill()
        process.communicate()


def bother(url: str) -> str:
    """Marked prompts in every way that there is to send one, and to fail; returns an answer."""
    with httpx.Client(base_url=url, headers=HEADERS, timeout=60) as http:
        prompt = f"Tell me of the {MARK}. {MARK} and {MARK} went"
        messages = [{"role": "user", "content": prompt}]
        whole = {"messages": messages, "max_tokens": 12, "temperature": 0}
        answer = http.post("/v1/chat/completions", json=whole).json()
        http.post("/v1/completions", json={"prompt": f"{prompt} on", "max_tokens": 9, "n": 2})
        http.post("/v1/completions", json={"prompt": prompt, "stop": [MARK], "seed": 4711})
        http.post("/v1/completions", json={"prompt": prompt, MARK: MARK})
        http.post("/v1/completions", json={"prompt": [MARK]})
        http.post("/v1/completions", content=f'{{"prompt": "{MARK}'.encode())
        http.post("/v1/completions", json={"prompt": prompt * 400})
        http.post("/v1/completions", json={"prompt": prompt, "model": MARK})
        http.post("/debug/cache", json={"prompt": prompt})
        with http.stream("POST", "/v1/chat/completions", json=whole | {"stream": True}) as stream:
            next(stream.iter_lines())  # and goes
        for path, body in (
            ("/v1/messages", {"messages": messages, "max_tokens": 5, "system": MARK}),
            ("/v1/messages", {"messages": [{"role": MARK, "content": MARK}], "max_tokens": 5}),
            ("/v1/messages/count_tokens", {"messages": messages}),
            ("/v1/responses", {"input": prompt, "max_output_tokens": 5, "instructions": MARK}),
            ("/v1/responses", {"input": [{"type": MARK, "text": MARK}]}),
            ("/api/chat", {"messages": messages, "options": {"num_predict": 5}}),
            ("/api/generate", {"prompt": prompt, "options": {"stop": [MARK], "num_predict": 5}}),
            ("/tokenize", {"prompt": prompt, "return_token_strs": True}),
            ("/detokenize", {"tokens": [MARK]}),
            ("/v1/chat/completions", whole | {"chat_template": MARK}),
            ("/v1/chat/completions", whole | {"user": MARK, "cache_salt": MARK, "tools": [MARK]}),
            ("/v1/chat/completions", whole | {"bad_words": [MARK], "logprobs": True}),
            ("/v1/completions", {"prompt": prompt, "tenant": MARK}),
            ("/v1/completions", {"prompt": prompt, "logit_bias": {MARK: 1}}),
            ("/v1/completions", {"prompt": prompt, "echo": True, "timeout_s": 1e-3}),
            ("/admin/limits", {MARK: MARK}),
            ("/admin/drain", {MARK: MARK}),
        ):
            assert http.post(path, json=body).status_code != 500, path
        http.patch("/admin/limits", json={MARK: MARK})
        http.get("/v1/models", headers={"origin": f"https://{MARK}.example"})
        http.get("/debug/requests", params={"api_key": KEY, "q": MARK})
        for key in (OTHER_KEY, WRONG_KEY):
            http.get("/debug/requests", headers={"authorization": f"Bearer {key}", "x-api-key": ""})
        return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_prompt_no_answer_and_no_key(form: str, demo_model_path: Path) -> None:
    flags = ("--log-level", "debug", "--log-format", form)
    with logged(demo_model_path, *flags) as (url, written):
        answer = bother(url)
    log = "\n".join(written)
    assert "Admitted" in log, "decisions are logged at this level"
    assert "/debug/requests" in log, "and who asks for what"
    for phase in (
        "model found",
        "model opened",
        "settings resolved",
        "kernels chosen",
        "weights packed",
        "KV cache allocated",
        "tokenizer loaded",
        "engine ready",
    ):
        assert re.search(rf"start-up: {phase}, \d+\.\d\d s", log), phase
    assert len(answer) > 20
    assert "admin_api_key=***" in log, "that there is one may be known"
    for secret in (MARK, KEY, OTHER_KEY, WRONG_KEY, answer, answer[:20]):
        assert secret not in log, [line for line in written if secret in line]
    assert not re.search(r"\[\d+, \d+, \d+|\(\d+, \d+, \d+, \d+", log), "token ids, it seems"
    if form == "json":
        records = [json.loads(line) for line in written if line.startswith("{")]
        assert all({"time", "level", "logger", "message"} <= record.keys() for record in records)
        about = [record for record in records if "request_id" in record]
        assert any("Finished" in record["message"] for record in about)
        assert all(record["request_id"] in record["message"] for record in about)
