"""Settings: every source, their order, and what is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from octavo.config import (
    DEFAULTS,
    RULES,
    EngineConfig,
    flag_of,
    load_config,
    parse_duration,
    parse_size,
)
from octavo.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "octavo.toml"
    file.write_text(text)
    return file


def test_without_sources_all_is_default() -> None:
    config, sources = load_config({})
    assert config == EngineConfig()
    assert set(sources.values()) == {"default"}
    assert set(sources) == {field.name for field in dataclasses.fields(EngineConfig)}


def test_every_setting_explains_itself() -> None:
    for name, rule in RULES.items():
        assert rule.help, name
        assert not rule.help.endswith("."), name


def test_the_order_of_sources(tmp_path: Path) -> None:
    file = write(tmp_path, "port = 1\nhost = 'file'\nseed = 7\nmax-num-seqs = 3\n")
    environment = {"OCTAVO_PORT": "2", "OCTAVO_HOST": "environment", "OCTAVO_CACHE": "/x"}
    config, sources = load_config({"port": "3"}, environment, file)
    assert (config.port, config.host, config.seed, config.max_num_seqs) == (3, "environment", 7, 3)
    assert sources["port"] == "flag --port"
    assert sources["host"] == "environment OCTAVO_HOST"
    assert sources["seed"] == f"file {file}"
    assert sources["block_size"] == "default"


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_setting_is_read_from_every_source(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    rule = RULES[name]
    if rule.choices:
        value: object = next(c for c in reversed(rule.choices) if c != DEFAULTS[name])
    elif rule.kind == "list":
        value = tuple(f"v{rng.integers(10**6)}" for _ in range(2))
    elif rule.kind == "text":
        value = f"v{rng.integers(10**6)}"
    elif rule.kind == "switch":
        value = not DEFAULTS[name]
    elif rule.kind == "share":
        value = round(float(rng.uniform(rule.low or 0, rule.high or 1)), 6)
    else:
        value = int(rng.integers(int(rule.low or 0) + 1, min(1000, int(rule.high or 1000))))
    assert value != DEFAULTS[name]
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    toml = f"'{text}'" if isinstance(value, str | tuple) else text.lower()
    for config, sources in (
        load_config({name: text}),
        load_config({name: value}),
        load_config({}, {f"OCTAVO_{name.upper()}": text}),
        load_config({}, None, write(tmp_path, f"{name} = {toml}\n")),
    ):
        assert getattr(config, name) == value
        assert sources[name] != "default"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("2GiB", 2 << 30),
        ("2 g", 2 << 30),
        ("1.5M", 3 << 19),
        ("3kB", 3000),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert load_config({"kv_cache_memory": text})[0].kv_cache_memory == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0.0), ("2s", 2.0), ("1.5", 1.5), ("100 ms", 0.1), ("7m", 420.0), ("2 H", 7200.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert load_config({"aging": text})[0].aging == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "2 apples", "1e3", "nan", "inf"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="aging: expected a duration such as 2s"):
        load_config({"aging": text})


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 apples", "1e3", "0x10", "nan", "9" * 400])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory: expected a size such as 2GiB"):
        load_config({"kv_cache_memory": text})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("port", 65536, "port: expected at most 65535, got 65536"),
        ("port", -1, "port: expected at least 0, got -1"),
        ("port", True, "port: expected a whole number, got True"),
        ("port", 1.5, "port: expected a whole number, got 1.5"),
        ("port", None, "port: expected a whole number, got None"),
        ("port", "http", "port: expected a whole number, got 'http' (flag --port)"),
        ("max_model_len", 1, "max_model_len: expected at least 2, got 1"),
        ("max_num_seqs", 0, "max_num_seqs: expected at least 1, got 0"),
        ("block_size", 24, "block_size: expected one of 16, 32, 64, 128, got 24"),
        ("memory_fraction", float("nan"), "memory_fraction: expected at least 0.01, got nan"),
        ("memory_fraction", 1, "memory_fraction: expected at most 0.95, got 1"),
        ("watermark", "half", "watermark: expected a number, got 'half' (flag --watermark)"),
        ("enable_prefix_caching", "maybe", "expected true or false, got 'maybe'"),
        ("enable_prefix_caching", 1, "enable_prefix_caching: expected true or false, got 1"),
        ("model", "", "model: expected a text, got ''"),
        ("model", 5, "model: expected a text, got 5"),
        ("log_level", "loud", "log_level: expected one of debug, info, warning, error, got 'loud'"),
        ("max_modle_len", 5, "unknown setting 'max_modle_len'; did you mean 'max_model_len'?"),
    ],
)
def test_what_is_refused(name: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({name: value})
    assert says in str(caught.value)


def test_lists() -> None:
    for given in ("a, b,c", ["a", "b,c"], ["a,b", "c"]):
        assert load_config({"api_key": given})[0].api_key == ("a", "b", "c")
    for given in ("", ",", "a,,b", ["a", ""], [" "]):
        with pytest.raises(ConfigError, match="api_key: expected texts with commas .*empty one"):
            load_config({"api_key": given})


def test_a_list_in_the_file_is_one_of_toml(tmp_path: Path) -> None:
    config, _ = load_config({}, None, write(tmp_path, "api_key = ['a', 'b']\n"))
    assert config.api_key == ("a", "b")


def test_secrets_are_shown_nowhere(tmp_path: Path) -> None:
    config, _ = load_config({"api_key": "sk-secret", "admin_api_key": ["sk-secret"]})
    assert "sk-secret" not in repr(config)
    for name, rule in RULES.items():
        assert rule.secret == name.endswith("api_key"), name
    for file in (
        "api_key = {a = 'sk-secret'}",
        "api_key = ['sk-secret', 5]",
        "api_key = 'sk-secret,'",
    ):
        with pytest.raises(ConfigError) as caught:
            load_config({}, None, write(tmp_path, file + "\n"))
        assert "sk-secret" not in str(caught.value)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean 'OCTAVO_MAX_MODEL_LEN'"):
        load_config({}, {"OCTAVO_MAX_MODEL_LEM": "5"})
    # What a cluster sets for a service that is called octavo.
    load_config({}, {"OCTAVO_SERVICE_HOST": "10.0.0.1", "OCTAVO_PORT_8000_TCP_ADDR": "10.0.0.1"})
    with pytest.raises(ConfigError, match=r"port: expected .* \(environment OCTAVO_PORT\)"):
        load_config({}, {"OCTAVO_PORT": "tcp://10.0.0.1:8000"})


def test_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the settings file"):
        load_config({}, None, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config({}, None, write(tmp_path, "port 8000"))
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config({}, None, write(tmp_path, "port = " + "[" * 100_000))
    with pytest.raises(ConfigError, match="unknown setting 'prot'; did you mean 'port'"):
        load_config({}, None, write(tmp_path, "prot = 8000"))
    with pytest.raises(ConfigError, match=r"max_model_len: expected .* \(file .*octavo.toml"):
        load_config({}, None, write(tmp_path, "max_model_len = 'a'"))
    with pytest.raises(ConfigError, match="port: expected a whole number"):
        load_config({}, None, write(tmp_path, "port = [8000]"))


def test_flags_are_named_as_fields() -> None:
    assert flag_of("enable_prefix_caching") == "--enable-prefix-caching"
