"""POST /admin/drain: no new requests, those under way go on; and back again."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.serve.oracle import oracle_server
from tests.serve.scripted import Gate, Script, scripted_server
from tests.serve.test_slow_readers import Stepwise, wait_for

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 9, "ignore_eos": True}


def test_a_drain_refuses_what_is_new_and_finishes_what_is_there() -> None:
    runners: list[Stepwise] = []

    def wrap(oracle: Any) -> Any:
        runners.append(Stepwise(oracle))
        return runners[0]

    with (
        oracle_server(wrap=wrap) as served,
        ThreadPoolExecutor(1) as thread,
        httpx.Client(base_url=served.url, timeout=60) as http,
    ):
        answer = thread.submit(httpx.post, served.url + PATH, json=BODY, timeout=60)
        wait_for(lambda: runners[0].entered == 1)
        drained = http.post("/admin/drain")
        assert drained.json() == {"draining": True, "exit": False, "under_way": 1}
        refused = http.post(PATH, json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_stopped"
        assert int(refused.headers["retry-after"]) >= 1
        assert http.get("/health").json()["status"] == "draining"
        assert http.get("/health/ready").status_code == 503
        assert http.get("/health/live").status_code == 200
        runners[0].let(1000)
        assert answer.result().json()["usage"]["completion_tokens"] == 9
        wait_for(lambda: http.get("/admin/drain").json()["under_way"] == 0)
        assert http.delete("/admin/drain").json()["draining"] is False
        assert http.get("/health").json()["status"] == "ok"
        assert http.post(PATH, json=BODY).status_code == 200


def test_a_drain_that_is_to_end_in_an_end_cannot_be_taken_back() -> None:
    with scripted_server() as served:
        url = f"{served.url}/admin/drain"
        assert httpx.post(url, json={"exit": True}).json()["exit"] is True
        assert httpx.delete(url).status_code == 400
        assert served.client.draining


@pytest.mark.parametrize("body", [{"exit": 1}, {"exits": True}, [True]])
def test_what_is_no_drain(body: object) -> None:
    with scripted_server() as served:
        assert httpx.post(f"{served.url}/admin/drain", json=body).status_code == 400
        assert not served.client.draining


def test_a_scripted_answer_counts_as_under_way() -> None:
    with scripted_server() as served, ThreadPoolExecutor(1) as thread:
        served.client.script = Script(gate=(gate := Gate()))
        answer = thread.submit(httpx.post, served.url + PATH, json={"prompt": "x"}, timeout=60)
        assert gate.reached.wait(60)
        assert httpx.get(f"{served.url}/admin/drain").json() == {
            "draining": False,
            "exit": False,
            "under_way": 1,
        }
        gate.open()
        assert answer.result().status_code == 200
