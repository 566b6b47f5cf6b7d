"""What the user asks for: one dataclass, from which flags, environment, file and Python all come.

`None` means: decide for me; `octavo.resolve` does, once model and machine are known. A value is
taken from the first of these that has it, and `Sources` keeps which one that was:

    a flag --max-model-len  >  OCTAVO_MAX_MODEL_LEN  >  max_model_len in a TOML file  >  the default
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from octavo.errors import ConfigError
from octavo.units import GIB, KIB, MIB

Kind = Literal["text", "list", "whole", "share", "size", "duration", "switch"]
Sources = Mapping[str, str]
"""For each setting where its value came from: `flag --port`, `default`, …"""

ENVIRONMENT_PREFIX = "OCTAVO_"
# Variables of Octavo that are no settings.
_OTHER_VARIABLES = {
    "OCTAVO_CACHE",
    "OCTAVO_CONFIG",
    "OCTAVO_LOG",
    "OCTAVO_TEST_SEED",
    "OCTAVO_TEST_SOAK",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one setting is read and what it may be. Bounds are inclusive. What is `secret` is shown
    nowhere."""

    kind: Kind
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[object, ...] = ()
    secret: bool = False


def _setting(
    default: Any,
    kind: Kind,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[object, ...] = (),
    secret: bool = False,
) -> Any:
    rule = Rule(kind=kind, help=help, low=low, high=high, choices=choices, secret=secret)
    return field(default=default, repr=not secret, metadata={"rule": rule, "help": help})


