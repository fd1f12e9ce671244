"""HTTP/1.1 as a load generator needs it: one request after another on a connection, each arrival timed.

A general client costs several times the processor time, which on a small machine is taken from the server measured.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, cast

from colibrid.errors import ColibridError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Mapping

MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 256 << 20
_MOST_DIGITS = 18  # of a number in a head
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")


class WireError(ColibridError):
    """The connection broke, or what came is not HTTP/1.1."""


class StaleError(WireError):
    """The server had closed a kept connection before it saw the request: not a failure, to be sent again."""


def whole_number(text: str) -> int | None:
    """Of a head's field; None: it is none, or none that anybody could mean."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


class ResponseParser:
    """One response, from bytes as they arrive. Pure. WireError: not HTTP, or larger than its limits."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.done = False
        self._buffer = bytearray()
        self._left: int | None = 0  # bytes of body still to come in this piece; None: until the connection ends
        self._chunked = False
        self._total = 0
        self._step: Callable[[], bytes | None] = self._read_head

    @property
    def started(self) -> bool:
        return self.status > 0 or bool(self._buffer)

    @property
    def reusable(self) -> bool:
        """Whether the connection can carry another request after this response."""
        return self.done and self._left is not None and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body that `data` completes, without their framing."""
        self._buffer += data
        body = bytearray()
        while not self.done:
            piece = self._step()
            if piece is None:
                break
            body += piece
        if self.done and self._buffer:
            raise WireError("the server sent bytes after its response")
        self._total += len(body)
        if self._total > MAX_BODY_BYTES:
            raise WireError(f"the response is larger than {MAX_BODY_BYTES} bytes")
        return bytes(body)

    def end(self) -> None:
        """The connection has ended. WireError: in the middle of the response."""
        if self._left is None:
            self.done = True
        elif not self.done:
            raise WireError("the server closed the connection in the middle of a response")

    # Steps return bytes of the body, empty ones for framing, or None when more data is needed.

    def _read_head(self) -> bytes | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise WireError(f"the head of the response is larger than {MAX_HEAD_BYTES} bytes")
            return None
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = first.partition(" ")
        status = whole_number(rest[:3])
        if not version.startswith("HTTP/1.") or status is None or status < 100:
            raise WireError(f"not an HTTP/1.1 response: {first[:60]!r}")
        if status < 200:  # 100 Continue and its like: the response is still to come
            return b""
        self.status = status
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._begin_body()
        return b""

    def _begin_body(self) -> None:
        length = self.headers.get("content-length")
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            self._chunked = True
            self._step = self._read_size
        elif length is not None:
            self._left = whole_number(length)
            if self._left is None:
                raise WireError(f"content-length is {length[:20]!r}")
            self._step = self._read_body
            self.done = self._left == 0
        elif self.status in {204, 304}:
            self.done = True
        else:
            self._left = None
            self._step = self._read_body

    def _read_size(self) -> bytes | None:
        line = self._read_line()
        if line is None:
            return None
        text = line.split(b";")[0].strip()
        if not _CHUNK_SIZE.fullmatch(text):
            raise WireError(f"the size of a chunk is {text[:20]!r}")
        self._left = int(text, 16)
        self._step = self._read_body if self._left else self._read_trailer
        return b""

    def _read_body(self) -> bytes | None:
        if not self._buffer:
            return None
        piece = bytes(self._buffer if self._left is None else self._buffer[: self._left])
        del self._buffer[: len(piece)]
        if self._left is not None:
            self._left -= len(piece)
            if self._left == 0:
                self._step = self._read_chunk_end
                self.done = not self._chunked
        return piece

    def _read_chunk_end(self) -> bytes | None:
        if len(self._buffer) < 2:
            return None
        if self._buffer[:2] != b"\r\n":
            raise WireError("a chunk is longer than its size")
        del self._buffer[:2]
        self._step = self._read_size
        return b""

    def _read_trailer(self) -> bytes | None:
        line = self._read_line()
        if line is None:
            return None
        self.done = not line
        return b""

    def _read_line(self) -> bytes | None:
        """Of a chunk's frame; None: it has not come yet."""
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise WireError(f"a line between chunks is longer than {MAX_HEAD_BYTES} bytes")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line


class EventParser:
    """Server-sent events out of a body that arrives in pieces. Pure."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is complete now; comments and other fields are left out."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time. `sink` gets each piece of a body with its time of arrival."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = ResponseParser()
        self._sink: Callable[[bytes, float], None] | None = None
        self._waiter: asyncio.Future[ResponseParser] | None = None
        self._served = 0

    @classmethod
    async def open(cls, host: str, port: int, tls: ssl.SSLContext | None = None) -> Connection:
        """OSError: nobody listens there, or its certificate is not trusted."""
        _, protocol = await asyncio.get_running_loop().create_connection(cls, host, port, ssl=tls)
        return protocol

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, sink: Callable[[bytes, float], None]) -> ResponseParser:
        """The head of the response, when all of it has come. WireError, StaleError."""
        assert self._waiter is None, "one request at a time"
        if self._transport is None or self._transport.is_closing():
            raise StaleError("the server closed the connection")
        self._parser = ResponseParser()
        self._sink = sink
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waiter
        finally:
            self._waiter = None
            self._served += 1
            if not self._parser.reusable:
                self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is no child of it

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._waiter is None or self._waiter.done() or self._sink is None:
            self.close()  # what nobody asked for
            return
        try:
            body = self._parser.feed(data)
            if body:
                self._sink(body, now)
        except WireError as error:
            self._waiter.set_exception(error)
            return
        if self._parser.done:
            self._waiter.set_result(self._parser)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._waiter is None or self._waiter.done():
            return
        if not self._parser.started and self._served:
            self._waiter.set_exception(StaleError("the server closed the connection"))
            return
        try:
            self._parser.end()
        except WireError as problem:
            self._waiter.set_exception(WireError(f"{problem} ({error})") if error else problem)
        else:
            self._waiter.set_result(self._parser)


def request_bytes(method: str, path: str, host: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """A whole request."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body
