"""octavo limits and octavo cache, against a server on a socket."""

import http.server
import io
import threading
from collections.abc import Iterator

import pytest
from tests.serve.scripted import IDLE, Served, scripted_server

from octavo.cli.main import main
from octavo.serve.keyfile import keys_of
from octavo.serve.keys import Keyring


@pytest.fixture(scope="module")
def _server() -> Iterator[Served]:
    with scripted_server() as served:
        yield served


@pytest.fixture
def server(_server: Served) -> Served:
    _server.client.state = IDLE
    return _server


def test_limits_are_printed(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["limits", "--url", server.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["max_num_seqs", "8", "at", "most", "16"]
    assert ["max_queued_requests", "none"] in [line.split() for line in lines]


def test_limits_are_changed(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["max-num-seqs=3", "max_queued_requests=9", "--set", "admission=chunked"]
    assert main(["limits", "--url", server.url + "/", "--set", *changes]) == 0
    limits = server.client.state.limits
    assert (limits.sequences, limits.waiting, limits.admission) == (3, 9, "chunked")
    assert main(["limits", "--url", server.url, "--set", "max_queued_requests=none"]) == 0
    assert server.client.state.limits.waiting is None
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["max_num_seqs", "3", "at", "most", "16"] in lines
    assert ["admission", "chunked"] in lines


def test_a_key_is_sent_from_the_flag_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_server(keyring=Keyring(keys_of(["sk-a"], ["sk-b"], None))) as served:
        asked = ["limits", "--url", served.url]
        assert main(asked) == 2
        assert "an API key is needed" in capsys.readouterr().err
        assert main([*asked, "--api-key", "sk-b"]) == 0
        monkeypatch.setenv("OCTAVO_API_KEY", "sk-a,sk-c")
        assert main(asked) == 2
        assert "admin" in capsys.readouterr().err
        monkeypatch.setenv("OCTAVO_ADMIN_API_KEY", "sk-b, sk-c")
        assert main(asked) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "max_num_seqs=0"], "must be at least 1"),
        (["--set", "max_num_seqs=many"], "expected `int`"),
        (["--set", "nothing=1"], "no limit that can be changed"),
        (["--set", "nothing"], "expected NAME=VALUE"),
        (["--url", "ftp://127.0.0.1"], "no address of a server"),
        (["--url", "nonsense"], "no answer from nonsense"),
        (["--url", "http://127.0.0.1:1"], "is a server there?"),
    ],
)
def test_what_is_wrong_is_one_line(
    server: Served, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["limits", "--url", server.url, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert server.client.state == IDLE


def test_the_cache_is_explained_and_flushed(
    server: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {
        ("--raw", "0123456789abcdefg"): "0 of 17 prompt tokens",
        ("hi",): "0 of 20 prompt tokens",
        ("hi", "--system", "s", "--salt", "x"): "0 of 30 prompt tokens",
        ("--body", '{"prompt": [1, 2, 3], "cache": "off"}'): "0 of 3 prompt tokens",
        ("--raw", "-"): "0 of 5 prompt tokens",
    }
    for arguments, summary in cases.items():
        monkeypatch.setattr("sys.stdin", io.StringIO("stdin"))
        assert main(["cache", "explain", "--url", server.url, *arguments]) == 0
        out = capsys.readouterr().out
        assert summary in out
        assert "  block" in out
    assert main(["cache", "flush", "--url", server.url]) == 0
    assert capsys.readouterr().out == f"{IDLE.blocks_cached} blocks flushed\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--body", "{"], "not valid JSON"),
        (["--body", "[1]"], "no JSON object"),
        (["--body", '{"prompt": "a", "x": 1}'], "the field x is not known"),
        (["", "--raw"], "empty"),
    ],
)
def test_a_prompt_that_is_wrong_is_one_line(
    server: Served, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "explain", "--url", server.url, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert says in captured.err


class _Stranger(http.server.BaseHTTPRequestHandler):
    """Some other server."""

    def do_GET(self) -> None:
        content = b"<html>hello</html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def test_another_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Stranger) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        assert main(["limits", "--url", f"http://127.0.0.1:{other.server_port}"]) == 2
        other.shutdown()
    assert "is no server of Octavo" in capsys.readouterr().err
