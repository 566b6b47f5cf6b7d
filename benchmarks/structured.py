"""What a schema costs: a workload with and without one, step by step in turns.

    python benchmarks/structured.py [--workload benchmarks/workloads/W1.json] [--tight] [--drawn]

Two engines of one model serve the same requests, all at once; the steps of one and of the other
take turns, so that whatever else the machine does meets both. The schema never ends: both give
answers of the same lengths. Seconds are summed, and said per token of answers.
"""

import argparse
import time
from pathlib import Path

from octavo.config import load_config
from octavo.core.events import Token
from octavo.engine.build import Built, build
from octavo.engine.params import SamplingParams
from octavo.simulate.workload import WorkItem, load_workload
from octavo.text.structured import Structured

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "pattern": "^[a-z0-9.]+@[a-z0-9]+\\.(com|org)$"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"enum": ["Paris", "Rome"]}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 100_000}


class Side:
    """One engine, and what its steps took."""

    def __init__(self, built: Built, items: tuple[WorkItem, ...], params: SamplingParams) -> None:
        self.engine = built.engine
        self.seconds, self.tokens, self.steps = 0.0, 0, 0
        for item in items:
            own = SamplingParams(
                temperature=params.temperature,
                seed=params.seed,
                structured=params.structured,
                logprobs=params.logprobs,
                max_tokens=item.output_len,
                ignore_eos=True,
            )
            self.engine.submit(built.door.completion(item.prompt_token_ids, own).request)

    def step(self) -> None:
        began = time.perf_counter()
        events = self.engine.step()
        self.seconds += time.perf_counter() - began
        self.tokens += sum(isinstance(event, Token) for event in events)
        self.steps += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", type=Path, default="benchmarks/workloads/W1.json")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--tight", action="store_true", help="without whitespace")
    parser.add_argument("--drawn", action="store_true", help="at temperature 1")
    parser.add_argument("--masks", action="store_true", help="without forced tokens")
    arguments = parser.parse_args()
    items = load_workload(arguments.workload)[: arguments.requests]
    config, _ = load_config({"model": arguments.model}, {})
    structured = Structured(json=PEOPLE, disable_any_whitespace=arguments.tight)
    temperature = 1.0 if arguments.drawn else 0.0
    plain = SamplingParams(temperature=temperature, seed=1)
    asked = SamplingParams(
        temperature=temperature,
        seed=1,
        structured=structured,
        logprobs=0 if arguments.masks else None,
    )
    sides = [Side(build(config), items, plain), Side(build(config), items, asked)]
    while any(not side.engine.idle for side in sides):
        for side in sides:
            if not side.engine.idle:
                side.step()
    for name, side in zip(("plain", "schema"), sides, strict=True):
        print(
            f"{name:7} {side.tokens:6} tokens, {side.steps:5} steps, {side.seconds:7.2f} s,"
            f" {side.tokens / side.seconds:7.1f} tokens/s"
        )
    ratio = sides[1].seconds / sides[1].tokens / (sides[0].seconds / sides[0].tokens)
    print(f"a token under the schema takes {ratio:.3f} of one without")


if __name__ == "__main__":
    main()
