"""What a measurement leaves behind: figures, with the machine, the version and the command.

A record is one JSON object. A results file has one a line, and only grows.
"""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import octavo
from octavo.errors import ConfigError
from octavo.ops.ceilings import Ceilings
from octavo.resolve import read_machine

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measurement. `rows` are medians of `runs` runs; `spread` is, of the figure that a row is
    about, the largest over the smallest of the runs. `limits` are the machine's, measured in the
    same runs; where there are none, `no_limits` says why."""

    benchmark: str
    engine: str
    settings: Mapping[str, Any]
    runs: int
    rows: Sequence[Mapping[str, Any]]
    spread: Sequence[float]
    limits: Mapping[str, Any] | None = None
    no_limits: str = ""
    machine: Mapping[str, Any] = field(default_factory=lambda: machine())
    command: str = field(default_factory=lambda: command_line())
    at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    def line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def command_line() -> str:
    """What was typed, without the folder of the program."""
    program = Path(sys.argv[0]).name
    return " ".join(["octavo" if program == "main.py" else program, *sys.argv[1:]])


def engine_name() -> str:
    """Octavo's version; in a checkout with the commit it is at."""
    folder = Path(octavo.__file__).parent
    commit = ""
    if (folder.parent.parent / ".git").exists():
        asked = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=7"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            commit = f" {done.stdout.strip()}" if done.returncode == 0 else ""
        except OSError:
            pass
    return f"octavo {octavo.__version__}{commit}"


def machine() -> dict[str, Any]:
    """What tells machines apart, and how busy this one was with others' work."""
    facts = read_machine()
    return {
        "cpu": cpu_name(),
        "cores": facts.cores,
        "free_bytes": facts.free_bytes,
        "load": Path("/proc/loadavg").read_text().split()[0],
    }


def cpu_name(file: Path = Path("/proc/cpuinfo")) -> str:
    """The model, as the system names it; the architecture where it names none."""
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def limits_of(ceilings: Ceilings) -> dict[str, float]:
    """Measured ceilings as they stand in a record."""
    operations = {f"{form}_gops": rate / 1e9 for form, rate in ceilings.operations_per_s.items()}
    return {"read_gb_s": ceilings.read_bytes_per_s / 1e9, **operations}


def median_row(runs: Sequence[Row]) -> Row:
    """Field by field the median of what several runs found, of whole numbers the lower one; texts
    are as in the first. `runs` are dataclasses of one kind."""
    first = runs[0]
    columns = {
        one.name: [getattr(run, one.name) for run in runs]
        for one in fields(first)  # type: ignore[arg-type]
    }
    return type(first)(**{name: _median(column) for name, column in columns.items()})


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], float):
        return statistics.median(values)
    return statistics.median_low(values) if isinstance(values[0], int) else values[0]


def spread_of(figures: Sequence[float]) -> float:
    least = min(figures)
    return max(figures) / least if least > 0 else 1.0


def percentile(values: Sequence[float], percent: int) -> float:
    """0 if there are none."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def check_writable(*paths: Path | None) -> None:
    """Complain now, not after minutes of work.

    Raises   ConfigError.
    """
    for path in paths:
        if path is not None and str(path) != "-":
            _write(path, "", mode="a")


def keep(record: Record, *, json_file: Path | None, results: Path | None) -> None:
    """Write the record to `json_file` (`-`: standard output), and add it to `results`.

    Raises   ConfigError: a file cannot be written.
    """
    if json_file is not None and str(json_file) == "-":
        sys.stdout.write(record.line())
    elif json_file is not None:
        _write(json_file, json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n")
    if results is not None:
        _write(results, record.line(), mode="a")


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write the figures to {path}: {error.strerror}") from error
