"""Server-sent events: one writer of one stream.

Whatever tokens arrived since the last write go out as one event, so a slow reader costs events, not memory: the
generator waits for the socket, and the engine's ring waits for the generator.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

import msgspec
from aiohttp import web

from colibrid.http.errors import error_object
from colibrid.http.sending import ReaderLeftError, reader, write

if TYPE_CHECKING:
    from types import TracebackType

    from colibrid.errors import RequestError

_PING = b": ping\n\n"
_DONE = b"data: [DONE]\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """One open response. Use as a context manager; `send` may be called by several tasks."""

    def __init__(self, request: web.Request, ping_s: float) -> None:
        self._request = request
        self._ping_s = ping_s
        self._pinger: asyncio.Task[None] | None = None
        self._written = False  # since the last ping was due
        self.response = web.StreamResponse(headers=_HEADERS)

    async def __aenter__(self) -> Self:
        with reader():
            await self.response.prepare(self._request)
        self._pinger = asyncio.create_task(self._ping())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_pings()
        if self._pinger is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._pinger

    async def send(self, events: bytes) -> None:
        """Writes whole events. Raises ReaderLeftError when the reader has gone or takes nothing."""
        self._written = True
        await write(self._request, self.response, events)

    async def finish(self) -> None:
        """The good end."""
        self._stop_pings()
        await self.send(_DONE)
        await self._close()

    async def fail(self, error: RequestError) -> None:
        """The bad end: an error event, no [DONE], and the connection closes."""
        self._stop_pings()
        self.response.force_close()
        await self.send(event(msgspec.json.encode(error_object(error))))
        await self._close()

    def _stop_pings(self) -> None:
        if self._pinger is not None:
            self._pinger.cancel()

    async def _close(self) -> None:
        with reader():
            await self.response.write_eof()

    async def _ping(self) -> None:
        with contextlib.suppress(ReaderLeftError):  # the writer of text will find out by itself
            while True:
                await asyncio.sleep(self._ping_s)
                if not self._written:
                    await self.send(_PING)
                self._written = False


def event(data: bytes) -> bytes:
    """One event that carries `data`, which must have no line break."""
    return b"data: " + data + b"\n\n"
