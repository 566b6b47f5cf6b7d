"""Reads a model's configuration key by key, so that nothing in it is silently ignored.

A key is read, known to be harmless, or refused by name: a configuration that asks for mathematics
the decoder does not do must not load and answer nonsense.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ModelFileError


class Fields:
    """The entries of one configuration, with typed getters that remember what was read."""

    def __init__(self, path: Path, entries: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self._entries = entries
        self._prefix = prefix
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        return self._entries.get(key) is not None

    def raw(self, key: str) -> Any:
        self._read.add(key)
        return self._entries.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more."""
        value = self._value(key, default)
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.wrong(key, value, "a whole number of 1 or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if type(value) is not str:
            raise self.wrong(key, value, "a text")
        return value

    def token(self, key: str, vocab_size: int) -> int | None:
        """A token id, None where there is none."""
        value = self.raw(key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < vocab_size:
            raise self.wrong(key, value, f"a token id below {vocab_size}")
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Refuse the key unless it is absent or one of `allowed`."""
        value = self.raw(key)
        if value is not None and value not in allowed:
            expected = " or ".join(repr(item) for item in allowed) or "no such key"
            raise self.wrong(key, value, f"{expected}: this model needs what Octavo does not do")

    def refuse_rest(self, harmless: Collection[str] = ()) -> None:
        """Refuse a key that nobody read, unless it is harmless, null or false."""
        for key, value in self._entries.items():
            if key in self._read or key in harmless or value is None or value is False:
                continue
            raise ModelFileError(
                f"{self.path}: {self._prefix}{key} = {value!r:.60} is not known and may change "
                "what the model computes; remove the key if it does not"
            )

    def wrong(self, key: str, value: Any, expected: str) -> ModelFileError:
        found = "nothing" if value is None else f"{value!r:.80}"
        return ModelFileError(
            f"{self.path}: {self._prefix}{key}: expected {expected}, found {found}"
        )

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        return default if value is None else value
