"""Binding the addresses before anything expensive is done."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from colibrid.errors import ColibridError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import ExitStack

    from colibrid.config.settings import ServerSettings

_MAX_PATH_BYTES = 107  # of a socket: the kernel's limit
_MAX_PORT = 65535
_PATH = "unix:"
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})")


class AddressTakenError(ColibridError):
    """Another process listens there. It may go away, so this is not an error of the configuration."""


def open_sockets(
    server: ServerSettings, passed: Sequence[socket.socket], stack: ExitStack
) -> tuple[socket.socket, ...]:
    """Listening sockets for all that `server` names and the service manager has passed; `stack` closes them.

    Raises as bind and bind_path do.
    """
    for one in passed:
        stack.callback(one.close)
    if server.listen is None:
        return tuple(passed) or (stack.enter_context(bind(server.host, server.port)),)
    mode = int(server.socket_mode, 8)
    return (*passed, *(_open_entry(entry, mode, stack) for entry in server.listen))


def host_of(listening: socket.socket) -> str | None:
    """The address that a TCP socket is bound to; None for a path."""
    return None if listening.family == socket.AF_UNIX else str(listening.getsockname()[0])


def _open_entry(entry: str, mode: int, stack: ExitStack) -> socket.socket:
    if entry.startswith(_PATH):
        return stack.enter_context(bind_path(entry.removeprefix(_PATH), "server.listen", mode))
    found = _ADDRESS.fullmatch(entry)
    if found is None or int(found["port"]) > _MAX_PORT:
        raise ConfigError(
            f"server.listen: {entry!r} is no address; write host:port, [IPv6 address]:port or unix:PATH, with a port to"
            f" {_MAX_PORT}"
        )
    return stack.enter_context(bind(found["v6"] or found["host"], int(found["port"]), "server.listen"))


def bind(host: str, port: int, setting: str = "server.host") -> socket.socket:
    """A listening socket, not yet accepted from; port 0 takes any free one. The caller closes it.

    AddressTakenError if the port is in use; ConfigError if the address is not one of this machine or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"{setting} {host!r} is not an address or a known name; use 127.0.0.1 or 0.0.0.0") from None
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


@contextlib.contextmanager
def bind_path(path: str, setting: str, mode: int = 0o600) -> Iterator[socket.socket]:
    """A listening socket at `path`, which `mode` says who may connect to; the file is removed at the end.

    What a daemon that was killed left there is replaced. AddressTakenError if another one listens; ConfigError, which
    names `setting`, if something else is in the way or the place is not writable.
    """
    place = Path(path)
    if not 0 < len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        raise ConfigError(
            f"{setting} has {len(os.fsencode(path))} bytes, a socket's path at most {_MAX_PATH_BYTES}; take a shorter one"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as listening:
        try:
            _remove_stale(place, setting)
            before = os.umask(0o777 & ~mode)  # no moment at which others may connect; nothing else makes files here yet
            try:
                listening.bind(path)
            finally:
                os.umask(before)
            made = place.lstat()
        except OSError as error:
            raise ConfigError(f"{setting} {path} cannot be made: {error.strerror}; choose another path") from None
        try:
            listening.listen()
            yield listening
        finally:
            _remove_own(place, made)


def _remove_stale(place: Path, setting: str) -> None:
    try:
        found = place.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{setting} {place} is there and no socket; remove it, or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(place))
        except ConnectionRefusedError:
            place.unlink()
            return
        except BlockingIOError:
            pass  # it listens, and accepts nobody just now
    raise AddressTakenError(f"{setting} {place} is in use by another process; stop it, or choose another path")


def _remove_own(place: Path, made: os.stat_result) -> None:
    """Unless another daemon has replaced it."""
    with contextlib.suppress(FileNotFoundError):
        found = place.lstat()
        if (found.st_dev, found.st_ino) == (made.st_dev, made.st_ino):
            place.unlink()