AdmissionRule = Literal["full", "chunked", "predicted"]
Policy = Literal["fcfs", "priority", "fair", "slo"]
Preemption = Literal["auto", "swap", "recompute"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
GenerationConfig = Literal["auto", "none"]
Quantization = Literal["none", "stored", "int8", "int4"]
KVCacheDtype = Literal["bfloat16", "int8"]
TOOL_CALL_PARSERS = (
    "hermes",
    "llama3_json",
    "pythonic",
    "mistral",
    "granite",
    "smollm2",
    "smollm3",
    "none",
)
REASONING_PARSERS = ("deepseek_r1", "qwen3", "smollm3", "mistral", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of one engine. Each is checked on its own here, against the others, the model
    and the machine in `resolve`.

    Raises   ConfigError: a value is of the wrong type or out of range.
    """

    model: str = _setting(
        "demo",
        "text",
        "model to serve: a folder, a file, demo, pypi:PACKAGE==VERSION/FILE or hf:ORG/REPO",
    )
    served_model_name: str | None = _setting(
        None, "text", "name of the model in the API (default: the model reference)"
    )
    host: str = _setting("127.0.0.1", "text", "address to listen on")
    port: int = _setting(8000, "whole", "port to listen on; 0 takes a free one", low=0, high=65535)
    api_key: tuple[str, ...] = _setting(
        (),
        "list",
        "API keys, one of which requests must have; others on this machine can read a flag, so"
        " better in the environment or a file (default: none is needed)",
        secret=True,
    )
    admin_api_key: tuple[str, ...] = _setting(
        (),
        "list",
        "API keys that open /admin, /debug and /metrics as well (default: none)",
        secret=True,
    )
    api_key_file: str | None = _setting(
        None, "text", "TOML file of API keys with tenants and quotas: docs/security.md"
    )
    ssl_certfile: str | None = _setting(
        None, "text", "PEM file of the certificate chain, for HTTPS (default: plain HTTP)"
    )
    ssl_keyfile: str | None = _setting(
        None, "text", "PEM file of its private key (default: it is in the same file)"
    )
    allowed_origins: tuple[str, ...] = _setting(
        (),
        "list",
        "origins whose pages may use the server from a browser, as https://chat.example.org, or *"
        " (default: its own only)",
    )
    root_path: str | None = _setting(
        None, "text", "path below which a proxy shows the server, as /llm (default: none)"
    )
    max_body_size: int = _setting(8 * MIB, "size", "largest body of a request", low=1, high=1 << 31)
    trust_request_chat_template: bool = _setting(
        False,
        "switch",
        "take chat templates that requests bring; a template is a program, so only where clients"
        " are trusted",
    )
    tool_call_parser: str | None = _setting(
        None,
        "text",
        "how the model writes its calls of tools (default: as its chat template does)",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str | None = _setting(
        None,
        "text",
        "how the model marks its reasoning (default: as its chat template does)",
        choices=REASONING_PARSERS,
    )
    request_timeout: float | None = _setting(
        None,
        "duration",
        "longest time a request may take; it may ask for less with timeout_s (default: no limit)",
        low=1e-3,
        high=1e6,
    )
    warm: str | None = _setting(
        None,
        "text",
        "file of prompts that are computed before the server is ready, so that the prefix cache has"
        " them: a JSON string or the body of a request a line (default: none)",
    )
    drain_timeout: float = _setting(
        30.0,
        "duration",
        "time in which answers under way may be completed once the server is told to end",
        low=0.0,
        high=1e6,
    )
    max_connections: int = _setting(
        1000, "whole", "most connections at once; more are turned away with status 503", low=1
    )
    receive_timeout: float = _setting(
        60.0, "duration", "time in which a request has to arrive", low=0.01, high=1e6
    )
    keep_alive_timeout: float = _setting(
        75.0, "duration", "time for which a connection without a request stays", low=1.0, high=1e6
    )
    max_model_len: int | None = _setting(
        None,
        "whole",
        "longest prompt and answer together, in tokens (default: what the model knows and fits)",
        low=2,
    )
    max_num_seqs: int | None = _setting(
        None, "whole", "most sequences that run at once (default: 64)", low=1, high=65536
    )
    max_num_batched_tokens: int | None = _setting(
        None, "whole", "most tokens computed in one step (default: 512)", low=1, high=1 << 20
    )
    draft_model: str | None = _setting(
        None,
        "text",
        "smaller model with the same vocabulary that guesses tokens ahead, named as --model is;"
        " answers stay the same (default: none, guesses come from what a text has said before)",
    )
    max_draft_tokens: int | None = _setting(
        None,
        "whole",
        "most tokens that are guessed ahead for a sequence in one step; answers stay the same"
        " (0: none; default: 8, and as many fewer as is quicker)",
        low=0,
        high=64,
    )
    max_logprobs: int = _setting(
        20,
        "whole",
        "most tokens of a position whose log-probabilities a request may ask for (-1: all of the"
        " vocabulary)",
        low=-1,
    )
    max_queued_requests: int | None = _setting(
        None, "whole", "most answers that wait; more are turned away (default: no limit)", low=1
    )
    max_queued_tokens: int | None = _setting(
        None,
        "whole",
        "most prompt tokens that wait; requests beyond are turned away (default: no limit)",
        low=1,
    )
    max_queue_time: float | None = _setting(
        None,
        "duration",
        "a request that waits so long to be started ends with an error, as 30s (default: never)",
        low=1e-3,
        high=1e6,
    )
    policy: Policy = _setting(
        "priority",
        "text",
        "who goes first: by arrival (fcfs); by priority, and in one priority by arrival (priority),"
        " by what each tenant was served (fair) or by deadline (slo)",
        choices=get_args(Policy),
    )
    aging: float = _setting(
        300.0,
        "duration",
        "a request that waits climbs one priority class for each such time, as 5m; 0: never",
        low=0.0,
        high=1e6,
    )
    quantization: Quantization | None = _setting(
        None,
        "text",
        "form of the weights in memory: none (bfloat16), stored (integers that the checkpoint holds"
        " are kept), int8 or int4 (default: none)",
        choices=get_args(Quantization),
    )
    generation_config: GenerationConfig = _setting(
        "auto",
        "text",
        "how to sample where a request does not say: auto (as the model's generation_config.json"
        " says), or none (Octavo's own defaults)",
        choices=get_args(GenerationConfig),
    )
    block_size: int = _setting(
        16, "whole", "tokens in one KV block", choices=(16, 32, 64, 128), low=16
    )
    kv_cache_memory: int | None = _setting(
        None, "size", "memory of the KV cache, as 2GiB (default: from the memory fraction)", low=1
    )
    kv_cache_dtype: KVCacheDtype | None = _setting(
        None,
        "text",
        "numbers in the KV cache: bfloat16, or int8 with a scale for each token and head, which"
        " takes 0.53 of the memory for heads of 64 (default: bfloat16)",
        choices=get_args(KVCacheDtype),
    )
    memory_fraction: float = _setting(
        0.5,
        "share",
        "share of the free memory of the machine or its cgroup for weights, KV and activations",
        low=0.01,
        high=0.95,
    )
    watermark: float = _setting(
        0.01,
        "share",
        "share of the KV blocks that admission leaves free for running sequences to grow",
        low=0.0,
        high=0.5,
    )
    admission: AdmissionRule = _setting(
        "full",
        "text",
        "what has KV blocks reserved when a request starts: all of its tokens (full), the first"
        " chunk (chunked), or all of its tokens while there is room for the answers that are"
        " expected (predicted)",
        choices=get_args(AdmissionRule),
    )
    ttft_target: float | None = _setting(
        None,
        "duration",
        "time to first token that requests should have under policy slo, as 2s (default: none)",
        low=1e-3,
        high=1e6,
    )
    tpot_target: float | None = _setting(
        None,
        "duration",
        "time per output token that requests should have under policy slo, as 100ms"
        " (default: none)",
        low=1e-3,
        high=1e6,
    )
    preemption: Preemption = _setting(
        "auto",
        "text",
        "what becomes of the KV of a request that yields: moved to the swap space and back (swap),"
        " computed again (recompute), or what is estimated to be quicker (auto)",
        choices=get_args(Preemption),
    )
    swap_space: int | None = _setting(
        None,
        "size",
        "memory for the KV of requests that yielded, as 1GiB; 0 is none (default: an eighth of the"
        " KV cache)",
        low=0,
    )
    enable_prefix_caching: bool = _setting(
        True, "switch", "share the KV of equal prompt beginnings between requests"
    )
    pin_quota: float = _setting(
        0.25,
        "share",
        "share of the KV blocks that requests may pin, so that the beginning of a prompt stays",
        low=0.0,
        high=1.0,
    )
    threads: int | None = _setting(
        None, "whole", "compute threads (default: the cores this process may use)", low=1, high=1024
    )
    isa: str | None = _setting(
        None, "text", "instruction set of the kernels (default: the best this machine has)"
    )
    seed: int | None = _setting(
        None,
        "whole",
        "makes the seeds of requests that bring none repeatable (default: drawn afresh)",
        low=0,
        high=(1 << 63) - 1,
    )
    stall_timeout: float | None = _setting(
        None,
        "duration",
        "an engine that has work and ends no step for so long is started again, as 60s; 0: never"
        " (default: from the size of the model, 60s or more)",
        low=0.0,
        high=1e6,
    )
    journal: str | None = _setting(
        None,
        "text",
        "file to which every decision and its reason is appended, with the token ids of all"
        " requests, for octavo explain and replay (default: none)",
    )
    otlp_endpoint: str | None = _setting(
        None,
        "text",
        "address of a collector to which a span of each request is sent, as http://127.0.0.1:4318;"
        " needs octavo[otel] (default: none)",
    )
    web: bool = _setting(True, "switch", "serve the page at /: a chat and the live block pool")
    log_level: LogLevel = _setting("info", "text", "how much is logged", choices=get_args(LogLevel))
    log_format: LogFormat = _setting(
        "text",
        "text",
        "how a log line reads: as text, or as a JSON object",
        choices=get_args(LogFormat),
    )

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            _check(name, getattr(self, name), rule, optional=DEFAULTS[name] is None)


RULES: Mapping[str, Rule] = MappingProxyType(
    {item.name: item.metadata["rule"] for item in fields(EngineConfig)}
)
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {item.name: item.default for item in fields(EngineConfig)}
)


def load_config(
    flags: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> tuple[EngineConfig, Sources]:
    """The settings from all sources, and for each where it came from.

    `flags` are settings given by hand, on the command line or as Python arguments: text is read
    as a setting would be, other values are taken as they are.

    Raises   ConfigError: an unknown name, a value that cannot be read or is out of range.
    """
    values: dict[str, object] = {}
    sources = dict.fromkeys(RULES, "default")
    for layer in (_from_file(file), _from_environment(environment or {}), _from_flags(flags)):
        for name, (value, source) in layer.items():
            values[name] = _read(name, value, source)
            sources[name] = source
    return EngineConfig(**values), MappingProxyType(sources)  # type: ignore[arg-type]


def flag_of(name: str) -> str:
    """
    >>> flag_of("max_model_len")
    '--max-model-len'
    """
    return "--" + name.replace("_", "-")


def parse_size(text: str) -> int:
    """Bytes from text such as 2GiB, 512M or 1000000; K, M, G and T alone are binary.

    >>> parse_size("1.5 GiB") == 3 * 2**29
    True
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    factor = _SIZE_UNITS.get(match[2]) if match else None
    if match is None or factor is None:
        raise ValueError("expected a size such as 2GiB")
    return int(float(match[1]) * factor)


_SIZE_UNITS = {
    "": 1,
    "b": 1,
    **dict.fromkeys(("k", "kib"), KIB),
    **dict.fromkeys(("m", "mib"), MIB),
    **dict.fromkeys(("g", "gib"), GIB),
    **dict.fromkeys(("t", "tib"), 1024 * GIB),
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_duration(text: str) -> float:
    """Seconds from text such as 100ms, 2s, 5m, 1h or 1.5; a number alone is in seconds.

    >>> parse_duration("100 ms")
    0.1
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    unit = _DURATION_UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise ValueError("expected a duration such as 2s")
    times, divisor = unit
    return float(match[1]) * times / divisor


# Times and divided by, so that 100 ms is the float nearest to 0.1.
_DURATION_UNITS = {"": (1, 1), "s": (1, 1), "ms": (1, 1000), "m": (60, 1), "h": (3600, 1)}

Layer = dict[str, tuple[object, str]]


def _from_flags(flags: Mapping[str, object]) -> Layer:
    for name in flags:
        if name not in RULES:
            raise ConfigError(_unknown(name, RULES, "setting"))
    return {name: (value, f"flag {flag_of(name)}") for name, value in flags.items()}


def _from_environment(environment: Mapping[str, str]) -> Layer:
    known = {ENVIRONMENT_PREFIX + name.upper(): name for name in RULES}
    layer: Layer = {}
    for variable, value in environment.items():
        if variable in known:
            layer[known[variable]] = (value, f"environment {variable}")
        elif _is_slip(variable, known):
            raise ConfigError(_unknown(variable, known, "environment variable"))
    return layer


def _is_slip(variable: str, known: Mapping[str, str]) -> bool:
    """A misspelt setting. Other names are none of ours: a cluster sets OCTAVO_SERVICE_HOST and
    the like for a service that is called octavo."""
    if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _OTHER_VARIABLES:
        return False
    return bool(difflib.get_close_matches(variable, known, n=1, cutoff=0.9))


def _from_file(file: Path | None) -> Layer:
    if file is None:
        return {}
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"settings file {file} is not TOML: {error}") from error
    layer: Layer = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in RULES:
            raise ConfigError(f"settings file {file}: {_unknown(key, RULES, 'setting')}")
        layer[name] = (value, f"file {file}")
    return layer


def _unknown(name: str, known: Mapping[str, object], what: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"unknown {what} {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def _read(name: str, value: object, source: str) -> object:
    """The value that a text stands for; anything but text is left to the check."""
    rule = RULES[name]
    if rule.kind == "list":
        return _read_list(name, value, source)
    if not isinstance(value, str) or rule.kind == "text":
        return value
    try:
        if rule.kind == "whole":
            return int(value)
        if rule.kind == "share":
            return float(value)
        if rule.kind == "size":
            return parse_size(value)
        if rule.kind == "duration":
            return parse_duration(value)
        return _SWITCH[value.strip().lower()]
    except (ValueError, KeyError, OverflowError) as error:
        raise ConfigError(
            f"{name}: expected {_EXPECTED[rule.kind]}, got {value!r} ({source})"
        ) from error


def _read_list(name: str, value: object, source: str) -> object:
    """The texts between commas, of one text or of several. One that holds none is a slip: a
    variable, say, that was to be filled in."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        return value
    parts = [part.strip() for text in value for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{name}: expected {_EXPECTED['list']}, got an empty one ({source})")
    return tuple(parts)


_SWITCH = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_EXPECTED: Mapping[Kind, str] = {
    "text": "a text",
    "list": "texts with commas between them",
    "whole": "a whole number",
    "share": "a number",
    "size": "a size such as 2GiB",
    "duration": "a duration such as 2s",
    "switch": "true or false",
}
_TYPES: Mapping[Kind, tuple[type, ...]] = {
    "text": (str,),
    "list": (tuple,),
    "whole": (int,),
    "share": (int, float),
    "size": (int,),
    "duration": (int, float),
    "switch": (bool,),
}


def _check(name: str, value: Any, rule: Rule, *, optional: bool) -> None:
    if value is None and optional:
        return
    is_typed = isinstance(value, _TYPES[rule.kind])
    if rule.kind == "list":
        is_typed = is_typed and all(isinstance(each, str) and each for each in value)
    if not is_typed or (isinstance(value, bool) and rule.kind != "switch") or value == "":
        got = "something else" if rule.secret else repr(value)
        raise ConfigError(f"{name}: expected {_EXPECTED[rule.kind]}, got {got}")
    if rule.choices and value not in rule.choices:
        raise ConfigError(
            f"{name}: expected one of {', '.join(map(str, rule.choices))}, got {value!r}"
        )
    # Written so that NaN, which compares false with everything, is out of range.
    if rule.low is not None and not value >= rule.low:
        raise ConfigError(f"{name}: expected at least {rule.low:g}, got {value}")
    if rule.high is not None and not value <= rule.high:
        raise ConfigError(f"{name}: expected at most {rule.high:g}, got {value}")
