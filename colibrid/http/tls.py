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
        _load(context, cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"server.tls_cert_file {cert} and server.tls_key_file {key} cannot be used: {_reason(error)}; give a chain and"
            " its key as PEM, without a password"
        ) from None
    return context


def renew_tls(context: ssl.SSLContext, settings: ServerSettings) -> None:
    """Use the files' present contents for connections to come. Call when `make_tls` has accepted them."""
    assert settings.tls_cert_file is not None, "TLS is not switched off by a reload"
    assert settings.tls_key_file is not None, "see above"
    _load(context, settings.tls_cert_file, settings.tls_key_file)


def _load(context: ssl.SSLContext, cert: str, key: str) -> None:
    context.load_cert_chain(cert, key, password=lambda: "")  # else a key with a password would ask on a terminal


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not PEM"
    return error.strerror or type(error).__name__
