"""Reasoning before an answer, cut in every way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.cutting import CUTS, pieces

from octavo.text.thoughts import STYLES, ThoughtParser, opened_by, style_named_in


def parse(
    text: str, cuts: list[int] | None = None, *, style: str = "qwen3", open: bool = False
) -> tuple[str, str]:
    parser = ThoughtParser(STYLES[style], open=open)
    found = [parser.push(piece) for piece in pieces(text, cuts or [])]
    found.append(parser.flush())
    return "".join(one[0] for one in found), "".join(one[1] for one in found)


@pytest.mark.parametrize(
    ("text", "style", "open", "thought", "said"),
    [
        ("<think>\nWhy?\n</think>\n\nSo.", "qwen3", False, "Why?", "So."),
        (" <think>a b </think>c", "qwen3", False, "a b", "c"),
        ("\nWhy?\n</think>\n\nSo.", "qwen3", True, "Why?", "So."),
        ("So. <think>no</think>", "qwen3", False, "", "So. <think>no</think>"),
        (" So.", "qwen3", False, "", " So."),
        ("<thinking", "qwen3", False, "", "<thinking"),
        ("<thi", "qwen3", False, "", "<thi"),
        ("<think>never ends </thi", "qwen3", False, "never ends </thi", ""),
        ("<think>\n\n</think>\n\nSo.", "qwen3", False, "", "So."),
        ("a</think>b</think>c", "qwen3", True, "a", "b</think>c"),
        ("Why?</think>So.", "deepseek_r1", False, "Why?", "So."),
        ("<think>Why?</think>So.", "deepseek_r1", False, "Why?", "So."),
        ("[THINK]Why?[/THINK]So.", "mistral", False, "Why?", "So."),
        ("", "qwen3", False, "", ""),
        ("", "qwen3", True, "", ""),
    ],
)
@given(cuts=CUTS)
def test_what_is_thought_and_what_is_said(
    text: str, style: str, open: bool, thought: str, said: str, cuts: list[int]
) -> None:
    assert parse(text, cuts, style=style, open=open) == (thought, said)


FRAGMENTS = st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", " ", "\n", "a", "é", "<"])


@given(
    fragments=st.lists(FRAGMENTS, max_size=12),
    cuts=CUTS,
    style=st.sampled_from(sorted(STYLES)),
    open=st.booleans(),
)
def test_any_text_cut_in_any_way(
    fragments: list[str], cuts: list[int], style: str, open: bool
) -> None:
    text = "".join(fragments)
    whole = parse(text, style=style, open=open)
    assert parse(text, cuts, style=style, open=open) == whole
    assert parse(text, list(range(len(text))), style=style, open=open) == whole


def test_only_what_may_be_a_mark_is_held_back() -> None:
    parser = ThoughtParser(STYLES["qwen3"], open=True)
    assert parser.push("a b \n</th") == ("a b", "")
    assert parser.thinking
    assert parser.push("e") == (" \n</the", "")
    assert parser.push("</think> \n") == ("", "")
    assert not parser.thinking
    assert parser.push("c ") == ("", "c ")


def test_what_a_prompt_and_a_template_say() -> None:
    marks = STYLES["qwen3"]
    assert opened_by("user: x\nassistant: <think>\n", marks) is True
    assert opened_by("assistant: <think>\n\n</think>\n\n", marks) is False
    assert opened_by("what is <think>?\nassistant:", marks) is None
    assert style_named_in("{{ '<think></think>' }}") == "qwen3"
    assert style_named_in("[THINK][/THINK]") == "mistral"
    assert style_named_in("{{ messages }}") is None
