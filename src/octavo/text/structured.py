"""Structured: what an answer must be, from the forms in which callers say it to one definition.

Nothing is compiled here: `text.grammar` does that.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from math import lcm
from typing import Any, NamedTuple

from octavo.core.request import GrammarKind
from octavo.errors import InvalidRequest
from octavo.units import KIB

MAX_BYTES = 64 * KIB
"""Of a schema, a grammar or all choices together."""
MAX_REGEX_CHARACTERS = 4096
MAX_CHOICES = 1024
MAX_DEPTH = 64
"""Of objects and lists within each other, in a schema."""
MAX_PROPERTIES = 500
"""Of one object: with their square the time grows that compiling takes."""
MAX_MULTIPLE = 10_000
"""The least common multiple of all `multipleOf` of a schema: an automaton has as many states."""
MAX_TAGS = 64

WHITESPACE = r" |\r?\n[ \t]{0,32}"
"""Between the parts of JSON: one space, or a line break and what indents the next line. A run of it
is no longer, so that nobody can go on with whitespace for ever."""

_PLAIN = ("const", "default", "enum", "examples")
"""What holds values, not schemas."""
_FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class Definition(NamedTuple):
    """What a compiler takes: of `json` the text is a schema, of `lark` Lark or GBNF."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Structured:
    """What an answer must be, by exactly one of its first six fields.

    `json` is a JSON schema (or its text), `json_object` any JSON object, `regex` a regular
    expression for all of the answer, `choice` what it may be, `grammar` one in Lark or GBNF.
    `structural_tag` is free text with parts that must follow a schema: once one of the `triggers`
    is there, one of the `structures` goes on from it, each a `begin`, the `schema` of what
    follows, and an `end`.

    JSON may have a space or a line break with its indentation between its parts, or what matches
    `whitespace_pattern`, or with `disable_any_whitespace` nothing.
    `disable_additional_properties` allows only the properties that a schema names, where it does
    not say otherwise. `called` is what the caller calls all this.

    Raises   InvalidRequest naming `called`: it is none of these, or beyond a limit.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    called: str = "structured"
    definition: Definition = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        asked = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(asked) != 1:
            has = f"it has {' and '.join(asked)}" if asked else "it has none"
            raise self.wrong(f"give exactly one of {', '.join(_FORMS)}; {has}")
        self._check_options(asked[0])
        definition = getattr(self, f"_of_{asked[0]}")()
        if len(definition.text.encode(errors="replace")) > MAX_BYTES:
            raise self.wrong(f"it has more than {MAX_BYTES} bytes, which is the most allowed")
        object.__setattr__(self, "definition", definition)

    def wrong(self, why: str) -> InvalidRequest:
        """What to raise."""
        return InvalidRequest(f"{self.called}: {why}", param=self.called)

    def _check_options(self, form: str) -> None:
        for option in fields(self):
            if option.type is bool and not isinstance(getattr(self, option.name), bool):
                raise self.wrong(f"{option.name} must be true or false")
        pattern = self.whitespace_pattern
        if pattern is not None and not isinstance(pattern, str):
            raise self.wrong("whitespace_pattern must be text")
        if pattern is not None and self.disable_any_whitespace:
            raise self.wrong("whitespace_pattern and disable_any_whitespace contradict each other")
        options = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
        given = [name for name in options if getattr(self, name) not in (None, False)]
        if given and form not in ("json", "json_object", "structural_tag"):
            raise self.wrong(f"{given[0]} is of JSON, and has no effect on a {form}")

    # --- each form

    def _of_json(self) -> Definition:
        return Definition("json", self._schema_text(self.json, "the schema"))

    def _of_json_object(self) -> Definition:
        return Definition("json", self._schema_text({"type": "object"}, "the schema"))

    def _of_regex(self) -> Definition:
        if not isinstance(self.regex, str) or not 0 < len(self.regex) <= MAX_REGEX_CHARACTERS:
            raise self.wrong(f"the regex must be text of 1 to {MAX_REGEX_CHARACTERS} characters")
        return Definition("regex", self.regex)

    def _of_choice(self) -> Definition:
        choice = self.choice
        if isinstance(choice, str) or not isinstance(choice, Sequence):
            raise self.wrong("the choice must be a list of texts")
        if not 0 < len(choice) <= MAX_CHOICES:
            raise self.wrong(f"there are {len(choice)} choices; 1 to {MAX_CHOICES} are allowed")
        for one in choice:
            if not isinstance(one, str) or not one:
                raise self.wrong(f"each choice must be a text that is not empty, not {one!r}")
        return Definition("lark", f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, choice))}\n")

    def _of_grammar(self) -> Definition:
        if not isinstance(self.grammar, str) or not self.grammar.strip():
            raise self.wrong("the grammar must be text that is not empty")
        if re.search(r"\[[^\]\"/]*\btemperature\s*=", self.grammar):
            raise self.wrong("the temperature of a rule is not supported; leave it out")
        return Definition("lark", self.grammar)

    def _of_structural_tag(self) -> Definition:
        asked = self._object(self.structural_tag, "the structural tag")
        triggers, structures = asked.get("triggers"), asked.get("structures")
        if asked.get("type", "structural_tag") != "structural_tag" or asked.keys() - {
            "type",
            "triggers",
            "structures",
        }:
            raise self.wrong("a structural tag has a type, triggers and structures, nothing else")
        if not isinstance(triggers, list) or not isinstance(structures, list):
            raise self.wrong("triggers and structures must be lists")
        if not triggers or not 0 < len(structures) <= MAX_TAGS:
            raise self.wrong(f"give at least one trigger, and 1 to {MAX_TAGS} structures")
        if any(not isinstance(trigger, str) or not trigger for trigger in triggers):
            raise self.wrong("each trigger must be a text that is not empty")
        return Definition("lark", self._tagged(triggers, structures))

    # --- structural tags

    def _tagged(self, triggers: Sequence[str], structures: Sequence[Any]) -> str:
        """Free text, up to a trigger; then what follows that in one of the structures; and so on.

        `lazy`: the text before a trigger ends at the first that there is.
        """
        rules = []
        for index, one in enumerate(structures):
            if not isinstance(one, Mapping) or one.keys() - {"begin", "schema", "end"}:
                raise self.wrong(f"structures[{index}] must have begin, schema and end")
            begin, end = one.get("begin"), one.get("end", "")
            if not isinstance(begin, str) or not isinstance(end, str):
                raise self.wrong(f"structures[{index}]: begin and end must be texts")
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise self.wrong(f"structures[{index}]: begin starts with none of the triggers")
            schema = self._schema_text(one.get("schema", {}), f"structures[{index}].schema")
            rest = begin[len(trigger) :]
            parts = (_quoted(rest) if rest else "", f"%json {schema}", _quoted(end) if end else "")
            rules.append(f"tag_{index}_head[lazy]: TEXT {_quoted(trigger)}")
            rules.append(f"tag_{index}: tag_{index}_head {' '.join(filter(None, parts))}")
        tags = " | ".join(f"tag_{index}" for index in range(len(structures)))
        start = f"start: ({tags})* tail\ntail: TEXT\nTEXT: /(.|\\n)*/"
        return "\n".join(["%llguidance {}", start, *rules, ""])

    # --- schemas

    def _schema_text(self, schema: object, what: str) -> str:
        found = self._object(schema, what)
        self._check(found, what)
        if self.disable_additional_properties:
            found = _closed(found)
        options: dict[str, Any] = {"whitespace_pattern": self.whitespace_pattern or WHITESPACE}
        if self.disable_any_whitespace:
            options = {"whitespace_flexible": False}
        own = found.get("x-guidance")
        options |= own if isinstance(own, Mapping) else {}
        return json.dumps({**found, "x-guidance": options}, separators=(",", ":"))

    def _object(self, value: object, what: str) -> dict[str, Any]:
        """A JSON object, which may come as its text."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise self.wrong(f"{what} is not JSON: {error}") from error
        if not isinstance(value, Mapping):
            raise self.wrong(f"{what} must be a JSON object, not {type(value).__name__}")
        return dict(value)

    def _check(self, schema: object, what: str) -> None:
        multiples = []
        for depth, value in _within(schema):
            if depth > MAX_DEPTH:
                raise self.wrong(f"{what} is nested more than {MAX_DEPTH} levels deep")
            if not isinstance(value, Mapping):
                continue
            properties = value.get("properties")
            if isinstance(properties, Mapping) and len(properties) > MAX_PROPERTIES:
                raise self.wrong(
                    f"{what} has an object of {len(properties)} properties; at most"
                    f" {MAX_PROPERTIES} are allowed"
                )
            multiple = value.get("multipleOf")
            if isinstance(multiple, int | float) and multiple > 0:
                multiples.append(multiple)
        if _common_multiple(multiples) > MAX_MULTIPLE:
            raise self.wrong(
                f"{what} asks for multiples of {', '.join(map(str, multiples[:3]))}, which have a"
                f" common multiple above {MAX_MULTIPLE}"
            )


