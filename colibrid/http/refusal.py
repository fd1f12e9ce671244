"""Saying no quickly: while the queue is full, requests for a slot are answered before anything is made of them.

A refusal by way of routes, middleware and log line costs as much as any small answer; with ten times more requests than
the engine can serve they would take the processor from those that are served. So what is said is made once and kept for a
moment, sent as it is, and counted: the log has one line a second that says how many. Everything else, and all that is
not an ordinary request on a connection that stays open, takes the usual way, which refuses in the same words.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import structlog
from aiohttp import web

from colibrid.errors import OverloadedError
from colibrid.http.context import request_id
from colibrid.http.errors import error_headers, error_object

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.abc import AbstractStreamWriter

    from colibrid.batch.interfaces import GenerationService
    from colibrid.http.served import Served

    RawHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_KEPT_S = 0.02  # the queue is looked at so often
_LOG_S = 1.0
_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Refusals:
    """Owner of what is said now, and of how often it was. Lives on one event loop."""

    def __init__(self, scheduler: GenerationService, paths: frozenset[str], served: Served) -> None:
        """`paths`: of the routes whose POST requests wait for slots. `served` counts, too."""
        self.count = 0  # requests refused here
        self._scheduler = scheduler
        self._paths = paths
        self._served = served
        self._said: tuple[bytes, bytes] | None = None  # before and after a request's id; None: there is room
        self._until = 0.0  # when the queue is to be looked at again
        self._logged_at = 0.0
        self._logged = 0  # of `count`

    def in_front_of(self, handler: RawHandler) -> RawHandler:
        """The handler of all requests, with this before it."""

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            if request.method == "POST" and request.path in self._paths and _is_plain(request):
                said = self._refusal()
                if said is not None:
                    self._served.overloaded(request.path)
                    return _Sent(request_id(request).encode().join(said))
            return await handler(request)

        return handle

    def _refusal(self) -> tuple[bytes, bytes] | None:
        now = time.monotonic()
        if now >= self._until:
            self._said = self._asked()
            self._until = now + _KEPT_S if self._said is not None else 0.0
        if self._said is not None:
            self.count += 1
            self._log(now)
        return self._said

    def _asked(self) -> tuple[bytes, bytes] | None:
        try:
            self._scheduler.check_room()
        except OverloadedError as error:
            return _parts(error) if error.code == "server_is_overloaded" else None
        return None

    def _log(self, now: float) -> None:
        if now - self._logged_at >= _LOG_S:
            _log.warning("overloaded", refused=self.count - self._logged, total=self.count)
            self._logged_at, self._logged = now, self.count


class _Sent(web.StreamResponse):
    """An answer that is bytes already."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(status=503)
        self._raw = raw

    @property
    def keep_alive(self) -> bool:
        return True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if request.transport is not None:
            request.transport.write(self._raw)
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        assert not data, "it has been sent"


def _is_plain(request: web.BaseRequest) -> bool:
    return request.keep_alive and request.version >= (1, 1) and "Expect" not in request.headers


def _parts(error: OverloadedError) -> tuple[bytes, bytes]:
    body = msgspec.json.encode(error_object(error))
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **error_headers(error),
        "Server": "colibrid",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 503 Service Unavailable\r\n{lines}x-request-id: ".encode(), b"\r\n\r\n" + body
