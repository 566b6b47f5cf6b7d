"""Load over HTTP: what a server answers is timed, counted and judged."""

import json
import threading
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
from tests.serve.scripted import Gate, Script, Served, scripted_server

from octavo.bench import load
from octavo.bench.load import (
    Server,
    Targets,
    Timing,
    arrivals,
    run_closed,
    run_open,
    serve_row,
    server_at,
    warm_up,
)
from octavo.cli import bench
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import EngineError, RequestError
from octavo.simulate.workload import WorkItem, uniform_workload

VOCABULARY = 250


@pytest.fixture(scope="module")
def _served() -> Iterator[Served]:
    with scripted_server(max_body_bytes=100_000) as served:
        yield served


@pytest.fixture
def served(_served: Served) -> Served:
    _served.client.script = Script()
    _served.client.tickets.clear()
    return _served


def items(count: int, answer: int = 5) -> tuple[WorkItem, ...]:
    return uniform_workload(count, 12, answer, vocabulary=VOCABULARY)


def test_requests_ask_for_exactly_what_the_workload_says(served: Served) -> None:
    server, work = server_at(served.url), items(3)
    timings = run_open(server, work, [0.0, 0.0, 0.0])
    assert [timing.error for timing in timings] == [""] * 3
    asked = {ticket.request.prompt: ticket.request for ticket in served.client.tickets}
    assert set(asked) == {item.prompt_token_ids for item in work}
    for request in asked.values():
        assert (request.max_tokens, request.sampling.greedy) == (5, True)
        assert not request.stop_token_ids
    for timing in timings:
        assert (timing.prompt_tokens, timing.output_tokens) == (12, 5)
        assert 0 < timing.first_s <= timing.last_s


def test_open_loop_does_not_wait_for_answers(served: Served) -> None:
    gate = Gate()
    served.client.script = Script(gate=gate, pause_at=1)
    found: list[Timing] = []
    runner = threading.Thread(
        target=lambda: found.extend(run_open(server_at(served.url), items(4), [0.0] * 4))
    )
    runner.start()
    # Only if all are there before any has ended does this end.
    while len(served.client.tickets) < 4:
        assert gate.reached.wait(timeout=60)
    gate.open()
    runner.join()
    assert len(found) == 4


def test_closed_loop_keeps_so_many_under_way(served: Served) -> None:
    timings = run_closed(server_at(served.url), items(7), 2)
    assert len(timings) == 7
    starts = sorted(timing.due_s for timing in timings)
    ends = sorted(timing.last_s for timing in timings)
    # The third begins when the first has ended, and so on.
    assert all(start >= end for start, end in zip(starts[2:], ends, strict=False))


def test_errors_and_short_answers_are_told(served: Served) -> None:
    server = server_at(served.url)
    served.client.script = Script(error=EngineError("it broke"), fail_at=2)
    [broken] = run_open(server, items(1), [0.0])
    assert "it broke" in broken.error
    served.client.script = Script(text="ab")
    [short] = run_open(server, items(1), [0.0])
    assert short.error == "3 tokens in place of 5"  # two bytes and the end
    [refused] = run_open(server, items(1, answer=600), [0.0])
    assert refused.error.startswith("EngineError: status 400")
    served.client.script = Script(error=EngineError("it broke"))
    with pytest.raises(EngineError, match="does not answer"):
        warm_up(server, items(1))


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://127.0.0.1:1"])
def test_there_is_no_server(url: str) -> None:
    with pytest.raises(RequestError):
        server_at(url)


def test_arrivals_by_chance_have_the_rate() -> None:
    work = items(4000)
    assert arrivals(work, None) == [0.0] * 4000
    due = arrivals(work, 8.0, seed=3)
    assert due == sorted(due)
    assert len(due) / due[-1] == pytest.approx(8.0, rel=0.08)
    assert arrivals(work, 8.0, seed=3) == due != arrivals(work, 8.0, seed=4)


def timing(due_s: float, first_s: float, last_s: float, tokens: int, error: str = "") -> Timing:
    return Timing(
        due_s=due_s,
        first_s=first_s,
        last_s=last_s,
        prompt_tokens=10,
        output_tokens=tokens,
        error=error,
    )


