"""Prompts that are computed before the server is ready, and again when the engine was lost."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.serve.oracle import OracleServed, oracle_server
from tests.serve.scripted import ScriptedClient, byte_tokenizer
from tests.serve.test_slow_readers import wait_for

from octavo.engine.door import Door
from octavo.errors import ConfigError
from octavo.observe.metrics import Metrics
from octavo.serve.keyfile import keys_of
from octavo.serve.keys import Keyring
from octavo.serve.service import ServeSettings, Service
from octavo.serve.warm import Prompt, Warming, read_prompts

LONG = "A prompt that fills two blocks, and more"


def write(folder: Path, *lines: object) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    return file


def test_a_file_of_prompts(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    file = write(tmp_path, '"text"', "", {"prompt": "a", "namespace": "n"}, chat)
    first, second, third = read_prompts(file)
    assert first == Prompt(f"{file}:1", b'{"prompt":"text"}')
    assert second == Prompt(f"{file}:3", b'{"prompt":"a"}', "n")
    assert json.loads(third.body) == chat


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "has no prompt"),
        ("text", "prompts.jsonl:1: expected JSON"),
        ("[1]", "prompts.jsonl:1: expected a JSON string or an object"),
        ('{"prompt": "a", "namespace": 5}', "prompts.jsonl:1: namespace must be a string"),
    ],
)
def test_what_is_no_file_of_prompts(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_prompts(write(tmp_path, line))
    with pytest.raises(ConfigError, match="cannot read the prompts file"):
        read_prompts(tmp_path / "none")


def warmed(served: OracleServed, tmp_path: Path, *lines: object) -> None:
    """Compute the prompts on the server's own loop."""
    warming = Warming(served.service, read_prompts(write(tmp_path, *lines)))
    served.run(warming.run())


def cached(served: OracleServed, prompt: str, key: str = "none", **more: object) -> int:
    response = httpx.post(
        f"{served.url}/v1/completions",
        json={"prompt": prompt, "max_tokens": 1, **more},
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
    )
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_what_was_computed_ahead_is_found(tmp_path: Path) -> None:
    with oracle_server() as served:
        warmed(served, tmp_path, json.dumps(LONG), {"prompt": "x" * 40, "cache_salt": "s"})
        assert cached(served, LONG) == 32
        assert cached(served, "x" * 40) == 0
        assert cached(served, "x" * 40, cache_salt="s") == 32
        assert served.engine.status().running == 0


def test_each_namespace_has_its_own(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(f"[[key]]\nname = '{name}'\nkey = 'sk-{name}'\n" for name in ("a", "b", "c"))
    )
    with oracle_server(keyring=Keyring(keys_of([], [], file))) as served:
        only_b = {"prompt": "y" * 40, "namespace": "b"}
        warmed(served, tmp_path, json.dumps(LONG), only_b)
        assert [cached(served, LONG, f"sk-{name}") for name in "abc"] == [32] * 3
        assert [cached(served, "y" * 40, f"sk-{name}") for name in "abc"] == [0, 32, 0]
        with pytest.raises(ConfigError, match="no API key has the namespace 'd'"):
            warmed(served, tmp_path, only_b | {"namespace": "d"})


def test_a_prompt_that_cannot_be_computed_stops_the_start(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    door = Door(tokenizer, max_model_len=64, vocab_size=tokenizer.vocab_size)
    settings = ServeSettings(model_names=("m",), version="0")
    service = Service(ScriptedClient(tokenizer), door, settings, Metrics())
    for line in ({"prompt": "a" * 90}, {"prompt": "a", "tpyo": 1}, {"messages": []}):
        with pytest.raises(ConfigError, match=r"prompts.jsonl:1: "):
            Warming(service, read_prompts(write(tmp_path, line)))


def test_a_server_is_warm_when_it_is_ready_and_again_after_its_engine_died(
    tmp_path: Path, demo_model_path: Path
) -> None:
    prompt = "The quick brown fox jumps over the lazy dog, and then it does so once more. " * 3
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--model", str(demo_model_path)]
    command += ["--port", "0", "--kv-cache-memory", "32MiB", "--max-model-len", "256"]
    command += ["--warm", str(write(tmp_path, json.dumps(prompt)))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split()[-1]

            def blocks_cached() -> int:
                told = httpx.post(f"{url}/debug/cache", json={"prompt": prompt}, timeout=60)
                return int(told.json()["prompts"][0]["cached_tokens"])

            at_start = blocks_cached()
            assert at_start > 40
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
            engine = children.read_text()
            os.kill(int(engine), signal.SIGKILL)
            wait_for(lambda: children.read_text() not in ("", engine))
            wait_for(lambda: blocks_cached() == at_start)
            drained = httpx.post(f"{url}/admin/drain", json={"exit": True}, timeout=60)
            assert drained.json()["exit"]
            assert server.wait(60) == 0
        finally:
            server.kill()
