"""Binding the address before anything expensive is done."""

from __future__ import annotations

import errno
import socket

from colibrid.errors import ColibridError, ConfigError


class AddressTakenError(ColibridError):
    """Another process listens there. It may go away, so this is not an error of the configuration."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, not yet accepted from; port 0 takes any free one. The caller closes it.

    AddressTakenError if the port is in use; ConfigError if the address is not one of this machine or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"server.host {host!r} is not an address or a known name; use 127.0.0.1 or 0.0.0.0") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # of a name with both, IPv4
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        listening.bind(address)
        # Two sockets may share an address until one listens; so find out now.
        listening.listen()
    except OSError as error:
        listening.close()
        raise _explained(error, host, port) from None
    return listening


def _explained(error: OSError, host: str, port: int) -> ColibridError:
    if error.errno == errno.EADDRINUSE:
        return AddressTakenError(f"{host}:{port} is in use by another process; stop it, or choose another --port")
    if error.errno == errno.EACCES:
        return ConfigError(f"server.port {port} needs privileges; choose one from 1024 on")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"server.host {host} is not an address of this machine; use 127.0.0.1 or 0.0.0.0")
    return ConfigError(f"{host}:{port} cannot be bound: {error.strerror}; choose another --host or --port")