def test_goodput_counts_what_came_in_time() -> None:
    timings = [
        timing(0.0, 1.0, 3.0, 5),  # TTFT 1, TPOT 0.5
        timing(1.0, 4.0, 5.0, 5),  # TTFT 3, TPOT 0.25
        timing(2.0, 2.5, 10.0, 2),  # TTFT 0.5, TPOT 7.5
        timing(0.0, 0.0, 0.0, 0, "gone"),
    ]
    free = serve_row("W", "x", timings, Targets())
    assert (free.requests, free.errors, free.first_error) == (4, 1, "gone")
    assert (free.prompt_tokens, free.output_tokens, free.wall_s) == (30, 12, 10.0)
    rates = (free.output_tokens_per_s, free.goodput_per_s, free.goodput_share)
    assert rates == pytest.approx((1.2, 0.3, 0.75))
    assert (free.ttft_p50_s, free.tpot_p50_s) == (1.0, 0.5)
    in_time = [Targets(ttft_s=2.0), Targets(tpot_s=1.0), Targets(ttft_s=2.0, tpot_s=1.0)]
    shares = [serve_row("W", "x", timings, targets).goodput_share for targets in in_time]
    assert shares == [0.5, 0.5, 0.25]


def workload(folder: Path) -> Path:
    path = folder / "few.json"
    entries = [{"prompt_token_ids": [5, 6, 7, n], "output_len": 4} for n in range(8, 13)]
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nothing is measured: the machine reads 30, 10, 20, 30 … GB/s. What has been asked for."""
    speeds, found = cycle([30.0, 10.0, 20.0]), list[float]()

    def limits_here(_: EngineConfig) -> dict[str, float]:
        found.append(next(speeds))
        return {"read_gb_s": found[-1], "bf16_gops": 1.0, "int8_gops": 2.0, "int4_gops": 3.0}

    monkeypatch.setattr(bench, "limits_here", limits_here)
    return found


def test_limits_are_measured_in_each_run(
    served: Served, tmp_path: Path, measured: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--url", served.url, "--workload", str(workload(tmp_path)), "--runs", "3"]
    assert main(["bench", "serve", *given, "--json", "-"]) == 0
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert (record["limits"]["read_gb_s"], record["no_limits"]) == (20.0, "")
    assert len(measured) == 3
    assert "the machine in this run: reads 20.0 GB/s" in shown.err


def test_a_server_elsewhere_has_no_limits_here(
    served: Served,
    tmp_path: Path,
    measured: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = server_at(served.url)
    assert here.here
    far = Server(here.host, here.port, here.model, here=False)
    monkeypatch.setattr(load, "server_at", lambda _: far)
    given = ["--url", served.url, "--workload", str(workload(tmp_path)), "--json", "-"]
    assert main(["bench", "serve", *given]) == 0
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert (record["limits"], measured) == (None, [])
    assert record["no_limits"] == bench.ELSEWHERE
    assert bench.ELSEWHERE in shown.err


def test_the_command_on_a_running_server(
    served: Served, tmp_path: Path, measured: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "record.json"
    given = ["--url", served.url, "--workload", str(workload(tmp_path)), "--runs", "2"]
    slo = ["--concurrency", "2", "--ttft-target", "60s", "--json", str(file)]
    assert main(["bench", "serve", *given, *slo]) == 0
    record = json.loads(file.read_text())
    [row] = record["rows"]
    assert (row["requests"], row["errors"], row["output_tokens"]) == (5, 0, 20)
    assert (row["arrivals"], row["ttft_target_s"], row["goodput_share"]) == ("2 at once", 60.0, 1.0)
    assert record["settings"]["url"] == served.url
    prompts = [ticket.request.prompt for ticket in served.client.tickets]
    assert len(set(prompts)) == len(prompts) == 1 + 2 * 5  # a warm-up, and other ids each run
    assert "goodput" in capsys.readouterr().out

    assert main(["bench", "serve", *given, "--threads", "2"]) == 2
    assert "--threads: the server at http" in capsys.readouterr().err

    served.client.script = lambda prompt: Script(text="a") if len(prompt) == 4 else Script()
    assert main(["bench", "serve", *given, "--rate", "1000"]) == 1
    assert "few: 2 tokens in place of 4" in capsys.readouterr().out


def test_the_command_starts_a_server(
    demo_model_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(demo_model_path), "--max-model-len", "64", "--no-enable-prefix-caching"]
    given = ["--workload", str(workload(tmp_path)), "--json", "-"]
    assert main(["bench", "serve", *given, *model]) == 0
    record = json.loads(capfd.readouterr().out)
    assert record["settings"]["max_model_len"] == 64
    assert (record["rows"][0]["errors"], record["rows"][0]["output_tokens"]) == (0, 20)
    assert min(record["limits"].values()) > 0

    assert main(["bench", "serve", *given, *model, "--kv-cache-memory", "1KiB"]) == 2
    assert "the server did not start: it ended with 2" in capfd.readouterr().err
