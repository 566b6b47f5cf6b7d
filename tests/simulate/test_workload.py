"""Workload files."""

import json
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.simulate.workload import WorkItem, load_workload, shifted, uniform_workload


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "w.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_requests_come_in_order_of_arrival(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        [
            {"prompt_token_ids": [1, 2], "output_len": 3, "arrival_s": 2.5},
            {"prompt_token_ids": [4], "output_len": 1},
        ],
    )
    early, late = load_workload(path)
    assert (early.prompt_token_ids, early.arrival_s, early.length) == ((4,), 0.0, 2)
    assert late.length == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([], "at least one request"),
        ({"a": 1}, "list"),
        ([3], "entry 0"),
        ([{"prompt_token_ids": [], "output_len": 1}], "prompt_token_ids"),
        ([{"prompt_token_ids": [True], "output_len": 1}], "prompt_token_ids"),
        ([{"prompt_token_ids": [1], "output_len": 0}], "output_len"),
        ([{"prompt_token_ids": [1], "output_len": 1, "arrival_s": -1}], "arrival_s"),
        ([{"prompt_token_ids": [1], "output_len": 1, "arrival_s": float("nan")}], "arrival_s"),
        ([{"prompt_token_ids": [1], "output_len": 1, "arrival_s": float("inf")}], "arrival_s"),
        ([{"prompt_token_ids": [1], "output_len": 1, "arrival_s": 10**400}], "arrival_s"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(written(tmp_path, content))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        load_workload(tmp_path / "nowhere.json")


def test_a_uniform_workload_repeats_itself() -> None:
    few = uniform_workload(3, 5, 2, vocabulary=9)
    assert [(len(item.prompt_token_ids), item.output_len) for item in few] == [(5, 2)] * 3
    assert all(0 <= token < 9 for item in few for token in item.prompt_token_ids)
    assert uniform_workload(3, 5, 2, vocabulary=9) == few
    assert uniform_workload(3, 5, 2, vocabulary=9, seed=2) != few


def test_shifted_ids_begin_alike_where_they_did_and_nowhere_else() -> None:
    items = tuple(
        WorkItem(prompt_token_ids=(7, 30, 2, last), output_len=last, arrival_s=last / 2)
        for last in (4, 40)
    )
    assert shifted(items, 0) == items
    one, other = shifted(items, 1)
    assert one.prompt_token_ids[:3] == other.prompt_token_ids[:3]
    assert one.prompt_token_ids[0] != items[0].prompt_token_ids[0]
    assert all(0 <= token <= 40 for token in one.prompt_token_ids + other.prompt_token_ids)
    assert (one.output_len, other.arrival_s) == (4, 20.0)
