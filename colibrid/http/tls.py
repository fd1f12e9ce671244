"""TLS on the TCP listeners, from a certificate and its key in files."""

from __future__ import annotations

import ssl
import weakref
from typing import TYPE_CHECKING, Any

from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from colibrid.config.settings import ServerSettings
    from colibrid.http.gate import Gate


class ServerContext(ssl.SSLContext):
    """Begins no more handshakes than a gate lets it: who connects and then says nothing holds a descriptor, too."""

    gate: Gate | None = None  # None: as many as come
    _under_way: weakref.WeakSet[ssl.SSLObject]

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Called for each connection when it is accepted. ConnectionError closes it."""
        if self.gate is None:
            return super().wrap_bio(*arguments, **options)
        for one in [one for one in self._under_way if one.version() is not None]:  # has become a connection
            self._under_way.discard(one)
        if not self.gate.may_begin(len(self._under_way)):
            raise ConnectionAbortedError("too many connections")
        made = super().wrap_bio(*arguments, **options)
        self._under_way.add(made)
        return made

    def bound(self, gate: Gate) -> None:
        """From now on `gate` decides."""
        self.gate, self._under_way = gate, weakref.WeakSet()


def make_tls(settings: ServerSettings) -> ServerContext | None:
    """A context for servers; None where the settings name no files. ConfigError names what cannot be used."""
    cert, key = settings.tls_cert_file, settings.tls_key_file
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing = "server.tls_cert_file" if cert is None else "server.tls_key_file"
        raise ConfigError(f"{missing} is not set, and TLS needs a certificate and its key; set both or neither")
    context = ServerContext(ssl.PROTOCOL_TLS_SERVER)
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

    def __init__(self, context: ServerContext) -> None:
        self.listening = context
        self._current: ssl.SSLContext = context
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
