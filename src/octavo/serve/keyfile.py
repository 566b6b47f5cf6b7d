"""Where API keys come from: settings that hold them, and a TOML file with a table for each.

[[key]]
name = "alice"
sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
tokens_per_minute = 100_000
"""

import tomllib
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from octavo.engine.params import MAX_TENANT_CHARACTERS
from octavo.errors import ConfigError
from octavo.serve.keys import EVERYTHING, Key, Permit, Right
from octavo.serve.quota import Quota


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of a keys file: its secret, or the hash of it as hexadecimal digits."""

    name: str
    key: str | None = None
    sha256: str | None = None
    tenant: str | None = None
    namespace: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    highest_priority: int | None = None
    metrics: bool = False
    admin: bool = False


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: tuple[_Entry, ...]


def keys_of(plain: Sequence[str], admin: Sequence[str], file: Path | None) -> tuple[Key, ...]:
    """The keys that were given by themselves, which belong to one tenant without a name, and those
    of a file.

    Raises   ConfigError: one cannot be sent in a header, or the file cannot be used.
    """
    named = _named("api-key", plain, _rights()) | _named("admin-api-key", admin, EVERYTHING)
    return (*named.values(), *(() if file is None else read_keys(file)))


def read_keys(file: Path) -> tuple[Key, ...]:
    """The keys of a TOML file: a table `[[key]]` for each.

    Raises   ConfigError naming the file and the field; no secret is in it.
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        entries = msgspec.convert(content, _File).key
    except OSError as error:
        raise ConfigError(f"cannot read the keys file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the keys file {file} is not TOML") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"keys file {file}: {error}") from error
    if not entries:
        raise ConfigError(f"the keys file {file} has no [[key]]")
    return tuple(_key_of(entry, file) for entry in entries)


def _named(kind: str, secrets: Sequence[str], rights: frozenset[Right]) -> dict[str, Key]:
    keys = {}
    for number, secret in enumerate(secrets, 1):
        name = f"{kind}-{number}"
        permit = Permit(name=name, tenant="", namespace="", rights=rights)
        keys[name] = Key(digest=_digest(secret, name), permit=permit)
    return keys


def _rights(*, metrics: bool = False, admin: bool = False) -> frozenset[Right]:
    if admin:
        return EVERYTHING
    return frozenset(("open", "use", "metrics") if metrics else ("open", "use"))


def _key_of(entry: _Entry, file: Path) -> Key:
    where = f"keys file {file}, key {entry.name!r}"
    if (entry.key is None) == (entry.sha256 is None):
        raise ConfigError(f"{where}: give either key or sha256")
    if not 0 < len(entry.name) <= MAX_TENANT_CHARACTERS:
        raise ConfigError(f"{where}: a name has 1 to {MAX_TENANT_CHARACTERS} characters")
    tenant = entry.name if entry.tenant is None else entry.tenant
    if len(tenant) > MAX_TENANT_CHARACTERS:
        raise ConfigError(f"{where}: tenant has more than {MAX_TENANT_CHARACTERS} characters")
    for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
        value = getattr(entry, name)
        if value is not None and value < 1:
            raise ConfigError(f"{where}: {name} must be at least 1, not {value}")
    return Key(
        digest=_digest(entry.key, where)
        if entry.key is not None
        else _hash(entry.sha256 or "", where),
        permit=Permit(
            name=entry.name,
            tenant=tenant,
            namespace=tenant if entry.namespace is None else entry.namespace,
            highest_priority=entry.highest_priority,
            rights=_rights(metrics=entry.metrics, admin=entry.admin),
        ),
        quota=Quota(
            requests_per_minute=entry.requests_per_minute,
            tokens_per_minute=entry.tokens_per_minute,
            max_concurrent=entry.max_concurrent,
        ),
    )


def _digest(secret: str, where: str) -> bytes:
    if not secret or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError(f"{where}: a key is made of letters, digits and signs, without spaces")
    return sha256(secret.encode()).digest()


def _hash(text: str, where: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != sha256().digest_size:
        raise ConfigError(f"{where}: sha256 must be 64 hexadecimal digits")
    return digest
