"""TLS with certificates made here, exchanged while connections are open."""

import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.serve.protection import Protection
from octavo.serve.tls import Certificate

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def make(folder: Path, name: str, *, password: str = "") -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    chain, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-keyout", str(key), "-out", str(chain), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-passout", f"pass:{password}"] if password else ["-nodes"]
    subprocess.run(command, check=True, capture_output=True)
    return chain, key


def test_what_is_no_certificate(tmp_path: Path) -> None:
    chain, key = make(tmp_path, "a")
    other, locked = make(tmp_path, "b", password="secret")
    nothing = tmp_path / "none"
    empty = tmp_path / "empty"
    empty.touch()
    for pair in ((nothing, key), (chain, nothing), (empty, key), (chain, empty), (chain, None)):
        with pytest.raises(ConfigError, match="cannot be used"):
            Certificate(*pair)
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        Certificate(other, key)
    with pytest.raises(ConfigError, match="without a password"):
        Certificate(other, locked)
    with pytest.raises(ConfigError, match="ssl_keyfile is the key of no certificate"):
        Protection(EngineConfig(ssl_keyfile=str(key)))


def test_both_in_one_file(tmp_path: Path) -> None:
    chain, key = make(tmp_path, "a")
    chain.write_text(chain.read_text() + key.read_text())
    assert Certificate(chain, None).context


def test_a_server_with_tls_reads_keys_and_certificate_again(
    tmp_path: Path, demo_model_path: Path
) -> None:
    chain, key = make(tmp_path, "first")
    keys = tmp_path / "keys.toml"
    keys.write_text("[[key]]\nname = 'a'\nkey = 'sk-first'\n")
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--model", str(demo_model_path)]
    command += ["--port", "0", "--kv-cache-memory", "32MiB", "--max-model-len", "256"]
    command += ["--ssl-certfile", str(chain), "--ssl-keyfile", str(key)]
    command += ["--api-key-file", str(keys), "--root-path", "/llm"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            url = server.stdout.readline().split()[-1]
            assert url.startswith("https://127.0.0.1:")

            def ask(trusted: Path, secret: str, path: str = "/version") -> int:
                context = ssl.create_default_context(cafile=str(trusted))
                headers = {"authorization": f"Bearer {secret}"}
                return httpx.get(url + path, verify=context, headers=headers).status_code

            def reload() -> str:
                server.send_signal(signal.SIGHUP)
                assert server.stderr is not None
                return "".join(
                    next(line for line in server.stderr if " read again" in line) for _ in range(2)
                )

            assert ask(chain, "sk-first") == 200
            assert ask(chain, "sk-second") == 401
            context = ssl.create_default_context(cafile=str(chain))
            below = httpx.post(f"{url}/v1/messages", verify=context)
            assert below.json()["error"]["type"] == "authentication_error", "whatever the root"
            with pytest.raises(httpx.RemoteProtocolError):
                httpx.get(url.replace("https", "http"))
            body = {"prompt": "Hello", "max_tokens": 2}
            answer = httpx.post(
                f"{url}/v1/completions",
                json=body,
                verify=context,
                headers={"x-api-key": "sk-first"},
                timeout=60,
            )
            assert answer.json()["usage"]["completion_tokens"] == 2

            second, _ = make(tmp_path, "second")
            for old, new in ((chain, second), (key, tmp_path / "second.key")):
                new.replace(old)
            keys.write_text("[[key]]\nname = 'a'\nkey = 'sk-second'\n")
            told = reload()
            assert "certificate read again" in told
            assert "API keys read again" in told
            assert "secret" not in told
            assert ask(chain, "sk-second") == 200
            assert ask(chain, "sk-first") == 401

            good = key.read_text()
            key.write_text("broken")
            keys.write_text("[[key]]\nname = 'a'\n")
            told = reload()
            assert told.count("what was read before holds") == 2
            assert ask(chain, "sk-second") == 200
            key.write_text(good)
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=300)


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a b", "//", "/\u00fc"])
def test_what_is_no_root(path: str) -> None:
    Protection(EngineConfig(root_path="/llm/v2"))
    with pytest.raises(ConfigError, match="root_path: expected a path such as /llm"):
        Protection(EngineConfig(root_path=path))


def test_more_connections_than_the_system_grants() -> None:
    with pytest.raises(ConfigError, match="max_connections 999999999 needs 1000000127 open files"):
        Protection(EngineConfig(max_connections=999_999_999))
