"""Server-sent events: one writer of one stream.

Whatever tokens arrived since the last write go out as one event, so a slow reader costs events, not memory. While it is
behind, its text goes on being taken from the engine up to HELD_BYTES, so that it does not hold a slot for longer than
others do; then the generator waits for the socket, and the engine's ring waits for the generator.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

import msgspec
from aiohttp import web

from colibrid.http.errors import error_object
from colibrid.http.limits import CROWDED_WRITE_S
from colibrid.http.sending import ReaderLeftError, connection_of, reader

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

    __slots__ = ("_chunked", "_connection", "_ping_s", "_pinger", "_request", "_written", "response")

    def __init__(self, request: web.Request, ping_s: float) -> None:
        self._request = request
        self._connection = connection_of(request)
        self._ping_s = ping_s
        self._pinger: asyncio.Task[None] | None = None
        self._written = False  # since the last ping was due
        self._chunked = False
        self.response = web.StreamResponse(headers=_HEADERS)

    async def __aenter__(self) -> Self:
        with reader():
            writer = await self.response.prepare(self._request)
        if writer is not None:
            writer.send_headers()
        self._chunked = "Transfer-Encoding" in self.response.headers  # else the connection's end is the stream's
        self._pinger = asyncio.create_task(self._ping())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_pings()
        if self._pinger is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._pinger

    @property
    def behind(self) -> bool:
        """The reader has not taken what it was sent: what comes next should wait."""
        return self._connection.writing_paused

    async def send(self, events: bytes) -> None:
        """Writes whole events, and waits while the reader is behind. Raises ReaderLeftError when it has gone."""
        self.push(events)
        if self.behind:
            await self.room()

    def push(self, events: bytes) -> None:
        """Hands whole events to the socket, which response.write() does in three times the time."""
        self._written = True
        transport = self._connection.transport
        if transport is None or transport.is_closing():
            raise ReaderLeftError
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)

    async def room(self, within_s: float | None = None) -> bool:
        """Waits while the reader is behind, or so long; whether it has caught up."""
        with reader():
            return await self._connection.room(within_s)

    def cut_off(self) -> None:
        """Ends the connection of a reader that is behind. Raises ReaderLeftError."""
        self._connection.cut_off(CROWDED_WRITE_S)
        raise ReaderLeftError

    async def finish(self) -> None:
        """The good end."""
        self._stop_pings()
        await self._close(_DONE)

    async def fail(self, error: RequestError) -> None:
        """The bad end: an error event, no [DONE], and the connection closes."""
        self._stop_pings()
        self.response.force_close()
        await self._close(event(msgspec.json.encode(error_object(error))))

    def _stop_pings(self) -> None:
        if self._pinger is not None:
            self._pinger.cancel()

    async def _close(self, last: bytes) -> None:
        with reader():
            await self._connection.room()
            await self.response.write_eof(last)

    async def _ping(self) -> None:
        with contextlib.suppress(ReaderLeftError):  # the writer of text will find out by itself
            while True:
                await asyncio.sleep(self._ping_s)
                if not self._written and not self.behind:
                    await self.send(_PING)
                self._written = False


def event(data: bytes) -> bytes:
    """One event that carries `data`, which must have no line break."""
    return b"data: " + data + b"\n\n"
