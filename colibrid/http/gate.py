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
        self.refused = 0  # connections that were not let in
        self._by_address: dict[str, int] = {}

    @property
    def open(self) -> int:
        """Connections that count now."""
        return self._open

    def enter(self, address: str) -> bytes | None:
        """None, and the connection counts until `leave`; else an answer for it, and it does not count."""
        if self._open >= self.most:
            self.refused += 1
            error: RequestError = OverloadedError(
                f"This server has {self.most} connections, as many as it takes; try again shortly.",
                code="server_is_overloaded",
                retry_after_s=_RETRY_S,
            )
            return _answer(error)
        from_there = self._by_address.get(address, 0)
        if self._most_of_one is not None and from_there >= self._most_of_one:
            self.refused += 1
            error = RateLimitError(
                f"{from_there} connections from your address are open, and it may have {self._most_of_one}; close some.",
                retry_after_s=_RETRY_S,
            )
            return _answer(error)
        self._open += 1
        self._by_address[address] = from_there + 1
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
