"""octavo serve | chat | generate | batch | pull | bench | profile | replay | explain | limits …

Exit codes: 0 done; 2 bad input (one line on stderr says what); 1 Octavo failed; 130 Ctrl-C.
A command imports what it needs when it runs, so that none waits for the libraries of another.
"""

import argparse
import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from octavo import __version__
from octavo.cli import batch, bench, profile
from octavo.cli.flags import (
    SERVER_ONLY,
    add_engine_flags,
    add_sampling_flags,
    engine_config,
)
from octavo.errors import ConfigError, OctavoError, RequestError, SetupError
from octavo.observe.logs import start_logging

Command = Callable[[argparse.Namespace], int]

MAX_LINE_CHARACTERS = 1000
DEFAULT_URL = "http://127.0.0.1:8000"

BAD_INPUT, FAILED, INTERRUPTED, READER_GONE = 2, 1, 130, 141

GC_THRESHOLDS = (20_000, 50, 100)
"""A start makes some hundred thousand objects that stay. With Python's own thresholds (700, 10, 10)
the collector looks at them again and again, for 0.1 s of processor time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Tracebacks are shown with OCTAVO_LOG=debug only."""
    debugging = os.environ.get("OCTAVO_LOG", "").lower() == "debug"
    gc.set_threshold(*GC_THRESHOLDS)
    _open_closed_streams()
    try:
        arguments = _parse(argv)
        start_logging("debug" if debugging else "warning", tracebacks=debugging)
        command: Command = arguments.command
        return command(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not try to flush it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except Exception as error:
        if debugging:
            logging.getLogger(__name__).exception("the command failed")
        return _complain(error)


def _open_closed_streams() -> None:
    """A stream that our parent has closed reads as empty and swallows what is written."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _complain(error: Exception) -> int:
    """Say in one line what went wrong; whose fault it was decides the exit code."""
    message = str(error) if isinstance(error, OctavoError) else f"internal error: {error!r}"
    line = " ".join(message.split())
    if len(line) > MAX_LINE_CHARACTERS:
        line = f"{line[: MAX_LINE_CHARACTERS // 2]} … {line[-MAX_LINE_CHARACTERS // 2 :]}"
    print(f"octavo: error: {line}", file=sys.stderr)
    return BAD_INPUT if isinstance(error, RequestError | SetupError) else FAILED


class _Parser(argparse.ArgumentParser):
    """One line on bad input, where argparse would print the usage as well."""

    def error(self, message: str) -> NoReturn:
        print(f"octavo: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(BAD_INPUT)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; what is left over is the complaint of the command, not of `octavo`."""
    arguments, unknown = build_parser().parse_known_args(argv)
    if unknown:
        parser: _Parser = arguments.parser
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(unknown, parser)}")
    return arguments


