"""Prompts computed ahead, so that the prefix cache has them: `--warm FILE`.

A line of the file is a JSON string, or the JSON body of a completion or a chat; its cache fields
are honoured. Where there are API keys it is computed for each namespace, or for the one that stands
in its field `namespace`.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from octavo.engine.door import Ticket
from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.serve.cache import tickets_of
from octavo.serve.keys import Permit
from octavo.serve.requests import capped
from octavo.serve.service import Service

logger = logging.getLogger(__name__)

BEHIND = 2**30
"""The priority of prompts that are computed again, after all that was asked for."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one line asks for. `where` names it."""

    where: str
    body: bytes
    namespace: str | None = None


def read_prompts(file: Path) -> tuple[Prompt, ...]:
    """The prompts of a file; empty lines are none.

    Raises   ConfigError naming the line.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the prompts file {file}: {error.strerror}") from error
    prompts = [
        _prompt(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"the prompts file {file} has no prompt")
    return tuple(prompts)


def _prompt(line: bytes, where: str) -> Prompt:
    try:
        content = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: expected JSON: {error}") from error
    if isinstance(content, str):
        content = {"prompt": content}
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected a JSON string or an object")
    namespace = content.pop("namespace", None)
    if not isinstance(namespace, str | None):
        raise ConfigError(f"{where}: namespace must be a string")
    return Prompt(where, msgspec.json.encode(content), namespace)


class Warming:
    """Computes prompts, one after the other, so that those that begin alike share it.

    Raises   ConfigError naming the line of a prompt that cannot be computed here.
    """

    def __init__(self, service: Service, prompts: Sequence[Prompt]) -> None:
        self._service = service
        self._prompts = prompts
        self._running: asyncio.Task[None] | None = None
        for prompt in prompts:
            self._tickets(prompt)

    @property
    def prompts(self) -> int:
        return len(self._prompts)

    async def run(self) -> None:
        """Returns when all are computed; one that cannot be is logged and left out."""
        for prompt in self._prompts:
            try:
                for ticket in self._tickets(prompt):
                    async with aclosing(self._service.client.stream(ticket)) as items:
                        async for _ in items:
                            pass
            except OctavoError as error:
                logger.warning("%s was not preloaded: %s", prompt.where, error)

    def again(self) -> None:
        """The engine is another one, whose cache is empty: begin anew, behind what is under way."""
        if self._running is not None:
            self._running.cancel()
        self._running = asyncio.ensure_future(self.run())

    def _tickets(self, prompt: Prompt) -> list[Ticket]:
        try:
            return [
                _stamped(ticket, namespace)
                for namespace in self._namespaces(prompt)
                for ticket in tickets_of(self._service, prompt.body)
            ]
        except RequestError as error:
            raise ConfigError(f"{prompt.where}: {error}") from error

    def _namespaces(self, prompt: Prompt) -> Sequence[str | None]:
        keyring = self._service.settings.keyring
        if prompt.namespace is None:
            return (None,) if keyring is None else keyring.namespaces
        if keyring is None or prompt.namespace not in keyring.namespaces:
            raise ConfigError(f"{prompt.where}: no API key has the namespace {prompt.namespace!r}")
        return (prompt.namespace,)


def _stamped(ticket: Ticket, namespace: str | None) -> Ticket:
    """The least that computes the prompt: one token of an answer."""
    request = Permit(namespace=namespace).stamped(ticket.request)
    return capped(replace(ticket, request=replace(request, priority=BEHIND)), 1)
