"""How the model wants to be sampled holds for what a request leaves out, and for nothing else."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.serve.scripted import Served, scripted_server
from tests.serve.test_overload import CASES

from octavo.core.request import Sampling
from octavo.engine.params import SamplingParams

WANTED = SamplingParams(temperature=0.3, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def wanting() -> Iterator[Served]:
    with scripted_server(defaults=WANTED) as served:
        yield served


def sampling_of(served: Served, path: str, **fields: Any) -> Sampling:
    response = httpx.post(served.url + path, json=CASES[path] | fields, timeout=60)
    assert response.status_code == 200, response.text
    return served.client.tickets[-1].request.sampling


@pytest.mark.parametrize("path", CASES)
def test_B057_what_a_request_leaves_out_is_as_the_model_wants(wanting: Served, path: str) -> None:
    found = sampling_of(wanting, path)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.3, 7, 0.9, 0.1)
    assert found.penalty is not None
    assert found.penalty.repetition == 1.2


@pytest.mark.parametrize("path", CASES)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_B057_what_a_request_says_holds(wanting: Served, path: str, temperature: float) -> None:
    """Also where it is what would hold without a model's wish."""
    fields: dict[str, Any] = {"temperature": temperature, "top_p": 1.0}
    if path.startswith("/api/"):
        fields = {"options": fields}
    found = sampling_of(wanting, path, **fields)
    assert (found.temperature, found.top_p, found.top_k) == (temperature, 1.0, 7)


def test_a_null_is_no_wish_of_the_request(wanting: Served) -> None:
    assert sampling_of(wanting, "/v1/completions", temperature=None).temperature == 0.3
