"""Logging of a process: one record a line to standard error, as text for people or as JSON.

What goes into a record is numbers, names and ids. No prompt, answer or key is logged at any level.
"""

import logging
import sys
from datetime import UTC, datetime
from typing import Literal

import msgspec

Form = Literal["text", "json"]

_OWN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "color_message",
}
"""What Python's logging and uvicorn put into a record; all else came with it as `extra`."""


def start_logging(level: str, *, tracebacks: bool, form: Form = "text") -> None:
    """Write records of `level` and above; without `tracebacks` none is shown."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(level, tracebacks=tracebacks, form=form))
    handler.addFilter(_without_query)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _formatter(level: str, *, tracebacks: bool, form: Form) -> logging.Formatter:
    if form == "json":
        return JsonLines()
    # The names of loggers are for those who debug: `uvicorn.error` is where all is well, too.
    name = "%(name)s: " if level == "debug" else ""
    style = f"%(asctime)s %(levelname)s {name}%(message)s"
    return (logging.Formatter if tracebacks else _OneLine)(style)


def _without_query(record: logging.LogRecord) -> bool:
    """Nobody knows what clients put behind a path: a key, say."""
    if record.name == "uvicorn.access" and isinstance(record.args, tuple):
        record.args = tuple(
            each.partition("?")[0] if isinstance(each, str) else each for each in record.args
        )
    return True


class JsonLines(logging.Formatter):
    """A record as one JSON object: `time`, `level`, `logger`, `message`, what came with it as
    `extra` (`request_id` where there is one) and, after an exception, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: each for name, each in vars(record).items() if name not in _OWN_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class _OneLine(logging.Formatter):
    """A record without its traceback."""

    def formatException(self, *_: object) -> str:
        return ""
