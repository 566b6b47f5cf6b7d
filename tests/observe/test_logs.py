"""A JSON log is one object a line, with what the record brought."""

import json
import logging
from collections.abc import Callable, Iterator

import pytest

from octavo.observe.logs import start_logging


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """What is written to standard error; the handlers of the root logger come back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield lambda: capsys.readouterr().err
    root.handlers, root.level = handlers, level


def test_a_record_is_an_object(written: Callable[[], str]) -> None:
    start_logging("info", tracebacks=True, form="json")
    logging.getLogger("octavo.some").info(
        "lost %d of\n%s", 2, "ünïcödé", extra={"request_id": "r1"}
    )
    (line,) = written().splitlines()
    told = json.loads(line)
    assert told.pop("time").endswith("+00:00")
    assert told == {
        "level": "INFO",
        "logger": "octavo.some",
        "message": "lost 2 of\nünïcödé",
        "request_id": "r1",
    }


def test_an_exception_stays_on_the_line(written: Callable[[], str]) -> None:
    start_logging("info", tracebacks=True, form="json")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("octavo.some").exception("it failed", extra={"what": {1, 2}})
    (line,) = written().splitlines()
    told = json.loads(line)
    assert told["exception"].startswith("Traceback")
    assert told["exception"].endswith("ValueError: broken")


@pytest.mark.parametrize("form", ["text", "json"])
def test_levels_below_are_not_written(written: Callable[[], str], form: str) -> None:
    start_logging("warning", tracebacks=True, form=form)  # type: ignore[arg-type]
    logging.getLogger("octavo.some").info("never")
    logging.getLogger("octavo.some").warning("always")
    log = written()
    assert "always" in log
    assert "never" not in log


def test_text_shows_a_traceback_only_when_asked(written: Callable[[], str]) -> None:
    for tracebacks in (True, False):
        start_logging("info", tracebacks=tracebacks)
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("octavo.some").exception("it failed")
    assert written().count("Traceback") == 1
