"""Random JSON schemas that some value fulfils."""

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

PATTERNS = (r"^[a-c]{2,4}$", r"^\d+-x$", r"^(yes|no)$", r"^[A-Z][a-z]*$", r"^a|b|c$")
KEYS = ("name", "id", "na", 'quo"te', "ünï", "with space", "a", "b", "items")


def random_schema(random: Random) -> Schema:
    """With definitions, one of which refers to itself."""
    schema = _any(random, 3, recursive=True)
    if "$ref" in str(schema):
        schema["$defs"] = {"leaf": _any(random, 1, recursive=False), "tree": _tree(random)}
    return schema


def _any(random: Random, depth: int, recursive: bool) -> Schema:
    kinds = [*_LEAVES]
    if depth:
        kinds += [_object, _object, _array, _array, _any_of]
    kind = random.choice(kinds)
    if recursive and depth and random.random() < 0.1:
        return {"$ref": random.choice(["#/$defs/leaf", "#/$defs/tree"])}
    return kind(random, depth - 1, recursive)


def _string(random: Random, depth: int, recursive: bool) -> Schema:
    if random.random() < 0.3:
        return {"type": "string", "pattern": random.choice(PATTERNS), "maxLength": 20}
    least = random.choice([0, 0, 1, 3])
    return {"type": "string", "minLength": least, "maxLength": least + random.randint(0, 12)}


def _integer(random: Random, depth: int, recursive: bool) -> Schema:
    low = random.randint(-1000, 1000)
    schema: Schema = {"type": "integer"}
    if random.random() < 0.7:
        schema[random.choice(["minimum", "exclusiveMinimum"])] = low
        schema[random.choice(["maximum", "exclusiveMaximum"])] = low + random.randint(20, 5000)
    if random.random() < 0.2:
        schema["multipleOf"] = random.choice([2, 3, 5, 7])
    return schema


def _number(random: Random, depth: int, recursive: bool) -> Schema:
    if random.random() < 0.5:
        return {"type": "number"}
    low = random.randint(-100, 100)
    return {"type": "number", "minimum": low, "maximum": low + random.choice([0.5, 1, 50])}


def _constant(random: Random, depth: int, recursive: bool) -> Schema:
    values = ["a", 'q"\n', "", 0, -1.5, True, None, [1, "b"], {"k": None}]
    if random.random() < 0.5:
        return {"const": random.choice(values)}
    return {"enum": random.sample(values, random.randint(1, 4))}


def _plain(random: Random, depth: int, recursive: bool) -> Schema:
    return {"type": random.choice(["boolean", "null", ["string", "null"], ["integer", "boolean"]])}


def _object(random: Random, depth: int, recursive: bool) -> Schema:
    names = random.sample(KEYS, random.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(random, depth, recursive) for name in names},
        "required": [name for name in names if random.random() < 0.6],
    }
    match random.randint(0, 3):
        case 0:
            schema["additionalProperties"] = _any(random, 0, recursive)
        case 1:
            pass
        case _:
            schema["additionalProperties"] = False
    return schema


def _array(random: Random, depth: int, recursive: bool) -> Schema:
    least = random.choice([0, 0, 1, 2])
    schema: Schema = {
        "type": "array",
        "items": _any(random, depth, recursive),
        "minItems": least,
        "maxItems": least + random.randint(0, 3),
    }
    if random.random() < 0.2:
        schema["prefixItems"] = [_any(random, depth, recursive)]
    return schema


def _any_of(random: Random, depth: int, recursive: bool) -> Schema:
    return {"anyOf": [_any(random, depth, recursive) for _ in range(random.randint(1, 3))]}


def _tree(random: Random) -> Schema:
    """A value with a few trees below it."""
    below = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
    properties = {"value": _any(random, 0, recursive=False), "below": below}
    return {"type": "object", "properties": properties, "additionalProperties": False}


_LEAVES: tuple[Callable[[Random, int, bool], Schema], ...] = (
    _string,
    _string,
    _integer,
    _number,
    _constant,
    _plain,
)
