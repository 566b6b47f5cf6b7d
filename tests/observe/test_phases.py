"""Each phase of a start is a line with its seconds."""

import logging

import pytest

from octavo.observe.phases import Phases


def test_a_phase_takes_from_the_end_of_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    times = iter([10.0, 10.5, 12.75])
    phases = Phases(lambda: next(times))
    phases.end("model opened")
    phases.end("weights packed")
    assert [record.getMessage() for record in caplog.records] == [
        "start-up: model opened, 0.50 s",
        "start-up: weights packed, 2.25 s",
    ]
    assert caplog.records[1].seconds == 2.25  # type: ignore[attr-defined]
