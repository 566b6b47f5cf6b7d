"""API keys: who may do what here.

    a key ──▶ Permit: its tenant, the part of the cache that is its own, what it may ask for
          └─▶ Meter: what it has used of its quota

Only hashes are kept. A request names its key in a header; it is compared with all of them, in the
same time whichever it is. Without keys everybody may do everything.
"""

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Literal

from octavo.core.request import Request
from octavo.engine.params import SamplingParams
from octavo.errors import ConfigError, Forbidden
from octavo.serve.quota import NO_LIMITS, Meter, Quota

Right = Literal["open", "use", "metrics", "admin"]
"""`open` needs no key, `use` any, `metrics` and `admin` one that has this right."""

EVERYTHING: frozenset[Right] = frozenset(("open", "use", "metrics", "admin"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """What a request may do.

    It comes for `tenant` (None: for whom it says), finds in the prefix cache what came under the
    same `namespace` (None: all that has its salt), and its priority is no lower than
    `highest_priority`, where lower goes first.
    """

    name: str = ""
    tenant: str | None = None
    namespace: str | None = None
    highest_priority: int | None = None
    rights: frozenset[Right] = EVERYTHING

    def defaults(self, params: SamplingParams) -> SamplingParams:
        """What holds for a request that leaves it open."""
        tenant = params.tenant if self.tenant is None else self.tenant
        priority = params.priority
        if self.highest_priority is not None:
            priority = max(priority, self.highest_priority)
        return params.but(tenant=tenant, priority=priority)

    def stamped(self, request: Request) -> Request:
        """The request as it goes to the engine.

        Raises   Forbidden naming the field: it speaks for another tenant, or goes first too much.
        """
        if self.tenant is not None and request.tenant != self.tenant:
            raise Forbidden(
                f"this key is for the tenant {self.tenant!r}, not for {request.tenant!r};"
                " leave tenant out",
                param="tenant",
            )
        if self.highest_priority is not None and request.priority < self.highest_priority:
            raise Forbidden(
                f"this key has no priority before {self.highest_priority}, and asks for"
                f" {request.priority}",
                param="priority",
            )
        if self.namespace is None:
            return request
        # With its length: no salt of one namespace can spell another.
        salt = f"{len(self.namespace)}:{self.namespace}{request.salt}"
        return replace(request, salt=salt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """`digest` is the SHA-256 of the secret, which nothing else is kept of."""

    digest: bytes = field(repr=False)
    permit: Permit
    quota: Quota = NO_LIMITS


@dataclass(frozen=True, slots=True)
class Visit:
    """A request with its permit, and the meter of its key if it came with one."""

    permit: Permit = Permit()
    meter: Meter | None = None

    def spend(self, tokens: int) -> None:
        if self.meter is not None:
            self.meter.spend(tokens)


class Keyring:
    """The keys in force, and what each has used."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys: tuple[Key, ...] = ()
        self._meters: dict[str, Meter] = {}
        self.exchange(keys)

    def exchange(self, keys: Sequence[Key]) -> None:
        """Let these be in force from now on. Who stays, with an equal quota, has used what it had.

        Raises   ConfigError: two have one name, or are the same.
        """
        names = [key.permit.name for key in keys]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two API keys have the name {name!r}; give each its own")
        if len({key.digest for key in keys}) < len(keys):
            raise ConfigError("two API keys are the same; give each tenant its own")
        kept = {name: meter for name, meter in self._meters.items() if name in names}
        self._meters = {}
        for key in keys:
            old = kept.get(key.permit.name)
            same = old is not None and old.quota == key.quota
            self._meters[key.permit.name] = (
                old if old is not None and same else Meter(key.permit.name, key.quota)
            )
        self._keys = tuple(keys)

    @property
    def namespaces(self) -> tuple[str | None, ...]:
        """Each part of the cache that some key uses, once."""
        return tuple(dict.fromkeys(key.permit.namespace for key in self._keys))

    def find(self, offered: Iterable[bytes]) -> Visit | None:
        """The visit of the first secret that is a key here; each is compared with every key."""
        found: Key | None = None
        for secret in offered:
            digest = sha256(secret).digest()
            for key in self._keys:
                if hmac.compare_digest(digest, key.digest):
                    found = found or key
        return None if found is None else Visit(found.permit, self._meters[found.permit.name])


def offered(headers: Iterable[tuple[bytes, bytes]]) -> Sequence[bytes]:
    """The secrets that a request brings, as OpenAI's and as Anthropic's clients send them.

    >>> offered([(b"authorization", b"Bearer a"), (b"x-api-key", b"b")])
    [b'a', b'b']
    """
    secrets = []
    for name, value in headers:
        if name == b"x-api-key":
            secrets.append(value.strip())
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            secrets.append(value[7:].strip())
    return secrets
