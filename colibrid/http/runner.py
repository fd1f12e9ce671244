"""One application on one listening socket, until it is told to end."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from aiohttp import web

from colibrid.http.connection import Connection
from colibrid.http.limits import WRITE_TIMEOUT_S
from colibrid.http.origin import UNIX
from colibrid.http.protocol_log import ProtocolLogger

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

KEEP_ALIVE_S = 75.0  # also the time that the head of a request may take, counted from connect or the last answer
_BACKLOG = 1024  # connections that the kernel accepts ahead of us
_SHUTDOWN_S = 0.5  # for answers under way when everything should have been answered
_LINGER_S = 2.0  # how long the rest of a refused body is read and thrown away


async def run_application(app: web.Application, listening: socket.socket, stack: AsyncExitStack) -> None:
    """Answers on `listening`, of TCP or a path, until `stack` is unwound. A request is cancelled when its client leaves.

    The caller owns loop, socket and signals.
    """
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(app, handle_signals=False, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
    stack.push_async_callback(runner.cleanup)
    await runner.setup()
    server = runner.server
    assert server is not None, "a runner that is set up has a server"
    options: dict[str, Any] = {
        "access_log": None,
        "logger": ProtocolLogger(),
        "auto_decompress": False,
        "keepalive_timeout": KEEP_ALIVE_S,
        "lingering_time": _LINGER_S,
    }

    bound = UNIX if listening.family == socket.AF_UNIX else str(listening.getsockname()[0])

    def connect() -> Connection:
        return Connection(server, bound, loop=loop, **options)

    listener: asyncio.Server
    if listening.family == socket.AF_UNIX:
        listener = await loop.create_unix_server(connect, sock=listening, backlog=_BACKLOG)
    else:
        # The kernel cuts a client off that takes nothing for so long, whatever we wait for; connections inherit it.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(WRITE_TIMEOUT_S * 1000))
        listener = await loop.create_server(connect, sock=listening, backlog=_BACKLOG)
    stack.callback(listener.close)
