"""What stands between a server and the world: keys, certificate, bounds."""

import logging
import re
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.serve.keyfile import keys_of
from octavo.serve.keys import Key, Keyring
from octavo.serve.origins import check_origins
from octavo.serve.protocol import BoundedProtocol, Bounds
from octavo.serve.tls import Certificate

logger = logging.getLogger(__name__)

OTHER_FILES = 128
"""What a server has open beside its connections, at most."""


class Protection:
    """`keyring` is None where there are no keys, `certificate` where there is no TLS.

    Raises   ConfigError: a file cannot be used, or a setting is none of its kind.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_origins(config.allowed_origins)
        _check_root(config.root_path)
        _allow_files(config.max_connections)
        self._config = config
        self.keyring = Keyring(keys) if (keys := _keys(config)) else None
        self.certificate = _certificate(config)

    @property
    def scheme(self) -> str:
        return "http" if self.certificate is None else "https"

    @property
    def has_files(self) -> bool:
        """Whether there is anything to read again."""
        return self.certificate is not None or self._config.api_key_file is not None

    def reload(self) -> None:
        """Read the files again; one that cannot be used leaves what holds."""
        if self.certificate is not None:
            _attempt("certificate", self.certificate.reload)
        if self.keyring is not None:
            _attempt("API keys", partial(_exchange, self.keyring, self._config))

    def http_config(self, app: Any, **others: Any) -> uvicorn.Config:
        """uvicorn's settings, with all this in force for `app`."""
        bounds = Bounds(
            connections=self._config.max_connections, receive_s=self._config.receive_timeout
        )
        config = uvicorn.Config(
            app,
            http=partial(BoundedProtocol, bounds=bounds),  # type: ignore[arg-type]
            ws="none",
            root_path=self._config.root_path or "",
            timeout_keep_alive=round(self._config.keep_alive_timeout),
            log_config=None,
            lifespan="off",
            **others,
        )
        config.load()
        config.ssl = None if self.certificate is None else self.certificate.context
        return config


def _keys(config: EngineConfig) -> tuple[Key, ...]:
    file = None if config.api_key_file is None else Path(config.api_key_file)
    return keys_of(config.api_key, config.admin_api_key, file)


def _exchange(keyring: Keyring, config: EngineConfig) -> None:
    keyring.exchange(_keys(config))


def _attempt(what: str, read: Callable[[], None]) -> None:
    try:
        read()
    except ConfigError as error:
        logger.error("%s not read again, what was read before holds: %s", what, error)
    else:
        logger.info("%s read again", what)


def _certificate(config: EngineConfig) -> Certificate | None:
    chain, key = config.ssl_certfile, config.ssl_keyfile
    if chain is None:
        if key is not None:
            raise ConfigError("ssl_keyfile is the key of no certificate; give ssl_certfile too")
        return None
    return Certificate(Path(chain), None if key is None else Path(key))


def _check_root(path: str | None) -> None:
    if path is not None and not re.fullmatch(r"(/[\w.~-]+)+", path, re.ASCII):
        raise ConfigError(f"root_path: expected a path such as /llm, got {path!r}")


def _allow_files(connections: int) -> None:
    """Each connection is an open file, of which the system grants some and lets us ask for more.

    Raises   ConfigError: it grants too few.
    """
    needed = connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"max_connections {connections} needs {needed} open files, and the system grants fewer"
            f" ({hard}); lower it, or raise that (ulimit -Hn)"
        ) from error
