"""GET and PATCH /admin/limits."""

from typing import Any

import httpx
import pytest
from tests.serve.scripted import IDLE, Served

from octavo.engine.limits import named


def test_limits_are_shown(http: httpx.Client) -> None:
    answer = http.get("/admin/limits").json()
    assert answer == {"limits": named(IDLE.limits), "ceilings": named(IDLE.ceilings)}


def test_a_change_is_answered_with_all_that_hold(http: httpx.Client) -> None:
    changes = {"max_num_seqs": 5, "max_queued_requests": None}
    answer = http.patch("/admin/limits", json=changes)
    assert answer.status_code == 200
    assert answer.json()["limits"] == named(IDLE.limits) | changes
    assert http.get("/admin/limits").json() == answer.json()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": "5"}, "max_num_seqs"),
        ({"max_num_seqs": 5, "maximum": 5}, "maximum"),
        ({}, None),
        ([5], None),
        (None, None),
    ],
)
def test_what_is_wrong_changes_nothing(
    http: httpx.Client, served: Served, body: Any, param: str | None
) -> None:
    answer = http.patch("/admin/limits", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert served.client.state == IDLE


def test_other_methods_are_refused(http: httpx.Client) -> None:
    assert http.post("/admin/limits", json={"max_num_seqs": 5}).status_code == 405


def test_the_cache_is_flushed(http: httpx.Client) -> None:
    answer = http.post("/admin/cache/flush")
    assert (answer.status_code, answer.json()) == (200, {"blocks_flushed": IDLE.blocks_cached})
    assert http.get("/admin/cache/flush").status_code == 405
