"""Grammars: what they allow, where they end, and that no grammar holds up the others."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest
from tests.text.vocabulary import tokenizer_of

from octavo.core.request import Grammar
from octavo.errors import Overloaded
from octavo.text.grammar import WORKERS, Compiled, Grammars, Matcher
from octavo.text.structured import Structured
from octavo.text.tokenizer import Tokenizer

TOKENIZER, _ = tokenizer_of([b'{"', b'":', b"name", b"na", b"me", b'", "', b"abc"])
END = 0
SLOW = Grammar("lark", 'start: %json {"type":"integer","multipleOf":49999}')


def grammars_of(**fields: Any) -> Grammars:
    return Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, **fields)


GRAMMARS = grammars_of()


def grammar_of(**fields: Any) -> Grammar:
    return Grammar(*Structured(**fields).definition)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, parse_special=False, add_special=False)


def matcher_of(
    grammar: Grammar, text: str = "", stops: frozenset[int] = frozenset({END})
) -> Matcher:
    return GRAMMARS.matcher(grammar, encode(text), stops)


def fits(grammar: Grammar, text: str) -> bool:
    """Whether the whole text is one of the grammar."""
    matcher = matcher_of(grammar, text)
    return not matcher.error and matcher.accepts


TAGS = {
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"json": {"type": "integer"}}, ["5", "-12"], ["5.", "a", ""]),
        ({"json": {"enum": ["a", 1]}}, ['"a"', "1"], ['"b"', "a"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "5", "{"]),
        (
            {"json": {"properties": {"a": {}}, "type": "object"}, "disable_any_whitespace": True},
            ['{"a":1}', '{"b":1}'],
            ['{"a": 1}'],
        ),
        (
            {
                "json": {"type": "object", "properties": {"a": {}}},
                "disable_additional_properties": True,
            },
            ['{"a": 1}', "{}"],
            ['{"b": 1}'],
        ),
        ({"json": {"type": "array"}, "whitespace_pattern": "_"}, ["[_1_,_2_]"], ["[ 1]"]),
        ({"regex": r"[a-c]+/\d"}, ["abc/1"], ["abc/", "d/1", "abc/12"]),
        ({"choice": ["yes", "yes, but", 'q"\n']}, ["yes", "yes, but", 'q"\n'], ["no", "yes,"]),
        ({"grammar": 'start: "a" b*\nb: "c" | "d"'}, ["a", "acd"], ["c", "ab"]),
        ({"grammar": 'root ::= "a" b*\nb ::= [c-d]'}, ["a", "acd"], ["c", "ab"]),
        (
            {"structural_tag": TAGS},
            ["free text", "so <f=a>5</f> and <f=b>true</f>", ""],
            ["<f=a>x", "<f=b>5", "<f=c"],
        ),
    ],
)
def test_each_form_allows_what_it_says(
    fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = grammar_of(**fields)
    assert GRAMMARS.check(grammar.kind, grammar.text) == ""
    assert [fits(grammar, text) for text in good] == [True] * len(good)
    assert [fits(grammar, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "objekt"}},
        {"json": {"type": "array", "uniqueItems": True}},
        {"json": {"$ref": "http://example.com/a.json"}},
        {"json": {"minimum": 5, "maximum": 3, "type": "integer"}},
        {"json": {}, "whitespace_pattern": "("},
        {"regex": "(a"},
        {"regex": "(?=a)b"},
        {"grammar": "start: nothing"},
        {"grammar": 'start: ""'},
        {"grammar": "start: <|unknown|>"},
        {"grammar": "root ::= ("},
    ],
)
def test_what_does_not_compile_says_why_in_one_line(fields: dict[str, Any]) -> None:
    grammar = grammar_of(**fields)
    why = GRAMMARS.check(grammar.kind, grammar.text)
    assert why
    assert "\n" not in why


def test_b091_the_order_of_grammars_does_not_matter() -> None:
    """Good and bad ones of each kind, in three orders: each gets the answer that it gets alone."""
    asked = [
        grammar_of(json={"type": "objekt"}),
        grammar_of(json={"type": "object"}),
        grammar_of(regex="(a"),
        grammar_of(regex="a"),
        grammar_of(grammar="start: nothing"),
        grammar_of(choice=["a"]),
    ]
    alone = [grammars_of().check(one.kind, one.text) for one in asked]
    for order in (range(6), (5, 4, 3, 2, 1, 0), (3, 0, 2, 5, 1, 4)):
        grammars = grammars_of()
        said = {index: grammars.check(asked[index].kind, asked[index].text) for index in order}
        assert [said[index] for index in range(6)] == alone


def test_a_matcher_depends_on_its_tokens_alone() -> None:
    """Token by token, at once, after others of the same grammar: the same masks at each place."""
    grammar = grammar_of(json={"type": "object", "properties": {"name": {"type": "string"}}})
    tokens = encode('{"name": "abc, name"}')
    stepped = matcher_of(grammar)
    for count, token in enumerate(tokens):
        other = GRAMMARS.matcher(grammar, tokens[:count], frozenset({END}))
        assert masks(other) == masks(stepped)
        assert other.forced() == stepped.forced()
        assert other.accepts == stepped.accepts
        stepped.extend([token])
    assert stepped.ended


def masks(matcher: Matcher) -> bytes:
    assert matcher.raw is not None
    return matcher.raw.compute_bitmask()


def test_what_must_follow_is_known() -> None:
    schema = {"type": "object", "properties": {"name": {"const": "abc"}}, "required": ["name"]}
    grammar = grammar_of(json=schema | {"additionalProperties": False}, disable_any_whitespace=True)
    matcher = matcher_of(grammar)
    forced = matcher.forced()
    assert TOKENIZER.decode(forced) == '{"name":"abc"}'
    assert forced == encode('{"name":"abc"}'), "the tokens are those of the tokenizer"
    matcher.extend(forced)
    assert matcher.ended
    assert not matcher.forced()


def test_a_wrong_token_is_an_error_that_stays() -> None:
    matcher = matcher_of(grammar_of(regex="ab"), "a")
    assert not matcher.error
    matcher.extend(encode("x"))
    assert "grammar" in matcher.error
    matcher.extend(encode("b"))
    assert matcher.error
    assert not matcher.ended
    assert not matcher.accepts
    assert not matcher.forced()


def test_end_tokens_that_end_nothing_are_barred() -> None:
    assert matcher_of(grammar_of(regex="a*")).barred == frozenset()
    assert matcher_of(grammar_of(regex="a*"), stops=frozenset({9})).barred == {END}


def test_a_grammar_is_compiled_once_and_kept_while_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = []
    whole = Grammars._compile

    def counting(self: Grammars, key: tuple[Any, str]) -> Compiled:
        compiled.append(key[1])
        return whole(self, key)

    monkeypatch.setattr(Grammars, "_compile", counting)
    grammars = grammars_of(kept=2)
    for text in ("a", "a", "b", "a", "c", "a", "b"):
        assert grammars.check("regex", text) == ""
    assert compiled == ["a", "b", "c", "b"]


def test_a_slow_grammar_is_refused_and_holds_nobody_up() -> None:
    grammars = grammars_of(timeout_s=0.05)
    assert "takes more than" in grammars.check(SLOW.kind, SLOW.text)
    assert "takes more than" in grammars.prepare(SLOW).result().error
    assert grammars.check("regex", "a") == ""


def test_when_all_who_compile_are_busy_the_caller_may_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()

    def stuck(self: Grammars, key: object) -> Compiled:
        go_on.wait()
        return Compiled(None, "it was stuck")

    grammars = grammars_of(timeout_s=0.01)
    grammars.check("regex", "x")
    monkeypatch.setattr(Grammars, "_compile", stuck)
    for number in range(WORKERS):
        assert "takes more than" in grammars.check("regex", f"a{number}")
    with pytest.raises(Overloaded):
        grammars.check("regex", "b")
    go_on.set()
    waiting: Future[Compiled] = grammars.prepare(Grammar("regex", "b"))
    assert waiting.result().error == "it was stuck"


def test_the_vocabulary_is_that_of_the_tokenizer() -> None:
    count = TOKENIZER.vocab_size + 3
    pieces = TOKENIZER.pieces(count)
    assert pieces == [TOKENIZER.token_bytes(token) for token in range(count)]


def test_no_tokenizer_is_asked_for_before_the_first_grammar() -> None:
    asked = []

    def tokenizer() -> Tokenizer:
        asked.append(True)
        return TOKENIZER

    grammars = Grammars(tokenizer, TOKENIZER.vocab_size)
    assert not asked
    for _ in range(2):
        grammars.check("regex", "a")
    assert asked == [True]
