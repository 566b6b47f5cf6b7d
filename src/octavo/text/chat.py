"""Chat messages to the prompt text a model was trained on, through its own template."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import InvalidRequest, ModelFileError
from octavo.text.breakpoints import ttl_s_of, unused_character
from octavo.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = frozenset({"role", "content", "name"})
_KEYS_OF = {
    "assistant": _KEYS | {"tool_calls", "reasoning", "reasoning_content"},
    "tool": _KEYS | {"tool_call_id"},
}
_LISTS = frozenset({"images", "tool_calls"})
"""Keys that say nothing while they hold nothing."""
_REASONING = ("reasoning_content", "reasoning")
_CALL_KEYS = frozenset({"id", "type", "index", "function"})
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_PART_KEYS = frozenset({"type", "text", "cache_control"})


Ending = Literal["answer", "continued", "bare"]
"""How a prompt ends: with what begins the assistant's next message; with what the last message
says, which the answer goes on with; or after the last message."""


class ChatTemplate:
    """A model's chat template, compiled once.

    The rendered text must be encoded with `parse_special`, because the template spells the model's
    own control tokens. Text in a message that spells one is therefore read as one, as in vLLM and
    llama.cpp: filter it out before it gets here if the people who write messages are not trusted.

    A template is a program of the model's author. The sandbox keeps it from everything but the
    messages; it does not stop one that runs for ever: serve models of people you trust.

    Raises  ModelFileError: the template is not valid jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        special: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._special = dict(special)
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            self.reads = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            """The variables that it looks at."""
        except Exception as error:  # of jinja, or of the compiler behind it
            raise ModelFileError(f"the chat template does not compile: {error}") from error

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer) -> "ChatTemplate":
        """The template that came with a tokenizer.

        Raises  ModelFileError: there is none, or it is not valid jinja.
        """
        if tokenizer.chat_template is None:
            raise ModelFileError("the model has no chat template")
        return cls(tokenizer.chat_template, special=tokenizer.special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        ending: Ending = "answer",
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as a prompt.

        `tools` are function definitions as OpenAI writes them; `variables` more that the template
        looks at, such as `enable_thinking`.
        Raises  InvalidRequest: a message is malformed, the template refuses the conversation, or
                has no place for tools or for a variable.
        """
        checked = check_messages(messages)
        more = dict(variables or {})
        self._check_place(tools, more)
        if tools:
            more["tools"] = list(tools)
        if ending == "continued":
            return self._continued(checked, more)
        return self._rendered(checked, more, add_generation_prompt=ending == "answer")

    def _check_place(self, tools: Sequence[Mapping[str, Any]], variables: dict[str, Any]) -> None:
        if tools and "tools" not in self.reads:
            raise InvalidRequest(
                "tools: this model's chat template has no place for tools; leave them out",
                param="tools",
            )
        for name in variables:
            if name in _RESERVED or name in self._special or name not in self.reads:
                known = sorted(self.reads - _RESERVED - self._special.keys())
                raise InvalidRequest(
                    f"chat_template_kwargs.{name}: the chat template of this model does not look at"
                    f" that; it looks at {', '.join(known) or 'nothing of the kind'}",
                    param=f"chat_template_kwargs.{name}",
                )

    def _continued(self, messages: list[dict[str, Any]], more: dict[str, Any]) -> str:
        """The prompt up to the end of what the last message says.

        That ends where a character stands which is put there, and which the text has nowhere.
        """
        last = messages[-1]
        mark = unused_character("".join(message["content"] for message in messages))
        marked = [*messages[:-1], last | {"content": last["content"] + mark}]
        whole = self._rendered(marked, more, add_generation_prompt=False)
        text, found, _ = whole.rpartition(mark)
        if not found:
            raise InvalidRequest(
                "the last message cannot be continued: the chat template leaves it out",
                param="messages",
            )
        return text

    def _rendered(
        self, messages: list[dict[str, Any]], more: dict[str, Any], *, add_generation_prompt: bool
    ) -> str:
        """Most templates want the arguments of calls as a mapping; some put text together."""
        variables = {"tools": None, "documents": None, **self._special, **more}
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            try:
                return self._template.render(messages=messages, **variables)
            except TypeError:
                return self._template.render(messages=_with_text_arguments(messages), **variables)
        except Exception as error:  # a template is a program: any operation in it may fail
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error


def ending_of(add_generation_prompt: bool | None, continue_final_message: bool | None) -> Ending:
    """How a prompt ends, in the words of transformers.

    Raises  InvalidRequest: it cannot end in both ways.
    """
    if not continue_final_message:
        return "bare" if add_generation_prompt is False else "answer"
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other; send one",
            param="continue_final_message",
        )
    return "continued"


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates expect them: a role, and content that is one string.

    Text parts are joined; the null content of an assistant is empty; other nulls count as absent.
    Calls have their arguments as a mapping; reasoning stands under both names that it has.
    Raises  InvalidRequest naming the message.
    """
    if not messages:
        raise InvalidRequest("messages is empty: send at least one message", param="messages")
    return [_checked(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _checked(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} is not an object with role and content", param=where)
    given = {key for key, value in message.items() if value is not None}
    given -= {key for key in _LISTS if message.get(key) == []}
    role = message.get("role")
    known = _KEYS_OF.get(role, _KEYS) if isinstance(role, str) else _KEYS
    if unknown := sorted(map(str, given - known)):
        raise InvalidRequest(f"{where}.{unknown[0]} is not supported", param=where)
    if role not in ROLES:
        raise InvalidRequest(
            f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}", param=f"{where}.role"
        )
    checked = {"role": role, "content": _content(message.get("content"), role, f"{where}.content")}
    for key in ("name", "tool_call_id", *_REASONING):
        if (value := message.get(key)) is None:
            continue
        if not isinstance(value, str):
            raise InvalidRequest(f"{where}.{key} is not a string", param=f"{where}.{key}")
        names = _REASONING if key in _REASONING else (key,)
        checked |= dict.fromkeys(names, value)
    if calls := message.get("tool_calls"):
        checked["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return checked


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} is not a list of calls", param=where)
    return [_call(call, f"{where}[{n}]") for n, call in enumerate(calls)]


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequest(f"{where} is no call with a function", param=where)
    if call.get("type", "function") != "function" or call.keys() - _CALL_KEYS:
        raise InvalidRequest(f"{where} is no call of a function", param=where)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.function.name is not a name", param=f"{where}.function.name")
    where_given = f"{where}.function.arguments"
    arguments = _arguments(function.get("arguments"), where_given)
    checked = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if (given := call.get("id")) is not None and not isinstance(given, str):
        raise InvalidRequest(f"{where}.id is not a string", param=f"{where}.id")
    return checked if given is None else {"id": given, **checked}


def _arguments(value: object, where: str) -> dict[str, Any]:
    """A mapping, which may come as the text of a JSON object."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where} is not JSON: {error}", param=where) from error
    if value is not None and not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} is not a JSON object", param=where)
    return dict(value or {})


def _with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return call | {"function": function | {"arguments": _to_json(function["arguments"])}}

    return [
        message | {"tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _content(content: object, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list):
        return "".join(_part(part, f"{where}[{n}]") for n, part in enumerate(content))
    kind = "missing" if content is None else f"of type {type(content).__name__}"
    raise InvalidRequest(
        f"{where} is {kind}; it must be a string or a list of text parts", param=where
    )


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(f"{where} is of type {kind!r}; only text is supported", param=where)
    given = {key for key, value in part.items() if value is not None}
    if unknown := sorted(map(str, given - _PART_KEYS)):
        raise InvalidRequest(f"{where}.{unknown[0]} is not supported", param=where)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text is not a string", param=where)
    if part.get("cache_control") is not None:
        ttl_s_of(part["cache_control"], f"{where}.cache_control")
    return text


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`: marks an answer for training; here only its body."""

    tags = {"generation"}  # noqa: RUF012 jinja declares it so

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The surroundings that published chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes `<` and `>` for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
