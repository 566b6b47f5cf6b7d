"""Records: medians, spreads, percentiles, and what tells one machine from another."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo.bench.record import (
    command_line,
    cpu_name,
    engine_name,
    machine,
    median_row,
    percentile,
    spread_of,
)


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float
    steps: int


def test_medians_are_taken_field_by_field() -> None:
    rows = [Row("a", 3.0, 7), Row("a", 1.0, 9), Row("a", 2.0, 8), Row("a", 10.0, 6)]
    assert median_row(rows) == Row("a", 2.5, 7)
    assert median_row(rows[:1]) == rows[0]


def test_a_spread_is_the_largest_over_the_smallest() -> None:
    assert spread_of([2.0, 3.0, 2.5]) == 1.5
    assert spread_of([4.0]) == 1.0
    assert spread_of([0.0, 4.0]) == 1.0


def test_percentiles() -> None:
    assert percentile([], 50) == 0.0
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile(list(map(float, range(101))), 99) == pytest.approx(99.0)


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A Fine CPU: 2 GHz\nmodel name\t: another\n")
    assert cpu_name(file) == "A Fine CPU: 2 GHz"
    file.write_text("processor\t: 0\n")
    assert cpu_name(file)
    assert machine()["cpu"] == cpu_name()
    assert engine_name().startswith("octavo ")


@pytest.mark.parametrize("program", ["/usr/bin/octavo", "/x/octavo/cli/main.py"])
def test_the_command_is_as_it_was_typed(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [program, "bench", "core", "--runs", "2"])
    assert command_line() == "octavo bench core --runs 2"
