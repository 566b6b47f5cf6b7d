"""Voice: how a model thinks and calls, and what that means for one chat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.text.chat import ChatTemplate, Ending
from octavo.text.guides import Reasoning, Vocabulary, guide
from octavo.text.marks import marks_of
from octavo.text.reader import Reader
from octavo.text.thoughts import STYLES, Marks, ThoughtParser, opened_by, style_named_in
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools.definitions import ToolUse
from octavo.text.tools.forms import FORMS, Form, form_named_in
from octavo.text.tools.parser import CallParser

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_SWITCHES = ("enable_thinking", "thinking")
"""What chat templates call the switch that turns reasoning on and off."""
MAX_BUDGET = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """What a chat asks for beside its messages.

    `tools` may be called; None is none. `variables` are for the chat template. `thinking` turns
    the reasoning on or off, as far as the model can; None leaves it as it is, `effort` says how
    much of it there is to be. After `budget` tokens of reasoning its end follows.
    """

    tools: ToolUse | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    effort: Effort | None = None
    budget: int | None = None

    @property
    def guides(self) -> bool:
        """Whether a grammar may come of it."""
        return self.tools is not None or self.budget is not None

    def __post_init__(self) -> None:
        if self.budget is not None and not 0 <= self.budget <= MAX_BUDGET:
            raise InvalidRequest(
                f"thinking_token_budget must be 0 to {MAX_BUDGET}, not {self.budget}",
                param="thinking_token_budget",
            )


SILENT = Talk()
"""Nothing is asked for."""


class Voice:
    """What a model writes around its reasoning and its calls: as its chat template does, or of the
    names given; "none" is nothing."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        template: ChatTemplate,
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        called = form_named_in(source) if tool_call_parser is None else tool_call_parser
        style = style_named_in(source) if reasoning_parser is None else reasoning_parser
        self._form: Form | None = FORMS.get(called or "none")
        self.marks: Marks | None = STYLES.get(style or "none")
        self._template = template
        self._special_ids = tokenizer.special_ids
        marks = marks_of(tokenizer)
        self._vocabulary = Vocabulary(
            marks=marks, others=tokenizer.special_ids - tokenizer.eos_ids - set(marks.values())
        )

    def render(self, messages: Sequence[Mapping[str, Any]], ending: Ending, talk: Talk) -> str:
        """The conversation as a prompt.

        Raises   InvalidRequest.
        """
        tools = () if talk.tools is None else tuple(tool.shown for tool in talk.tools.tools)
        variables = {**self._switched(talk), **talk.variables}
        return self._template.render(messages, ending, tools=tools, variables=variables)

    def reasoning(
        self, messages: Sequence[Mapping[str, Any]], text: str, ending: Ending, talk: Talk
    ) -> Reasoning | None:
        """What may come before the answer to a prompt; None if nothing does."""
        if self.marks is None:
            return None
        if ending == "answer":
            opened = opened_by(text, self.marks)
        else:
            said = messages[-1].get("content")
            opened = opened_by(said if isinstance(said, str) else "", self.marks)
            opened = opened if ending == "continued" else None
        if opened is False or (opened is None and ending == "continued"):
            return None
        return Reasoning(marks=self.marks, opened=opened is True, budget=talk.budget)

    def guided(
        self, params: SamplingParams, talk: Talk, reasoning: Reasoning | None
    ) -> SamplingParams:
        """The parameters of an answer that keeps to all that is asked.

        Raises   InvalidRequest.
        """
        if talk.tools is not None and self._form is None:
            raise InvalidRequest(
                "tools: how this model writes its calls is not known; say so with"
                " --tool-call-parser, or leave them out",
                param="tools",
            )
        if talk.budget is not None and self.marks is None:
            raise InvalidRequest(
                "thinking_token_budget: this model does not reason; leave it out",
                param="thinking_token_budget",
            )
        structured = guide(
            self._vocabulary,
            structured=params.structured,
            use=talk.tools,
            form=self._form,
            reasoning=reasoning,
        )
        if structured is params.structured:
            return params
        return replace(params, structured=structured)

    def reader(self, params: SamplingParams, talk: Talk, reasoning: Reasoning | None) -> Reader:
        """A reader of one answer."""
        thoughts = None
        if reasoning is not None:
            thoughts = ThoughtParser(reasoning.marks, open=reasoning.opened)
        if talk.tools is None or self._form is None:
            return Reader(thoughts)
        use = talk.tools
        kept = params.structured is not None and (use.must or any(t.strict for t in use.tools))
        calls = CallParser(self._form, use.names, kept=kept, most=use.most)
        return Reader(thoughts, calls)

    def shown(self, talk: Talk, reasoning: Reasoning | None) -> frozenset[int]:
        """The special tokens that a reader has to see."""
        texts = [] if reasoning is None else list(reasoning.marks[:2])
        if talk.tools is not None and self._form is not None:
            texts += self._form.markers
        marks = self._vocabulary.marks
        return frozenset(marks[one] for one in texts if one in marks) & self._special_ids

    def _switched(self, talk: Talk) -> dict[str, Any]:
        """The variables that turn reasoning on or off, or say how much of it."""
        if talk.effort is not None and "reasoning_effort" in self._template.reads:
            return {"reasoning_effort": talk.effort}
        wanted = talk.thinking
        if talk.effort is not None:
            if talk.effort != "none":
                raise InvalidRequest(
                    f"reasoning_effort is {talk.effort!r}, and this model has no such degrees; it"
                    " may be none",
                    param="reasoning_effort",
                )
            wanted = False
        if wanted is None:
            return {}
        switch = next((name for name in _SWITCHES if name in self._template.reads), None)
        if switch is not None:
            return {switch: wanted}
        if wanted != (self.marks is not None):
            can = "does not reason" if wanted else "cannot be told not to reason"
            raise InvalidRequest(
                f"thinking: this model {can}; leave it out",
                param="thinking" if talk.effort is None else "reasoning_effort",
            )
        return {}
