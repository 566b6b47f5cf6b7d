"""Five hundred random schemas: what ends by itself is valid, whatever the network likes."""

import json
from random import Random

import jsonschema
import pytest
from tests.engine.noisy import GRAMMARS, Noisy
from tests.engine.schemas import Schema, random_schema

from octavo.errors import InvalidRequest
from octavo.text.structured import Structured

COUNT = 500


def structured_of(random: Random, schema: Schema) -> Structured:
    return Structured(
        json=schema, disable_any_whitespace=random.random() < 0.3, called=json.dumps(schema)
    )


def usable(random: Random) -> tuple[Schema, Structured]:
    """A schema that compiles: a few have parts that no value fulfils, which is said at the door."""
    while True:
        schema = random_schema(random)
        structured = structured_of(random, schema)
        if not GRAMMARS.check(*structured.definition):
            return schema, structured


def test_answers_that_end_by_themselves_are_valid(seed: int) -> None:
    random, noisy = Random(seed), Noisy(seed % 2**32, blocks=2000)
    schemas, requests = {}, []
    for number in range(COUNT):
        schema, structured = usable(random)
        request = noisy.ask(
            f"schema {number}",
            structured=structured,
            temperature=random.choice([0.0, 0.7, 1.0, 1.5]),
            top_p=random.choice([1.0, 0.9]),
            min_p=random.choice([0.0, 0.05]),
            min_tokens=random.choice([0, 0, 5]),
            ignore_eos=random.random() < 0.1,
            logprobs=random.choice([None, None, 0]),
            seed=number,
            max_tokens=400,
        )
        schemas[request.id] = schema
        requests.append(request)
    told = noisy.answers(*requests)
    reasons = dict.fromkeys(("stop", "length", "error"), 0)
    for name, schema in schemas.items():
        answer = told[name]
        reasons[answer.reason] += 1
        assert answer.reason != "error", f"{answer.message}: {schema}"
        if answer.reason == "stop":
            value = json.loads(answer.text)
            jsonschema.Draft202012Validator(schema).validate(value)
    assert reasons["stop"] > 0.8 * COUNT, reasons


def test_the_check_can_fail() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator({"type": "integer"}).validate("a")
    with pytest.raises(InvalidRequest):
        Noisy().ask("a", structured=Structured(json={"type": "objekt"}))