def _meant(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """The flags that were meant, as far as can be told; many write --max_tokens."""
    known = [flag for action in parser._actions for flag in action.option_strings]
    written = [word.partition("=")[0].replace("_", "-") for word in unknown if word[:2] == "--"]
    near = [match for word in written for match in get_close_matches(word, known, 1, 0.75)]
    return f"; did you mean {', '.join(near)}?" if near else ""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="octavo",
        description="Serve language models from a paged KV cache.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    serve = _add(commands, "serve", _serve, "answer over HTTP, as the OpenAI API does")
    serve.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help="the same as --model MODEL"
    )
    add_engine_flags(serve)

    chat = _add(commands, "chat", _chat, "talk with a model in the terminal")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_flags(chat)
    add_engine_flags(chat, without=SERVER_ONLY)

    generate = _add(commands, "generate", _generate, "print the answer to one prompt")
    generate.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from stdin")
    form = generate.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="plain completion, no chat template")
    form.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_flags(generate)
    add_engine_flags(generate, without=SERVER_ONLY)

    batch.add_flags(_add(commands, "batch", batch.run, "answer a file of requests into another"))

    pull = _add(commands, "pull", _pull, "fetch models into the cache; prints where they lie")
    pull.add_argument("models", nargs="*", default=["demo"], metavar="MODEL", help="default: demo")

    benches = _add(commands, "bench", None, "measure")
    measures = benches.add_subparsers(metavar="MEASURE", required=True, parser_class=_Parser)
    for measure in bench.MEASURES:
        measure.add_flags(_add(measures, measure.name, measure.command, measure.help))

    profile.add_flags(_add(commands, "profile", profile.run, "tell where a step's time goes"))

    replay = _add(commands, "replay", _replay, "make every decision of a journal again, compare")
    replay.add_argument("file", type=Path, metavar="FILE", help="a journal, from --journal FILE")

    explain = _add(commands, "explain", _explain, "tell why a request waited and what it cost")
    explain.add_argument("file", type=Path, metavar="FILE", help="a journal, from --journal FILE")
    explain.add_argument(
        "request", nargs="?", metavar="REQUEST", help="its id or how that begins (default: all)"
    )

    cache = _add(commands, "cache", None, "look into the prefix cache of a running server")
    actions = cache.add_subparsers(metavar="ACTION", required=True, parser_class=_Parser)
    misses = _add(actions, "explain", _cache_explain, "tell what is cached of a prompt, and why")
    misses.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from stdin")
    kind = misses.add_mutually_exclusive_group()
    kind.add_argument("--raw", action="store_true", help="plain completion, no chat template")
    kind.add_argument("--system", metavar="TEXT", help="system message")
    kind.add_argument(
        "--body", action="store_true", help="PROMPT is the JSON body of a request, cache fields too"
    )
    misses.add_argument("--salt", metavar="TEXT", help="the cache_salt of the request")
    flush = _add(actions, "flush", _cache_flush, "forget what was computed before")
    limits = _add(commands, "limits", _limits, "show or change the limits of a running server")
    limits.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        dest="changes",
        help="set these limits, all or none; the value none lifts one that may be absent",
    )
    for remote in (misses, flush, limits):
        remote.add_argument(
            "--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})"
        )
        remote.add_argument(
            "--api-key",
            metavar="TEXT",
            help="a key with the admin right, where the server asks for one (default: the first of"
            " OCTAVO_ADMIN_API_KEY, else of OCTAVO_API_KEY)",
        )
    return parser


def _add(
    commands: "argparse._SubParsersAction[_Parser]", name: str, command: Command | None, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    if command is not None:
        parser.set_defaults(command=command, parser=parser)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    named = arguments.positional_model
    if named is not None:
        if getattr(arguments, "model", named) != named:
            raise ConfigError(f"two models, {named!r} and --model {arguments.model!r}; name one")
        arguments.model = named
    config, sources = engine_config(arguments)
    debugging = logging.getLogger().isEnabledFor(logging.DEBUG)
    level = "debug" if debugging else config.log_level
    start_logging(level, tracebacks=True, form=config.log_format)
    from octavo.serve.main import run_server

    return run_server(config, sources)


def _chat(arguments: argparse.Namespace) -> int:
    from octavo.cli.answer import chat

    return chat(arguments)


def _generate(arguments: argparse.Namespace) -> int:
    from octavo.cli.answer import generate

    return generate(arguments)


def _pull(arguments: argparse.Namespace) -> int:
    from octavo.models.reference import resolve_reference

    for model in arguments.models:
        print(resolve_reference(model, progress=sys.stderr.isatty(), refresh=True), flush=True)
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from octavo.cli.history import replay

    return replay(arguments)


def _explain(arguments: argparse.Namespace) -> int:
    from octavo.cli.history import explain

    return explain(arguments)


def _limits(arguments: argparse.Namespace) -> int:
    from octavo.cli.remote import limits

    return limits(arguments)


def _cache_explain(arguments: argparse.Namespace) -> int:
    from octavo.cli.remote import explain_cache

    return explain_cache(arguments)


def _cache_flush(arguments: argparse.Namespace) -> int:
    from octavo.cli.remote import flush_cache

    return flush_cache(arguments)


if __name__ == "__main__":
    sys.exit(main())
