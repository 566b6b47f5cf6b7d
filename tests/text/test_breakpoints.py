"""Breakpoints stand where the template puts them, whatever it does to the text around."""

from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.text.breakpoints import Breakpoint, breakpoints_of, characters_before, ttl_s_of
from octavo.text.chat import ChatTemplate

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
TRIMMED = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}[assistant]"
SYSTEM_TWICE = (
    "{{ messages[0].content }}!{% for m in messages[1:] %}{{ messages[0].content }}"
    "{{ m.content }}{% endfor %}"
)
LAST_ONLY = "{{ messages[-1].content }}"
MARK = {"type": "ephemeral"}


def part(text: str, marked: bool = False) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({"cache_control": MARK} if marked else {})


def before(source: str, messages: list[dict[str, Any]]) -> list[str]:
    """The text before each breakpoint."""
    template = ChatTemplate(source, special={})
    text = template.render(messages)
    return [
        text[: characters_before(one, messages, text, template.render)]
        for one in breakpoints_of(messages)
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLAIN, ["[system]one ", "[system]one two [user]three"]),
        (TRIMMED, ["[system]one ", "[system]one two[user]three"]),
        (SYSTEM_TWICE, ["one ", "one two !one two three"]),
    ],
)
def test_the_text_before_a_breakpoint(source: str, expected: list[str]) -> None:
    messages = [
        {"role": "system", "content": [part("one ", marked=True), part("two ")]},
        {"role": "user", "content": [part("three", marked=True), part("four")]},
    ]
    assert before(source, messages) == expected


def test_a_breakpoint_after_text_that_is_trimmed_stands_before_what_was_cut() -> None:
    messages = [{"role": "user", "content": [part(" one \n", marked=True)]}]
    assert before(TRIMMED, messages) == ["[user]one"]


def test_text_that_holds_private_characters_is_no_matter() -> None:
    messages = [{"role": "user", "content": [part("\ue000a", marked=True), part("\ue000b")]}]
    assert before(PLAIN, messages) == ["[user]\ue000a"]


def test_a_part_that_is_not_rendered_cannot_be_marked() -> None:
    messages = [
        {"role": "system", "content": [part("one", marked=True)]},
        {"role": "user", "content": "two"},
    ]
    with pytest.raises(InvalidRequest, match="renders that part nowhere") as caught:
        before(LAST_ONLY, messages)
    assert caught.value.param == "messages[0].content[0].cache_control"


def test_times() -> None:
    assert ttl_s_of(MARK, "x") == ttl_s_of(MARK | {"ttl": None}, "x") == 300.0
    assert ttl_s_of(MARK | {"ttl": "1h"}, "x") == 3600.0
    for wrong in (None, "ephemeral", {}, MARK | {"ttl": "1d"}, MARK | {"scope": "global"}):
        with pytest.raises(InvalidRequest, match="x"):
            ttl_s_of(wrong, "x")


def test_breakpoints_are_found_in_order() -> None:
    messages = [
        {"role": "user", "content": "text"},
        {"role": "user", "content": [part("a"), part("b", marked=True)]},
    ]
    assert breakpoints_of(messages) == (Breakpoint(1, 1, 300.0),)