def _within(value: object) -> Iterator[tuple[int, object]]:
    """A JSON value and all within it, with how many objects and lists they are in."""
    todo: list[tuple[int, object]] = [(0, value)]
    while todo:
        depth, one = todo.pop()
        yield depth, one
        if depth > MAX_DEPTH:
            return
        if isinstance(one, Mapping):
            todo += [(depth + 1, each) for each in one.values()]
        elif isinstance(one, list | tuple):
            todo += [(depth + 1, each) for each in one]


def _common_multiple(multiples: Sequence[int | float]) -> int:
    """Of these numbers, as integers of the smallest decimal place that one has."""
    if not multiples:
        return 1
    decimals = [Decimal(repr(one)) for one in multiples]
    place = max(-min(one.normalize().as_tuple().exponent, 0) for one in decimals)  # type: ignore[operator]
    if place > 9 or max(decimals) > MAX_MULTIPLE:
        return MAX_MULTIPLE + 1
    return lcm(*(int(one.scaleb(place)) for one in decimals))


def _closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those that they name, unless it says so."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: one if name in _PLAIN else _closed(one) for name, one in schema.items()}
    if isinstance(schema.get("properties"), Mapping):
        closed["properties"] = {name: _closed(one) for name, one in schema["properties"].items()}
        closed.setdefault("additionalProperties", False)
    return closed


def _quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)
