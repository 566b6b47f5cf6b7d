"""Forms: how each family of models writes its calls."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.text.tools import json_calls, mistral, pythonic
from octavo.text.tools.json_calls import Called
from octavo.text.tools.mistral import MistralSpan
from octavo.text.tools.pythonic import PythonicSpan
from octavo.text.tools.spans import Span, json_span


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Calls as a model writes them: one of the markers `begins`, what `span` finds the end of and
    `calls_in` reads, and perhaps the marker `end`. Where `bare`, they may also stand without one at
    the very start of an answer. `joint` may stand between two.

    An answer that is kept to its form by a grammar is `opening`, calls with `joining` between them,
    and `closing`; each call is an object with a name and `key`. Markers are pieces of their own.
    """

    begins: tuple[str, ...] = ()
    end: str = ""
    bare: bool = False
    joint: str = ""
    span: Callable[[], Span] = json_span
    calls_in: Callable[[str], tuple[Called, ...] | None] = json_calls.calls_in
    opening: tuple[str, ...] = ()
    joining: tuple[str, ...] = (", ",)
    closing: tuple[str, ...] = ()
    key: str = "arguments"

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.begins, self.end)))


_HERMES = Form(
    begins=("<tool_call>",),
    end="</tool_call>",
    opening=("<tool_call>", "\n"),
    joining=("\n", "</tool_call>", "\n", "<tool_call>", "\n"),
    closing=("\n", "</tool_call>"),
)
FORMS = {
    "hermes": _HERMES,
    "llama3_json": Form(
        begins=("<|python_tag|>",), bare=True, joint=";", joining=("; ",), key="parameters"
    ),
    "pythonic": Form(
        begins=("<|python_start|>",),
        end="<|python_end|>",
        bare=True,
        span=PythonicSpan,
        calls_in=pythonic.calls_in,
        opening=("[",),
        closing=("]",),
    ),
    "mistral": Form(
        begins=("[TOOL_CALLS]",),
        span=MistralSpan,
        calls_in=mistral.calls_in,
        opening=("[TOOL_CALLS]", "["),
        closing=("]",),
    ),
    "granite": Form(
        begins=("<|tool_call|>", "<tool_call>"),
        end="</tool_call>",
        opening=("<|tool_call|>", "["),
        closing=("]",),
    ),
    "smollm2": Form(
        begins=("<tool_call>",),
        end="</tool_call>",
        opening=("<tool_call>", "["),
        closing=("]", "</tool_call>"),
    ),
    "smollm3": _HERMES,
}
"""By their names in vLLM, where it has them."""

_SIGNS = (
    ("<|tool_call|>", "granite"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", None),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ('{"name": function name, "parameters"', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
)


def form_named_in(template: str) -> str | None:
    """The form of the calls that a chat template writes; None if it is not known."""
    return next((name for sign, name in _SIGNS if sign in template), None)
