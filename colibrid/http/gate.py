"""How many clients may be connected, in all and from one address. What is beyond gets one answer and is closed."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import msgspec

from colibrid.errors import OverloadedError, RequestError
from colibrid.http.errors import RateLimitError, error_headers, error_object

if TYPE_CHECKING:
    from colibrid.config.settings import LimitsSettings

_RETRY_S = 1.0
_RESERVED = 64  # descriptors for everything but clients
_TOLD = 16  # of those, for clients that are told that there is no room
_REASONS = {503: "Service Unavailable", 429: "Too Many Requests"}


class Gate:
    """Owner of the count of connections. Lives on one event loop."""

    def __init__(self, limits: LimitsSettings, descriptors: int | None = None) -> None:
        """`descriptors`: that the process may have; default: as the system says."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if descriptors is None else descriptors
        self.most = limits.connections
        if most != resource.RLIM_INFINITY:
            self.most = max(1, min(self.most, most - _RESERVED))
        self._most_of_one = limits.connections_per_address
        self._open = 0
        self._telling = 0
        self.refused = 0  # connections that were not let in
        self._by_address: dict[str, int] = {}

    @property
    def open(self) -> int:
        """Connections that count now."""
        return self._open

    def enter(self, address: str) -> bytes | None:
        """None, and the connection counts until `leave`; else an answer for it, and it does not count."""
        error = self._error(address)
        if error is None:
            self._count(address)
            return None
        self.refused += 1
        return _answer(error)

    def may_begin(self, under_way: int) -> bool:
        """True iff there is a descriptor for one more that begins TLS beside so many; a few more than may be open, which
        are told so over TLS. False: it is to be closed.
        """
        free = self._open + under_way < self.most + _TOLD
        self.refused += not free
        return free

    def tell(self) -> bool:
        """True: there is time to tell one without room so, until `told`; False: too many are being told, close it."""
        if self._telling >= _TOLD:
            return False
        self._telling += 1
        return True

    def told(self) -> None:
        """One has been told, or is gone."""
        self._telling -= 1

    def _count(self, address: str) -> None:
        self._open += 1
        self._by_address[address] = self._by_address.get(address, 0) + 1

    def _error(self, address: str) -> RequestError | None:
        if self._open >= self.most:
            return OverloadedError(
                f"This server has {self.most} connections, as many as it takes; try again shortly.",
                code="server_is_overloaded",
                retry_after_s=_RETRY_S,
            )
        from_there = self._by_address.get(address, 0)
        if self._most_of_one is not None and from_there >= self._most_of_one:
            return RateLimitError(
                f"{from_there} connections from your address are open, and it may have {self._most_of_one}; close some.",
                retry_after_s=_RETRY_S,
            )
        return None

    def leave(self, address: str) -> None:
        """A connection that counted is closed."""
        self._open -= 1
        left = self._by_address.pop(address) - 1
        if left:
            self._by_address[address] = left


def _answer(error: RequestError) -> bytes:
    """The whole of an HTTP answer that needs no request."""
    body = msgspec.json.encode(error_object(error))
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **error_headers(error),
        "Server": "colibrid",
        "Connection": "close",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} {_REASONS[error.status]}\r\n{lines}\r\n".encode() + body
