"""Marks: the tokens around reasoning and calls, where a model has them as tokens of their own."""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from octavo.text.thoughts import STYLES
from octavo.text.tools.forms import FORMS

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


@cache
def texts() -> tuple[str, ...]:
    """Every mark that any form of calls or style of reasoning has."""
    calls = [mark for form in FORMS.values() for mark in form.markers]
    around = [mark for one in STYLES.values() for mark in (one.opening, one.closing)]
    return tuple(dict.fromkeys([*calls, *around]))


def marks_of(tokenizer: "Tokenizer") -> Mapping[str, int]:
    """The marks that are one token of a model, with their ids."""
    found = {}
    for text in texts():
        ids = tokenizer.encode(text, parse_special=True, add_special=False)
        if len(ids) == 1:
            found[text] = ids[0]
    return found
