"""Breakpoints: where a conversation says that its beginning should stay cached.

    {"role": "system", "content": [
        {"type": "text", "text": "…", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                                   ◀ the prompt up to here
        {"type": "text", "text": "…"}]}

Source  Anthropic's Messages API, prompt caching.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from octavo.errors import InvalidRequest
from octavo.units import common_length

TTL_S = {"5m": 300.0, "1h": 3600.0}
DEFAULT_TTL = "5m"
MAX_BREAKPOINTS = 4


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """After this part of this message, for so long after the last use."""

    message: int
    part: int
    ttl_s: float

    @property
    def where(self) -> str:
        return f"messages[{self.message}].content[{self.part}].cache_control"


def ttl_s_of(control: object, where: str) -> float:
    """How many seconds a cache_control asks for.

    Raises  InvalidRequest naming `where` it is wrong.
    """
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        raise InvalidRequest(f'{where} must be {{"type": "ephemeral"}}', param=where)
    if unknown := sorted(map(str, control.keys() - {"type", "ttl"})):
        raise InvalidRequest(f"{where}.{unknown[0]} is not supported", param=where)
    ttl = control.get("ttl")
    ttl = DEFAULT_TTL if ttl is None else ttl
    if not isinstance(ttl, str) or ttl not in TTL_S:
        raise InvalidRequest(f"{where}.ttl must be {' or '.join(TTL_S)}, not {ttl!r}", param=where)
    return TTL_S[ttl]


def breakpoints_of(messages: Sequence[Mapping[str, Any]]) -> tuple[Breakpoint, ...]:
    """The breakpoints of messages that are well-formed, in order.

    Raises  InvalidRequest: there are too many.
    """
    found = tuple(
        Breakpoint(
            n, p, ttl_s_of(part["cache_control"], f"messages[{n}].content[{p}].cache_control")
        )
        for n, message in enumerate(messages)
        if isinstance(content := message.get("content"), list)
        for p, part in enumerate(content)
        if part.get("cache_control") is not None
    )
    if len(found) > MAX_BREAKPOINTS:
        raise InvalidRequest(
            f"the messages hold {len(found)} cache_control, at most {MAX_BREAKPOINTS} are allowed",
            param="messages",
        )
    return found


def characters_before(
    breakpoint: Breakpoint,
    messages: Sequence[Mapping[str, Any]],
    text: str,
    render: Callable[[Sequence[Mapping[str, Any]]], str],
) -> int:
    """How many leading characters of `text`, the rendered `messages`, stand before a breakpoint.

    The messages are rendered again with one character more there, which the text has nowhere: what
    both begin with does not depend on what follows, whatever the template makes of it.
    Raises  InvalidRequest: the template leaves that part out.
    """
    more = unused_character(text)
    other = render(_with(messages, breakpoint, more))
    if more not in other:
        raise InvalidRequest(
            f"{breakpoint.where} marks nothing: the chat template renders that part nowhere",
            param=breakpoint.where,
        )
    return common_length(text, other)


def unused_character(text: str) -> str:
    """One of those that Unicode leaves to private use, which `text` does not hold."""
    private = map(chr, chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)))
    return next(character for character in private if character not in text)


def _with(
    messages: Sequence[Mapping[str, Any]], breakpoint: Breakpoint, more: str
) -> list[Mapping[str, Any]]:
    changed = list(messages)
    message = changed[breakpoint.message]
    content = list(message["content"])
    content.insert(breakpoint.part + 1, {"type": "text", "text": more})
    changed[breakpoint.message] = {**message, "content": content}
    return changed
