"""One application on its listening sockets, until it is told to end."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from aiohttp import web

from colibrid.http.connection import Connection
from colibrid.http.limits import UNSENT_BYTES, WRITE_TIMEOUT_S
from colibrid.http.origin import UNIX
from colibrid.http.protocol_log import ProtocolLogger

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AsyncExitStack

    from colibrid.http.gate import Gate
    from colibrid.http.refusal import Refusals
    from colibrid.http.tls import ServerContext

KEEP_ALIVE_S = 75.0  # an idle connection is closed after so long
_BACKLOG = 1024  # connections that the kernel accepts ahead of us
_SHUTDOWN_S = 0.5  # for answers under way when everything should have been answered
_HANDSHAKE_S = 10.0  # of TLS
_LINGER_S = 2.0  # how long the rest of a refused body is read and thrown away


async def run_application(
    app: web.Application,
    sockets: Sequence[socket.socket],
    stack: AsyncExitStack,
    *,
    tls: ServerContext | None = None,
    gate: Gate | None = None,
    refusals: Refusals | None = None,
) -> None:
    """Answers on `sockets`, which listen, until `stack` is unwound; `tls` is for those of TCP, `gate` bounds connections,
    `refusals` stand before everything else.

    A request is cancelled when its client leaves. The caller owns loop, sockets and signals.
    """
    runner = web.AppRunner(app, handle_signals=False, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
    stack.push_async_callback(runner.cleanup)
    await runner.setup()
    server = runner.server
    assert server is not None, "a runner that is set up has a server"
    if refusals is not None:
        server.request_handler = refusals.in_front_of(server.request_handler)
    for one in sockets:
        listener = await _listen(server, one, tls, gate)
        stack.callback(listener.close)


async def _listen(
    server: web.Server, listening: socket.socket, tls: ServerContext | None, gate: Gate | None
) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    options: dict[str, Any] = {
        "access_log": None,
        "logger": ProtocolLogger(),
        "auto_decompress": False,
        "keepalive_timeout": KEEP_ALIVE_S,
        "lingering_time": _LINGER_S,
    }
    bound = UNIX if listening.family == socket.AF_UNIX else str(listening.getsockname()[0])

    def connect() -> Connection:
        return Connection(server, bound, gate, loop=loop, **options)

    if listening.family == socket.AF_UNIX:
        return await loop.create_unix_server(connect, sock=listening, backlog=_BACKLOG)
    # The kernel cuts a client off that takes nothing of what is already its own, which we do not see; connections
    # inherit it. Later than we do, so that a slow reader of ours is cut, and logged, by us.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(2 * WRITE_TIMEOUT_S * 1000))
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    if tls is not None and gate is not None:
        tls.bound(gate)
    secured: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": _HANDSHAKE_S}
    return await loop.create_server(connect, sock=listening, backlog=_BACKLOG, **secured)
