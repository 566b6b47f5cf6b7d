"""octavo batch: answer the requests of a file into another."""

import argparse
import logging
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.flags import SERVER_ONLY, add_engine_flags, engine_config
from octavo.errors import InvalidRequest
from octavo.observe.logs import start_logging

if TYPE_CHECKING:
    from octavo.engine.progress import Progress
    from octavo.serve.batch import Count

MEANT = frozenset(
    {
        "served_model_name",
        "max_body_size",
        "trust_request_chat_template",
        "request_timeout",
        "seed",
        "log_level",
        "log_format",
    }
)
"""What of the settings of a server holds for a batch too."""

EVERY_S = 10.0
"""How often who is no terminal is told how far it is."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", type=Path, metavar="INPUT", help="requests, one a line, in OpenAI's batch form"
    )
    parser.add_argument(
        "output",
        type=Path,
        metavar="OUTPUT",
        help="answers are added to it; what it answers already is not run again",
    )
    parser.add_argument(
        "--in-flight",
        type=int,
        metavar="WHOLE",
        help="most requests under way at once (default: twice --max-num-seqs)",
    )
    add_engine_flags(parser, without=SERVER_ONLY - MEANT)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 when every line has its answer, also where that is an error."""
    in_flight = arguments.in_flight
    if in_flight is not None and in_flight < 1:
        raise InvalidRequest(f"--in-flight must be at least 1, not {in_flight}", param="in_flight")
    config, sources = engine_config(arguments)
    if sources["log_level"] == "default":  # a server's, which would break the bar
        config = replace(config, log_level="warning")
    debugging = logging.getLogger().isEnabledFor(logging.DEBUG)
    level = "debug" if debugging else config.log_level
    start_logging(level, tracebacks=debugging, form=config.log_format)
    from octavo.engine.progress import Progress
    from octavo.serve.batch import run_batch

    began_s = time.monotonic()
    with Progress(plain_every_s=EVERY_S) as progress:
        count = run_batch(
            config,
            sources,
            arguments.input,
            arguments.output,
            in_flight=in_flight,
            told=partial(_show, progress),
        )
    print(_summary(count, time.monotonic() - began_s), file=sys.stderr, flush=True)
    return 0


def _show(progress: "Progress", count: "Count") -> None:
    progress.total = count.lines
    progress.done = count.earlier + count.answers
    progress.errors, progress.tokens = count.errors, count.tokens
    progress.update()


def _summary(count: "Count", took_s: float) -> str:
    earlier = f"; {count.earlier:,} were there before" if count.earlier else ""
    return (
        f"{count.answers:,} answers, {count.errors:,} of them errors{earlier};"
        f" {count.tokens:,} tokens in {took_s:.1f} s"
    )
