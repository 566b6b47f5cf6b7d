"""Guides: the grammar of an answer with reasoning before it, and calls in it.

    start: reasoning? answer
    answer: what is asked of it | calls

In free text a token that is a mark does not occur: where it does it is one.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from octavo.errors import InvalidRequest
from octavo.text.structured import Structured
from octavo.text.thoughts import Marks
from octavo.text.tools.definitions import ANY_OBJECT, Tool, ToolUse
from octavo.text.tools.forms import Form

_TEXT = r"TEXT: /(.|\n)+/"
_ANY = r"ANY: /(.|\n)*/"
_SPACE = r"SPACE: /[ \t\r\n]{0,4}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The reasoning before an answer: its marks, whether the prompt has `opened` it already, and
    how many tokens it may have."""

    marks: Marks
    opened: bool
    budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Of a model: the tokens that are marks, and those of its special tokens that end nothing."""

    marks: Mapping[str, int]
    others: frozenset[int]

    def spelled(self, text: str) -> str:
        """A text as a grammar writes it: a mark as the token that it is."""
        token = self.marks.get(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"


def guide(
    vocabulary: Vocabulary,
    *,
    structured: Structured | None,
    use: ToolUse | None,
    form: Form | None,
    reasoning: Reasoning | None,
) -> Structured | None:
    """What an answer must be on the whole; None if it may be anything.

    Raises  InvalidRequest: it cannot be both, or cannot be done with this model.
    """
    asks = use is not None and (use.must or any(tool.strict for tool in use.tools))
    budget = None if reasoning is None else reasoning.budget
    if structured is None and not asks and budget is None:
        return None
    if structured is not None and use is None and reasoning is None:
        return structured
    return _Writer(vocabulary, structured, use, form, reasoning).whole()


class _Writer:
    """Puts the rules of one grammar together."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        structured: Structured | None,
        use: ToolUse | None,
        form: Form | None,
        reasoning: Reasoning | None,
    ) -> None:
        self._vocabulary = vocabulary
        self._structured = structured
        self._use = use
        self._form = form
        self._reasoning = reasoning
        self._rules: list[str] = []

    def whole(self) -> Structured:
        start = f"start: {self._before()} answer"
        answer = f"answer: {self._answer()}"
        lines = dict.fromkeys(["%llguidance {}", start, answer, *self._rules, ""])
        return Structured(grammar="\n".join(lines), called=self._called)

    @property
    def _called(self) -> str:
        if self._structured is not None:
            return self._structured.called
        return "tools" if self._use is not None else "thinking_token_budget"

    # --- the reasoning

    def _before(self) -> str:
        one = self._reasoning
        if one is None:
            return ""
        opening, closing = map(self._vocabulary.spelled, one.marks[:2])
        if one.marks.closing in self._vocabulary.marks:
            limit = "" if one.budget is None else f"[max_tokens={one.budget}]"
            thought = f"thought {closing} SPACE" if one.budget != 0 else f"{closing} SPACE"
            self._rules += [f"thought{limit}: ANY", _ANY, _SPACE]
        elif one.budget is not None:
            raise InvalidRequest(
                "thinking_token_budget: the end of reasoning is no token of this model",
                param="thinking_token_budget",
            )
        else:
            thought = "thought SPACE"
            self._rules += [f"thought[lazy]: ANY {closing}", _ANY, _SPACE]
        if one.opened:
            return thought
        return f"({opening})? {thought}" if one.marks.assumed else f"({opening} {thought})?"

    # --- the answer

    def _answer(self) -> str:
        use, form = self._use, self._form
        if use is None or form is None:
            return self._asked() if self._structured else f"({self._free(())})*"
        calls = self._calls(use, form)
        if use.must:
            if self._structured is not None:
                raise self._structured.wrong("an answer that must call a function has no format")
            return calls
        if self._structured is not None:
            return f"{self._asked()} | {calls}"
        first = form.opening[0] if form.opening else ""
        if first in self._vocabulary.marks:
            free = self._free(form.markers)
            return f"({free} | {calls})*" if use.most is None else f"({free})* ({calls})?"
        return self._plain(form, calls)

    def _asked(self) -> str:
        assert self._structured is not None
        kind, text = self._structured.definition
        if kind == "json":
            return f"%json {text}"
        if self._structured.choice is not None:
            return " | ".join(
                json.dumps(one, ensure_ascii=False) for one in self._structured.choice
            )
        if kind == "regex":
            self._rules.append(f"ASKED: /{text.replace('/', chr(92) + '/')}/")
            return "ASKED"
        raise self._structured.wrong(
            "a grammar or a structural tag goes neither with tools nor with reasoning; turn that"
            " off, or use json, regex or choice"
        )

    def _free(self, without: Iterable[str]) -> str:
        """Text, and the special tokens of the model but the marks `without` and of reasoning."""
        marks = self._vocabulary.marks
        taken = {marks.get(mark) for mark in without}
        if self._reasoning is not None:
            taken |= {marks.get(mark) for mark in self._reasoning.marks[:2]}
        others = sorted((self._vocabulary.others | set(marks.values())) - taken)
        self._rules.append(_TEXT)
        return f"TEXT | <[{','.join(map(str, others))}]>" if others else "TEXT"

    def _plain(self, form: Form, calls: str) -> str:
        """Calls after a mark that is no token, or at the start of the answer only."""
        if form.bare:
            self._rules.append(r"PLAIN: /([^{\[\s](.|\n)*)?/")
            return f"{calls} | PLAIN"
        first = self._vocabulary.spelled(form.opening[0])
        rest = calls.removeprefix(first)
        self._rules += [f"head[lazy]: ANY {first}", _ANY]
        return f"(head {rest})* ANY"

    def _calls(self, use: ToolUse, form: Form) -> str:
        spelled = [
            " ".join(map(self._vocabulary.spelled, texts))
            for texts in (form.opening, form.joining, form.closing)
        ]
        self._rules.append(
            "call: " + " | ".join(self._call(tool, use, form) for tool in use.callable)
        )
        more = f"({spelled[1]} call)*" if use.most is None else ""
        return " ".join(filter(None, (spelled[0], "call", more, spelled[2])))

    def _call(self, tool: Tool, use: ToolUse, form: Form) -> str:
        schema = tool.schema if use.must or tool.strict else ANY_OBJECT
        head = json.dumps(f'{{"name": "{tool.name}", "{form.key}": ', ensure_ascii=False)
        return f'{head} %json {schema} "}}"'
