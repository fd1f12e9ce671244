"""TLS on the TCP listeners, from a certificate and its key in files."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from colibrid.config.settings import ServerSettings


def make_tls(settings: ServerSettings) -> ssl.SSLContext | None:
    """A context for servers; None where the settings name no files. ConfigError names what cannot be used."""
    cert, key = settings.tls_cert_file, settings.tls_key_file
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing = "server.tls_cert_file" if cert is None else "server.tls_key_file"
        raise ConfigError(f"{missing} is not set, and TLS needs a certificate and its key; set both or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # else a key with a password would ask on a terminal
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"server.tls_cert_file {cert} and server.tls_key_file {key} cannot be used: {_reason(error)}; give a chain and"
            " its key as PEM, without a password"
        ) from None
    return context


class Tls:
    """Owner of the context that new connections get, whichever the listeners were opened with."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.listening = context
        self._current = context
        context.sni_callback = self._switch

    def replace(self, context: ssl.SSLContext) -> None:
        """Use `context`, which make_tls has made, for connections to come."""
        self._current = context

    def _switch(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _listening: ssl.SSLContext) -> None:
        """Called with a client's first message, before a certificate is chosen."""
        connection.context = self._current


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not PEM"
    return error.strerror or type(error).__name__
