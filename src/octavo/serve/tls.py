"""TLS: a certificate and its key, which may be exchanged while the server runs."""

import ssl
from pathlib import Path

from octavo.errors import ConfigError


class Certificate:
    """Files of a certificate chain and its private key, which may be one; `context` has them.

    Raises   ConfigError: they cannot be used.
    """

    def __init__(self, chain: Path, key: Path | None) -> None:
        self._chain = chain
        self._key = key
        self.context = self._read()

    def reload(self) -> None:
        """Let connections from now on see what the files hold now.

        Raises   ConfigError: they cannot be used; nothing has changed.
        """
        self._read()  # a pair that does not match must not reach the context in use
        self.context.load_cert_chain(self._chain, self._key, _no_password)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._chain, self._key, _no_password)
        except (OSError, ValueError) as error:  # an ssl.SSLError is one
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            beside = "" if self._key is None else f" with key {self._key}"
            raise ConfigError(
                f"the certificate {self._chain}{beside} cannot be used: {reason}; it must be PEM,"
                " its key without a password"
            ) from error
        return context


def _no_password() -> str:
    """Nobody is there to be asked for one."""
    return ""
