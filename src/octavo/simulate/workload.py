"""Workload files: a JSON list of `{prompt_token_ids, output_len, arrival_s}`."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

MAX_ARRIVAL_S = 1e6
SHIFT = 7919


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One request: it arrives `arrival_s` after the start and gets `output_len` tokens."""

    prompt_token_ids: tuple[int, ...]
    output_len: int
    arrival_s: float = 0.0

    @property
    def length(self) -> int:
        return len(self.prompt_token_ids) + self.output_len


def uniform_workload(
    requests: int, prompt: int, answer: int, *, vocabulary: int, seed: int = 1
) -> tuple[WorkItem, ...]:
    """So many requests at once, with random prompts and answers of these lengths."""
    draw = random.Random(seed)
    return tuple(
        WorkItem(
            prompt_token_ids=tuple(draw.choices(range(vocabulary), k=prompt)), output_len=answer
        )
        for _ in range(requests)
    )


def shifted(items: Sequence[WorkItem], times: int) -> tuple[WorkItem, ...]:
    """The same lengths and the same common beginnings, with other ids each time: a run that repeats
    another finds nothing of it cached."""
    top = max(max(item.prompt_token_ids) for item in items) + 1
    return tuple(
        replace(
            item,
            prompt_token_ids=tuple(
                (token + SHIFT * times) % top for token in item.prompt_token_ids
            ),
        )
        for item in items
    )


def load_workload(path: Path) -> tuple[WorkItem, ...]:
    """The requests of a file, in order of arrival.

    Raises   ConfigError naming the file and the entry that is not as described.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the workload {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"workload {path} is not JSON: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"workload {path} must be a list of at least one request")
    items = [_item(entry, f"workload {path}, entry {index}") for index, entry in enumerate(entries)]
    return tuple(sorted(items, key=lambda item: item.arrival_s))


def _item(entry: Any, where: str) -> WorkItem:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be an object, not {type(entry).__name__}")
    ids, wanted = entry.get("prompt_token_ids"), entry.get("output_len")
    arrival_s = entry.get("arrival_s", 0.0)
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise ConfigError(f"{where}: prompt_token_ids must be a list of at least one integer")
    if type(wanted) is not int or wanted < 1:
        raise ConfigError(f"{where}: output_len must be an integer of at least 1, not {wanted!r}")
    if type(arrival_s) not in (int, float) or not 0 <= arrival_s <= MAX_ARRIVAL_S:
        raise ConfigError(
            f"{where}: arrival_s must be a number from 0 to {MAX_ARRIVAL_S:g}, not {arrival_s!r}"
        )
    return WorkItem(prompt_token_ids=tuple(ids), output_len=wanted, arrival_s=float(arrival_s))
