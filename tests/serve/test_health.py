"""Health follows the engine; metrics follow what was served."""

import time
from dataclasses import replace

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.serve.oracle import oracle_server
from tests.serve.scripted import IDLE, Script, Served, scripted_server
from tests.serve.test_slow_readers import SMALL, asked, body_of, wait_for

from octavo.errors import EngineError


def samples(http: httpx.Client) -> dict[str, float]:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_healthy(http: httpx.Client) -> None:
    response = http.get("/health")
    assert response.status_code == 200
    assert response.json() == {
        "status": "ok",
        "running": 0,
        "waiting": 0,
        "blocks_free": 60,
        "blocks_cached": 30,
        "blocks_total": 100,
    }
    assert http.get("/version").json() == {"version": "1.2.3"}


def test_draining_and_dead(http: httpx.Client, served: Served) -> None:
    served.client.alive = False
    assert (http.get("/health").status_code, http.get("/health").json()["status"]) == (503, "dead")
    served.client.draining = True
    assert http.get("/health").json()["status"] == "draining"


def test_live_and_ready_say_what_to_do_with_the_server(http: httpx.Client, served: Served) -> None:
    """While the engine restarts nobody need start another server, only send requests elsewhere."""
    client, probes = served.client, ("/health/live", "/health/ready")

    def codes() -> list[int]:
        return [http.get(probe).status_code for probe in probes]

    assert codes() == [200, 200]
    client.restarting = True
    assert codes() == [200, 503]
    client.restarting, client.draining = False, True
    assert codes() == [200, 503]
    client.draining, client.alive = False, False
    assert codes() == [503, 503]
    assert http.get("/health/ready").json() == {"status": "dead"}


def test_stalled_is_work_without_steps() -> None:
    with scripted_server(stall_s=-1.0) as served:
        client, health = served.client, f"{served.url}/health"
        assert httpx.get(health).json()["status"] == "ok"
        client.busy_since_s = time.monotonic()
        stalled = httpx.get(health)
        assert (stalled.status_code, stalled.json()["status"]) == (503, "stalled")
        client.state = replace(IDLE, stepped_at_s=time.monotonic() + 3600)
        assert httpx.get(health).json()["status"] == "ok"
        client.state, client.busy_since_s = IDLE, time.monotonic() + 3600
        assert httpx.get(health).json()["status"] == "ok", "it has had no time yet"


def test_an_answer_that_is_there_and_is_not_read_stalls_nobody() -> None:
    """Its reader takes nothing; the engine has nothing to do."""
    with oracle_server(stall_s=-1.0, blocks=800, max_model_len=400, send_buffer=SMALL) as served:
        client, body = served.client, body_of(1, stream=True, n=16)
        with asked(served.url, body):
            wait_for(lambda: client.status().tokens_sampled == 4800 and not client.status().running)
            assert httpx.get(f"{served.url}/admin/drain").json()["under_way"] == 1
            wait_for(lambda: httpx.get(f"{served.url}/health").json()["status"] == "ok")
            assert httpx.get(f"{served.url}/admin/drain").json()["under_way"] == 1


def test_metrics_of_requests(http: httpx.Client, api: openai.OpenAI, served: Served) -> None:
    before = samples(http)
    api.completions.create(model="scripted", prompt="four", max_tokens=99)
    api.completions.create(model="scripted", prompt="four", max_tokens=3)
    served.client.script = Script(error=EngineError("x"), fail_at=2)
    with pytest.raises(openai.InternalServerError):
        api.completions.create(model="scripted", prompt="four", max_tokens=99)
    with pytest.raises(openai.BadRequestError):
        api.completions.create(model="scripted", prompt="")
    after = samples(http)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["octavo_requests_total[stop]"] == 1
    assert grown["octavo_requests_total[length]"] == 1
    assert grown["octavo_requests_total[error]"] == 1
    assert grown["octavo_requests_refused_total[invalid_value]"] == 1
    assert grown["octavo_prompt_tokens_total"] == 8
    assert grown["octavo_completion_tokens_total"] == len(Script().text.encode()) + 1 + 3
    assert grown["octavo_time_to_first_token_seconds_sum"] == 2.0
    assert grown["octavo_request_queue_seconds_sum"] == 1.0
    assert grown["octavo_request_seconds_sum"] == 4.0
    assert grown["octavo_time_per_output_token_seconds_count"] == 2


def test_metrics_of_the_engine(http: httpx.Client, served: Served) -> None:
    served.client.state = replace(IDLE, running=3, waiting=2, preemptions=4)
    found = samples(http)
    assert found["octavo_requests_running"] == 3
    assert found["octavo_requests_waiting"] == 2
    assert found["octavo_kv_blocks[cached]"] == 30
    assert found["octavo_kv_pool_occupancy"] == pytest.approx(0.1)
    assert found["octavo_preemptions_total"] == 4
    assert found["octavo_prefix_cache_tokens_hit_total"] == 256
