"""What an answer may call: functions, and whether it must."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import InvalidRequest
from octavo.text.structured import Structured

MAX_TOOLS = 256
_NAME = re.compile(r"[\w.:/\-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function: its name, what it does, the JSON schema of its arguments. `called` is what the
    caller calls the schema. Of a `strict` one the arguments keep to it whenever it is called.

    Raises  InvalidRequest: the name cannot be one, or the schema is none.
    """

    name: str
    called: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(
                f"{self.called}: the function's name {self.name[:40]!r} must be 1 to 128 letters,"
                " digits or any of _ - . : /",
                param=self.called,
            )

    @property
    def shown(self) -> dict[str, Any]:
        """As a chat template takes it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}

    @property
    def schema(self) -> str:
        """The schema of the arguments as a grammar takes it.

        Raises  InvalidRequest: it is beyond a limit.
        """
        given = self.parameters or {"properties": {}, "additionalProperties": False}
        schema = {"type": "object", **given}
        return Structured(json=schema, called=self.called).definition.text


ANY_OBJECT = Structured(json_object=True).definition.text


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The functions that an answer may call, or if `required` must; only the one named `only`, if
    that is given. Without `parallel` it calls one at most.

    Raises  InvalidRequest: there are none or too many, two have one name, or `only` is none of
            them.
    """

    tools: tuple[Tool, ...]
    required: bool = False
    only: str | None = None
    parallel: bool = True

    def __post_init__(self) -> None:
        if not 0 < len(self.tools) <= MAX_TOOLS:
            raise InvalidRequest(
                f"there are {len(self.tools)} tools; 1 to {MAX_TOOLS} are allowed", param="tools"
            )
        names = [tool.name for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise InvalidRequest(f"tools: two have the name {name!r}", param="tools")
        if self.only is not None and self.only not in names:
            raise InvalidRequest(
                f"tool_choice names {self.only!r}, which is none of the tools", param="tool_choice"
            )

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.only in (None, tool.name))

    @property
    def must(self) -> bool:
        return self.required or self.only is not None

    @property
    def most(self) -> int | None:
        """How many calls there may be."""
        return None if self.parallel and self.only is None else 1
