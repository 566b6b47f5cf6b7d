"""The status line of a server in its log."""

import asyncio
import logging
from dataclasses import replace

import pytest
from tests.serve.scripted import IDLE

from octavo.observe.metrics import Metrics
from octavo.serve.reporting import report


def test_it_is_said_while_something_happens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sampled = iter([0, 0, 30, 30])

    class Ended(Exception):
        pass

    def status() -> object:
        try:
            return replace(IDLE, tokens_sampled=IDLE.tokens_sampled + next(sampled))
        except StopIteration:
            raise Ended from None

    with pytest.raises(Ended):
        asyncio.run(report(Metrics(), status, every_s=0))  # type: ignore[arg-type]
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("running 0, waiting 0, in 0 tokens/s, out ")
    assert record.completion_tokens_per_s > 0  # type: ignore[attr-defined]
