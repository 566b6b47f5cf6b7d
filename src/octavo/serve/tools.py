"""What an answer may call, in the words of each API."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo.errors import InvalidRequest
from octavo.text.tools.definitions import Tool, ToolUse

Json = Mapping[str, Any]

_FUNCTION = ("name", "description", "parameters", "strict")


def of_chat(tools: Sequence[Any] | None, choice: object, parallel: bool | None) -> ToolUse | None:
    """OpenAI's `tools`, `tool_choice` and `parallel_tool_calls` of chat completions.

    Raises  InvalidRequest.
    """
    return _use([_chat_tool(one, f"tools[{n}]") for n, one in _listed(tools)], choice, parallel)


def of_responses(
    tools: Sequence[Any] | None, choice: object, parallel: bool | None
) -> ToolUse | None:
    """Those of OpenAI's responses, whose functions stand in the tools themselves, and are strict
    unless they say otherwise."""
    listed = [_response_tool(one, f"tools[{n}]") for n, one in _listed(tools)]
    return _use(listed, choice, parallel)


def of_messages(tools: Sequence[Any] | None, choice: Json | None) -> ToolUse | None:
    """Anthropic's `tools` and `tool_choice`."""
    listed = [_message_tool(one, f"tools[{n}]") for n, one in _listed(tools)]
    if choice is None:
        return _use(listed, None, True)
    known = {
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": {"type": "function", "name": choice.get("name")},
    }
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in known:
        raise InvalidRequest(
            f"tool_choice.type is {kind!r}; it must be auto, any, tool or none",
            param="tool_choice.type",
        )
    _check_known(choice, ("type", "name", "disable_parallel_tool_use"), "tool_choice")
    alone = choice.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise InvalidRequest(
            "tool_choice.disable_parallel_tool_use must be true or false",
            param="tool_choice.disable_parallel_tool_use",
        )
    return _use(listed, known[kind], not alone)


def _use(tools: Sequence[Tool], choice: object, parallel: bool | None) -> ToolUse | None:
    """None if nothing is to be called."""
    if choice not in (None, "auto", "none", "required") and not isinstance(choice, Mapping):
        raise InvalidRequest(
            f"tool_choice is {choice!r}; it must be auto, none, required or a function's name in an"
            " object",
            param="tool_choice",
        )
    if not tools:
        if choice not in (None, "auto", "none"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return None
    use = ToolUse(tools=tuple(tools), parallel=parallel is not False)
    if isinstance(choice, Mapping):
        return replace(use, only=_chosen(choice))
    return None if choice == "none" else replace(use, required=choice == "required")


def _chosen(choice: Json) -> str:
    """The function that a choice names, in itself or in an object `function`."""
    if choice.get("type") != "function":
        raise InvalidRequest(
            f"tool_choice.type is {choice.get('type')!r}; it must be function",
            param="tool_choice.type",
        )
    inner = choice.get("function", choice)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice names no function", param="tool_choice")
    return name


def _chat_tool(value: object, where: str) -> Tool:
    tool = _object(value, where)
    _check_type(tool, where)
    _check_known(tool, ("type", "function"), where)
    where = f"{where}.function"
    function = _object(tool.get("function"), where)
    _check_known(function, _FUNCTION, where)
    return _tool(function, where, "parameters", strict=False)


def _response_tool(value: object, where: str) -> Tool:
    tool = _object(value, where)
    _check_type(tool, where)
    _check_known(tool, ("type", *_FUNCTION), where)
    return _tool(tool, where, "parameters", strict=True)


def _message_tool(value: object, where: str) -> Tool:
    tool = _object(value, where)
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"{where}.type is {tool['type']!r}; only tools of the client are supported",
            param=f"{where}.type",
        )
    _check_known(tool, ("type", "name", "description", "input_schema", "strict"), where)
    return _tool(tool, where, "input_schema", strict=False)


def _tool(function: Json, where: str, schema: str, *, strict: bool) -> Tool:
    kinds = {"name": str, "description": str | None, "strict": bool | None, schema: dict | None}
    for name, kind in kinds.items():
        if not isinstance(function.get(name), kind):
            raise InvalidRequest(
                f"{where}.{name} is missing or of the wrong type", param=f"{where}.{name}"
            )
    asked = function.get("strict")
    return Tool(
        name=function["name"],
        called=f"{where}.{schema}",
        description=function.get("description"),
        parameters=function.get(schema) or None,
        strict=strict if asked is None else asked,
    )


def _listed(tools: Sequence[Any] | None) -> "enumerate[Any]":
    return enumerate(tools or ())


def _object(value: object, where: str) -> Json:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} must be an object", param=where)
    return value


def _check_type(tool: Json, where: str) -> None:
    if tool.get("type") != "function":
        raise InvalidRequest(
            f"{where}.type is {tool.get('type')!r}; only functions are supported",
            param=f"{where}.type",
        )


def _check_known(value: Json, known: Sequence[str], where: str) -> None:
    for name, one in value.items():
        if one is not None and name not in known:
            raise InvalidRequest(
                f"{where}.{name} is not known here; there are {', '.join(known)}",
                param=f"{where}.{name}",
            )
