"""Writing to a client that may be slow, or gone: no more is handed to the socket than it takes, and a client that takes
nothing for WRITE_TIMEOUT_S is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from aiohttp import web

from colibrid.http.limits import WRITE_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SLICE = 256 << 10  # bytes handed over at once: a fraction of a millisecond


class ReaderLeftError(Exception):
    """The client has closed the connection, or was cut off."""


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Writes `data`, at most a few slices, and waits for room. Raises ReaderLeftError."""
    try:
        with reader():
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await response.write(data)
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ReaderLeftError from error


async def send_json(request: web.Request, pieces: Sequence[bytes]) -> web.StreamResponse:
    """The answer made of `pieces`, sent already when it is large. Raises ReaderLeftError."""
    length = sum(map(len, pieces))
    if length <= _SLICE:
        return web.Response(body=b"".join(pieces), content_type="application/json")
    response = web.StreamResponse()
    response.content_type, response.content_length = "application/json", length
    with reader():
        await response.prepare(request)
    for piece in pieces:
        for start in range(0, len(piece), _SLICE):
            await write(request, response, piece[start : start + _SLICE])
    with reader():
        await response.write_eof()
    return response


@contextlib.contextmanager
def reader() -> Iterator[None]:
    """Turns what sockets say of a reader that has gone into ReaderLeftError."""
    try:
        yield
    except ConnectionError as error:
        raise ReaderLeftError from error
