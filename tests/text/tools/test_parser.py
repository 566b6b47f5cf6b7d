"""Calls in every form, cut in every way: the joined parts are those of the whole."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.cutting import CUTS, called, joined, pieces, said

from octavo.text.parts import Argued, Begun, Part, Said
from octavo.text.tools.forms import FORMS, form_named_in
from octavo.text.tools.parser import CallParser

NAMES = frozenset({"get", "now"})


def parse(
    form: str,
    text: str,
    cuts: list[int] | None = None,
    *,
    kept: bool = False,
    most: int | None = None,
) -> list[Part]:
    parser = CallParser(FORMS[form], NAMES, kept=kept, most=most)
    parts: list[Part] = []
    for piece in pieces(text, cuts or []):
        parts += parser.push(piece)
    return joined([*parts, *parser.flush()])


GET, NOW = '{"name": "get", "arguments": {"a": 1}}', '{"name": "now", "arguments": {}}'
GET_P = '{"name": "get", "parameters": {"a": 1}}'
BOTH = [("get", '{"a": 1}'), ("now", "{}")]


@pytest.mark.parametrize(
    ("form", "text", "before", "after"),
    [
        ("hermes", f"<tool_call>\n{GET}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>", "", ""),
        ("hermes", f"Well.\n<tool_call>{GET}</tool_call> <tool_call>{NOW}", "Well.\n", ""),
        ("hermes", f" \n<tool_call>[{GET}, {NOW}]</tool_call>\nDone.", "", "Done."),
        ("smollm3", f"<tool_call>{GET}</tool_call><tool_call>{NOW}</tool_call>", "", ""),
        ("smollm2", f"<tool_call>[{GET}, {NOW}]</tool_call>", "", ""),
        ("llama3_json", f"{GET_P}; {NOW}", "", ""),
        ("llama3_json", f"<|python_tag|>{GET_P};{NOW}", "", ""),
        ("llama3_json", f"[{GET_P}, {NOW}]", "", ""),
        ("pythonic", "[get(a=1), now()]", "", ""),
        ("pythonic", "<|python_start|>[get(a=1), now()]<|python_end|>", "", ""),
        ("mistral", f"[TOOL_CALLS] [{GET}, {NOW}]", "", ""),
        ("mistral", 'Hm. [TOOL_CALLS]get[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', "Hm. ", ""),
        ("mistral", '[TOOL_CALLS]get[CALL_ID]x1[ARGS]{"a": 1}[TOOL_CALLS]now{}', "", ""),
        ("granite", f"<|tool_call|>[{GET}, {NOW}]", "", ""),
        ("granite", f"<tool_call>[{GET}, {NOW}]", "", ""),
    ],
)
@given(cuts=CUTS)
def test_calls_of_each_form(form: str, text: str, before: str, after: str, cuts: list[int]) -> None:
    parts = parse(form, text, cuts)
    assert called(parts) == BOTH
    assert said(parts) == before + after
    assert isinstance(parts[0], Said) == bool(before)


@pytest.mark.parametrize("arguments", ['{"count": 7}', '{"on": false}', '{"v": [null]}', "{}"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_B098_the_last_brace_is_there_for_any_chunking(
    arguments: str, kept: bool, size: int
) -> None:
    text = f'<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call>'
    parts = parse("hermes", text, list(range(0, len(text), size)), kept=kept)
    assert parts == [Begun(0, "get"), Argued(0, arguments)]


ILL_FORMED = [
    ("hermes", "<tool_call>\nget\n</tool_call>"),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"a": 1}</tool_call> So it is.'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"a": NaN}}'),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"a": 1'),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", "1 < 2 and <tool_calling> and <tool_cal"),
    ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>'),
    ("llama3_json", '{"name": "other", "parameters": {}}'),
    ("llama3_json", '{"a": 1}; and so on'),
    ("llama3_json", "{ is a brace"),
    ("pythonic", "[a link](https://example.org) is one"),
    ("pythonic", "[get(1)]"),
    ("pythonic", "[get(a=b)]"),
    ("pythonic", "[get(**{'a': 1})]"),
    ("pythonic", "[other()]"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[get(a={1, 2})]"),
    ("mistral", "[TOOL_CALLS] hello world {}"),
    ("mistral", "[TOOL_CALLS]get[ARGS][1]"),
    ("mistral", "[TOOL_CALLS]" + "[a" * 100 + "!"),
    ("granite", "<|tool_call|> none"),
    ("hermes", "<tool_call>" + "[" * 5000 + "]" * 5000),
    ("pythonic", "[get(a=" + "[" * 3000 + "]" * 3000 + ")]"),
]


@pytest.mark.parametrize(("form", "text"), ILL_FORMED)
@given(cuts=CUTS)
def test_what_is_no_call_is_text(form: str, text: str, cuts: list[int]) -> None:
    assert parse(form, text, cuts) == [Said(text)]


def test_a_call_after_an_ill_formed_one() -> None:
    text = f"<tool_call>oh</tool_call><tool_call>{GET}</tool_call>"
    assert parse("hermes", text) == [
        Said("<tool_call>oh</tool_call>"),
        Begun(0, "get"),
        Argued(0, '{"a": 1}'),
    ]


def test_arguments_that_models_write_otherwise() -> None:
    for text in (
        '{"name": "get", "arguments": "{\\"a\\": 1}"}',
        '{"type": "function", "function": {"name": "get", "arguments": {"a": 1}}}',
        '{"arguments": {"a": 1}, "name": "get"}',
    ):
        assert called(parse("hermes", f"<tool_call>{text}</tool_call>")) == [("get", '{"a": 1}')]
    assert called(parse("hermes", '<tool_call>{"name": "now"}')) == [("now", "{}")]
    (call,) = called(parse("hermes", '<tool_call>{"name": "get", "arguments": {"a": "x\ny"}}'))
    assert json.loads(call[1]) == {"a": "x\ny"}
    (call,) = called(parse("hermes", '<tool_call>{"name": "get", "arguments": {"a": "\\ud800"}}'))
    assert call[1] == '{"a": "\\ud800"}'
    assert not called(parse("pythonic", "[get(a=none)]"))
    text = "[get(a='b', c=[True, null], d=-1.5, e={'f': {'g': None}})]"
    (call,) = called(parse("pythonic", text))
    assert json.loads(call[1]) == {
        "a": "b",
        "c": [True, None],
        "d": -1.5,
        "e": {"f": {"g": None}},
    }


def test_only_as_many_calls_as_there_may_be() -> None:
    text = f"<tool_call>{GET}</tool_call>\n<tool_call>{NOW}</tool_call>"
    for kept in (False, True):
        parts = parse("hermes", text, kept=kept, most=1)
        assert parts == [Begun(0, "get"), Argued(0, '{"a": 1}')]


@pytest.mark.parametrize("form", sorted(FORMS))
@given(cuts=CUTS)
def test_calls_under_a_grammar_come_as_they_are_made(form: str, cuts: list[int]) -> None:
    """The texts that the grammar of each form allows."""
    made = FORMS[form]
    call = '{{"name": "{}", "{}": {}}}'
    calls = [call.format(name, made.key, arguments) for name, arguments in BOTH]
    text = "".join([*made.opening, calls[0], *made.joining, calls[1], *made.closing])
    assert called(parse(form, text, cuts, kept=True)) == BOTH
    assert said(parse(form, text, cuts, kept=True)) == ""
    parser = CallParser(made, NAMES, kept=True)
    first = text.index("1}")
    assert called(parser.push(text[:first])) == [("get", '{"a": ')]
    if form != "pythonic":  # whose own calls are no JSON
        assert called(parse(form, text, cuts)) == BOTH


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>"),
        *(GET, NOW, "[", "]", "{", "}", '"', "\\", ";", " ", "\n", "get", "(", ")", "a=1", "'"),
        *("[ARGS]", "x", '"name": "get", "arguments": ', "<tool", "é"),
    ]
)


@given(
    form=st.sampled_from(sorted(FORMS)),
    fragments=st.lists(FRAGMENTS, max_size=20),
    cuts=CUTS,
    kept=st.booleans(),
    most=st.sampled_from([None, 1]),
)
def test_any_text_cut_in_any_way(
    form: str, fragments: list[str], cuts: list[int], kept: bool, most: int | None
) -> None:
    text = "".join(fragments)
    whole = parse(form, text, kept=kept, most=most)
    assert parse(form, text, cuts, kept=kept, most=most) == whole
    assert parse(form, text, list(range(len(text))), kept=kept, most=most) == whole
    if not kept:
        for _, arguments in called(whole):
            assert isinstance(json.loads(arguments), dict)
    if not any(isinstance(part, Begun) for part in whole) and not kept:
        assert said(whole) == text


def test_only_what_may_be_a_marker_is_held_back() -> None:
    parser = CallParser(FORMS["hermes"], NAMES)
    assert parser.push("a <tool") == (Said("a "),)
    assert parser.push("s>") == (Said("<tools>"),)
    assert parser.push(" b") == (Said(" b"),)


def test_the_form_of_a_template() -> None:
    assert form_named_in("… <tool_call>{…}</tool_call> …") == "hermes"
    assert form_named_in("[TOOL_CALLS]") == "mistral"
    assert form_named_in("<|tool_call|>") == "granite"
    assert form_named_in('{"name": function name, "parameters": …}') == "llama3_json"
    assert form_named_in("[func_name1(params_name1=…") == "pythonic"
    assert form_named_in("<tool_call><function=x><parameter=y>") is None
    assert form_named_in("nothing") is None
