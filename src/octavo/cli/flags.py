"""Flags: the engine's are made from the settings' own fields, those of sampling are the API's."""

import argparse
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from octavo.config import DEFAULTS, RULES, EngineConfig, Sources, flag_of, load_config
from octavo.units import human_bytes

# A front's settings: they mean nothing to a command that answers in its own process.
SERVER_ONLY = frozenset(
    {
        "host",
        "port",
        "served_model_name",
        "api_key",
        "admin_api_key",
        "api_key_file",
        "ssl_certfile",
        "ssl_keyfile",
        "allowed_origins",
        "root_path",
        "max_body_size",
        "trust_request_chat_template",
        "tool_call_parser",
        "reasoning_parser",
        "request_timeout",
        "warm",
        "drain_timeout",
        "max_connections",
        "receive_timeout",
        "keep_alive_timeout",
        "max_queued_requests",
        "max_queued_tokens",
        "max_queue_time",
        "seed",
        "otlp_endpoint",
        "log_level",
        "log_format",
        "web",
    }
)


def add_engine_flags(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """One flag a setting. Values stay text: `load_config` reads all sources alike."""
    group = parser.add_argument_group(
        "engine", "each also as OCTAVO_NAME in the environment or name in a --config file"
    )
    group.add_argument("--config", type=Path, dest="config_file", help="TOML file with settings")
    for name, rule in RULES.items():
        if name in without:
            continue
        if rule.kind == "switch":
            group.add_argument(
                flag_of(name),
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=rule.help,
            )
        else:
            group.add_argument(
                flag_of(name),
                action="append" if rule.kind == "list" else "store",
                default=argparse.SUPPRESS,
                metavar="TEXT,…" if rule.kind == "list" else rule.kind.upper(),
                help=_help(name),
            )


def engine_config(arguments: argparse.Namespace) -> tuple[EngineConfig, Sources]:
    """The settings of a command, from flags, environment and file.

    Raises   ConfigError.
    """
    given = {name: value for name, value in vars(arguments).items() if name in RULES}
    file = arguments.config_file or os.environ.get("OCTAVO_CONFIG")
    return load_config(given, os.environ, Path(file) if file else None)


def given_flags(arguments: argparse.Namespace) -> list[str]:
    """The engine flags of a command as another may be given them; no list is among them."""
    given = {name: value for name, value in vars(arguments).items() if name in RULES}
    file = [] if arguments.config_file is None else [f"--config={arguments.config_file}"]
    return file + [
        f"{flag_of(name)}={value}" if not isinstance(value, bool) else _switch(name, value)
        for name, value in given.items()
    ]


def _switch(name: str, on: bool) -> str:
    return flag_of(name) if on else flag_of(name).replace("--", "--no-", 1)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """What an API caller may ask of an answer, under the same names."""
    group = parser.add_argument_group("sampling")
    for flag, kind, text in _NUMBERS:
        group.add_argument(
            flag, type=kind, default=argparse.SUPPRESS, metavar=kind.__name__.upper(), help=text
        )
    group.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )
    group.add_argument(
        "--bad-words",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="keep this text out of the answer; may be given several times",
    )
    group.add_argument(
        "--stop-token-ids",
        type=int,
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="ID",
        help="end the answer after any of these tokens",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=argparse.SUPPRESS,
        help="go on past the model's own end",
    )


_NUMBERS = (
    ("--max-tokens", int, "longest answer, in tokens (default: the rest of the context)"),
    ("--min-tokens", int, "tokens before which nothing ends the answer"),
    ("--temperature", float, "0 takes the likeliest token (default: 1)"),
    ("--top-p", float, "draw from the likeliest tokens that hold this share"),
    ("--top-k", int, "draw from this many of the likeliest tokens; 0 is off"),
    ("--min-p", float, "leave out tokens less likely than this share of the likeliest"),
    ("--typical-p", float, "draw from the least surprising tokens that hold this share"),
    ("--top-n-sigma", float, "draw from logits within so many standard deviations; 0 is off"),
    ("--repetition-penalty", float, "make tokens of prompt and answer less likely; 1 is off"),
    ("--presence-penalty", float, "taken from the logits of tokens that the answer has"),
    ("--frequency-penalty", float, "taken each time that the answer has the token"),
    ("--dry-multiplier", float, "make it less likely to go on a repetition; 0 is off"),
    ("--xtc-probability", float, "how often the likeliest of several choices are left out"),
    ("--xtc-threshold", float, "the share that makes a token one of those choices"),
    ("--seed", int, "the same seed gives the same answer"),
)
_SAMPLING = (
    *(flag.removeprefix("--").replace("-", "_") for flag, _, _ in _NUMBERS),
    "bad_words",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)


def sampling_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given, as arguments of `SamplingParams`."""
    given = {name: value for name, value in vars(arguments).items() if name in _SAMPLING}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }


def _help(name: str) -> str:
    rule, default = RULES[name], DEFAULTS[name]
    notes = [f"one of {', '.join(map(str, rule.choices))}"] if rule.choices else []
    if default not in (None, ()):
        shown = f"{default:g}s" if rule.kind == "duration" else default
        shown = human_bytes(default) if rule.kind == "size" else shown
        notes.append(f"default: {shown}")
    text = rule.help + (f" ({'; '.join(notes)})" if notes else "")
    return text.replace("%", "%%")
