"""Limits under the names of the settings that decide them at the start, for people to change."""

from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, get_type_hints

import msgspec

from octavo.config import RULES, parse_duration
from octavo.core.budget import Ceilings, Limits
from octavo.errors import ConfigError, InvalidRequest

_SETTINGS = {
    "sequences": "max_num_seqs",
    "tokens": "max_num_batched_tokens",
    "waiting": "max_queued_requests",
    "waiting_tokens": "max_queued_tokens",
    "waiting_s": "max_queue_time",
    "aging_s": "aging",
    "drafts": "max_draft_tokens",
    "ttft_target_s": "ttft_target",
    "tpot_target_s": "tpot_target",
}
"""What has another name in the core. All else is called as it is there."""

_TYPES = {_SETTINGS.get(name, name): kind for name, kind in get_type_hints(Limits).items()}
_FIELDS = {_SETTINGS.get(limit.name, limit.name): limit.name for limit in fields(Limits)}


def named(limits: Limits | Ceilings) -> dict[str, Any]:
    """
    >>> named(Limits(sequences=8, tokens=64))["max_num_seqs"]
    8
    """
    return {_SETTINGS.get(one.name, one.name): getattr(limits, one.name) for one in fields(limits)}


def changed(limits: Limits, changes: Mapping[str, object]) -> Limits:
    """`limits` with some set anew, by the names of the settings. None stands for no limit.

    Raises   InvalidRequest naming the field: it is none, of the wrong type or out of range.
    """
    values = {_field(name): _typed(name, value) for name, value in changes.items()}
    try:
        return replace(limits, **values)
    except ConfigError as error:
        raise refusal(error) from error


def refusal(error: ConfigError) -> InvalidRequest:
    """What the core says of a limit, with the name it has here."""
    name = error.param or ""
    known = _SETTINGS.get(name, name)
    return InvalidRequest(error.message.replace(name, known, 1), param=known or None)


def _field(name: str) -> str:
    if name in _FIELDS:
        return _FIELDS[name]
    near = get_close_matches(name[:64], _FIELDS, n=1)
    advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(_FIELDS)}"
    raise InvalidRequest(f"{name} is no limit that can be changed; {advice}", param=name)


def _typed(name: str, value: object) -> Any:
    """A value of the limit's type; durations may be written as in the settings, such as 100ms."""
    kind, choices = (RULES[name].kind, RULES[name].choices) if name in RULES else ("whole", ())
    try:
        if kind == "duration" and isinstance(value, str):
            return parse_duration(value)
        return msgspec.convert(value, _TYPES[name])
    except ValueError as error:
        what = f"expected one of {', '.join(map(str, choices))}" if choices else str(error)
        got = f", got {value!r}" if choices or kind == "duration" else ""
        raise InvalidRequest(f"{name}: {what[:1].lower()}{what[1:]}{got}", param=name) from error
