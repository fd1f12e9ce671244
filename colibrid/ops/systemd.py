"""The service side of sd_notify(3), without a dependency.

Reads NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID, LISTEN_FDS and LISTEN_PID, the only environment variables read outside config/environment.
Sending never blocks and never fails: a daemon without systemd behaves the same.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Self

from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_PASSED = 3
_MAX_PASSED = 64


class Notifier:
    """Owner of the notification socket; does nothing when the process was not started by a service manager."""

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        """`address`: a path, or "@name" in the abstract namespace. `watchdog_s`: ping more often than this."""
        self.watchdog_s = watchdog_s
        self._socket: socket.socket | None = None
        if not address or address[0] not in "/@":
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            connection.connect("\0" + address[1:] if address[0] == "@" else address)
        except OSError:
            connection.close()
        else:
            self._socket = connection

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The manager's socket and watchdog of this process."""
        source = os.environ if environ is None else environ
        microseconds = source.get("WATCHDOG_USEC", "")
        meant_for_us = source.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_s = int(microseconds) / 1e6 if microseconds.isdecimal() and meant_for_us else None
        return cls(source.get("NOTIFY_SOCKET"), watchdog_s or None)

    @property
    def active(self) -> bool:
        """True iff a manager listens."""
        return self._socket is not None

    def ready(self, status: str) -> None:
        """Requests are served from now on."""
        self._send("READY=1", f"STATUS={_line(status)}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={_line(status)}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={_line(status)}")

    def extend_timeout(self, seconds: float) -> None:
        """Start, stop or the watchdog may take `seconds` more from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def watchdog(self) -> None:
        """Tell the manager that all is well."""
        self._send("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send("\n".join(lines).encode("utf-8", "replace"))
        except OSError:  # full or gone: the next ping comes soon, and serving does not depend on it
            return


def passed_sockets(environ: Mapping[str, str] | None = None) -> list[socket.socket]:
    """Listening sockets that the service manager has opened for this process (sd_listen_fds(3)); the caller closes them.

    ConfigError for a descriptor that is not one.
    """
    source = os.environ if environ is None else environ
    count = source.get("LISTEN_FDS", "")
    if source.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return []
    return [
        _passed_socket(descriptor) for descriptor in range(_FIRST_PASSED, _FIRST_PASSED + min(int(count), _MAX_PASSED))
    ]


def _passed_socket(descriptor: int) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        found = socket.socket(fileno=descriptor)
        listens = found.type == socket.SOCK_STREAM and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        listens = False
    if not listens:
        raise ConfigError(
            f"the service manager passed descriptor {descriptor}, which is no listening stream socket; use ListenStream="
            " and Accept=no in the socket unit"
        )
    found.setblocking(False)
    return found


def _line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)[:200]
