"""Writing to a client that may be slow, or gone: no more is handed to the socket than it takes. The connection cuts a
client off that does not catch up.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from aiohttp import web

from colibrid.http.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SLICE = 16 << 10  # bytes handed over at once


class ReaderLeftError(Exception):
    """The client has closed the connection, or was cut off."""


def connection_of(request: web.Request) -> Connection:
    """What `request` has come over."""
    connection = request.protocol
    assert isinstance(connection, Connection), "the runner makes them"
    return connection


async def send_json(request: web.Request, pieces: Sequence[bytes]) -> web.StreamResponse:
    """The answer made of `pieces`, sent already when it is large. Raises ReaderLeftError."""
    length = sum(map(len, pieces))
    if length <= _SLICE:
        return web.Response(body=b"".join(pieces), content_type="application/json")
    response = web.StreamResponse()
    response.content_type, response.content_length = "application/json", length
    connection = connection_of(request)
    with reader():
        await response.prepare(request)
        for piece in pieces:
            for start in range(0, len(piece), _SLICE):
                await response.write(piece[start : start + _SLICE])
                await connection.room()
        await response.write_eof()
    return response


@contextlib.contextmanager
def reader() -> Iterator[None]:
    """Turns what sockets say of a reader that has gone into ReaderLeftError."""
    try:
        yield
    except ConnectionError as error:
        raise ReaderLeftError from error
