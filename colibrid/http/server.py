"""The HTTP application: routes, what every request passes through, and the runner."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web

from colibrid.errors import RequestError
from colibrid.http.auth import HostPolicy, KeyRing
from colibrid.http.connection import Connection
from colibrid.http.context import RequestContext, context_of, open_context
from colibrid.http.errors import (
    InternalError,
    MethodError,
    NotFoundError,
    error_response,
    shown,
)
from colibrid.http.limits import WRITE_TIMEOUT_S
from colibrid.http.manual import add_manual
from colibrid.http.protocol_log import ProtocolLogger
from colibrid.http.routes import ROUTES
from colibrid.http.sending import ReaderLeftError
from colibrid.http.state import STATE, AppState

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from aiohttp.typedefs import Handler, Middleware

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_OPEN_PATHS = frozenset({route.path for route in ROUTES if not route.needs_key} | {"/docs"})  # answered without a key
_QUIET_PATHS = frozenset({"/livez", "/readyz", "/health"})  # asked every second by somebody: logged when debugging
_CHAT = "use POST /v1/chat/completions"
_EMBEDDINGS = "use POST /v1/embeddings"
_STATE = "GET /readyz says what the engine does"
_ELSEWHERE = {  # routes of other servers, and what to use instead
    "/v1/responses": _CHAT,
    "/v1/messages": _CHAT,
    "/v1/complete": "use POST /v1/completions",
    "/v1/engines": "use GET /v1/models",
    "/completions": "use POST /v1/completions",
    "/completion": "use POST /v1/completions",
    "/chat/completions": _CHAT,
    "/models": "use GET /v1/models",
    "/api/generate": "use POST /v1/completions",
    "/api/chat": _CHAT,
    "/embeddings": _EMBEDDINGS,
    "/embedding": _EMBEDDINGS,
    "/pooling": _EMBEDDINGS,
    "/infill": "use suffix of POST /v1/completions",
    "/ping": "use GET /health",
    "/metrics": _STATE,
    "/props": _STATE,
    "/slots": _STATE,
    "/v1/tokenize": "use POST /tokenize",
    "/v1/detokenize": "use POST /detokenize",
}
KEEP_ALIVE_S = 75.0  # also the time that the head of a request may take, counted from connect or the last answer
_CLIENT_LEFT = 499
_BACKLOG = 1024  # connections that the kernel accepts ahead of us
_SHUTDOWN_S = 0.5  # for answers under way when everything should have been answered
_LINGER_S = 2.0  # how long the rest of a refused body is read and thrown away


def create_app(state: AppState) -> web.Application:
    """The application that serves `state`."""
    app = web.Application(middlewares=[_pass_through(state.keys, HostPolicy(state.settings.server.host))])
    app[STATE] = state
    app.on_response_prepare.append(_add_headers)
    for route in ROUTES:
        add = app.router.add_get if route.method == "GET" else app.router.add_post  # GET answers HEAD, too
        add(route.pattern, route.handler)
    add_manual(app, ROUTES)
    return app


async def start_server(state: AppState, listening: socket.socket, stack: AsyncExitStack) -> None:
    """Answers on `listening` until `stack` is unwound. A request is cancelled when its client leaves.

    The caller owns loop, socket and signals.
    """
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(
        create_app(state), handle_signals=False, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S
    )
    stack.push_async_callback(state.structured.close)
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
    # The kernel cuts a client off that takes nothing for so long, whatever we wait for; connections inherit it.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(WRITE_TIMEOUT_S * 1000))
    listener = await loop.create_server(
        lambda: Connection(server, loop=loop, **options), sock=listening, backlog=_BACKLOG
    )
    stack.callback(listener.close)


def _pass_through(keys: KeyRing, hosts: HostPolicy) -> Middleware:
    """What every request passes through: identity, access, the error contract, one log line."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        context = open_context(request)
        try:
            hosts.check(request.headers)
            if request.path not in _OPEN_PATHS:
                context.tenant = keys.check(request.headers)
            response = await handler(request)
        except asyncio.CancelledError:
            _log_request(request, context, _CLIENT_LEFT)
            raise
        except ReaderLeftError:
            response = web.Response(status=_CLIENT_LEFT)  # for the log: there is nobody to send it to
        except Exception as error:  # noqa: BLE001 - every error has a place in the contract
            response = error_response(_as_contract(error, request, context))
        _log_request(request, context, response.status)
        return response

    return middleware


def _as_contract(error: Exception, request: web.Request, context: RequestContext) -> RequestError:
    """Any exception as an error of the contract."""
    if isinstance(error, RequestError):
        found = error
    elif isinstance(error, web.HTTPNotFound):
        found = _no_route(request)
    elif isinstance(error, web.HTTPMethodNotAllowed):
        found = MethodError(request.method, frozenset(error.allowed_methods))
    elif isinstance(error, web.HTTPClientError):
        found = RequestError(f"The request cannot be answered ({error.reason}); correct it.")
        found.status = error.status
    else:
        _log.exception("request_broken", request_id=context.id, path=request.path)
        found = InternalError(context.id)
    context.facts["error"] = found.code or found.type
    return found


def _no_route(request: web.Request) -> NotFoundError:
    path = request.path.rstrip("/")
    instead = _ELSEWHERE.get(path)
    if instead is None:
        instead = f"use {', '.join(route.path for route in ROUTES)}; GET /docs describes them"
    return NotFoundError(f"There is no route {shown(request.path)} here; {instead}.", code="unknown_url")


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    context = context_of(request)
    response.headers["Server"] = "colibrid"
    if context is None:
        return
    response.headers["x-request-id"] = context.id
    response.headers["openai-processing-ms"] = str(round(context.elapsed_ms))
    if context.server_timing is not None:
        response.headers["Server-Timing"] = context.server_timing
    if context.ignored:
        # Names come from the client: only characters that cannot end a header, and not too many.
        names = (name.encode("ascii", "replace").decode() for name in context.ignored[:20])
        safe = ",".join("".join(c if c.isprintable() else "?" for c in name)[:64] for name in names)
        response.headers["x-colibri-ignored"] = safe


def _log_request(request: web.Request, context: RequestContext, status: int) -> None:
    """The one canonical line of a request. Health checks are only of interest when debugging."""
    log = _log.debug if request.path in _QUIET_PATHS else _log.info
    if context.ignored:
        context.facts["ignored"] = context.ignored[:20]
    log(
        "request",
        request_id=context.id,
        method=request.method,
        path=request.path,
        status=status,
        ms=round(context.elapsed_ms, 1),
        **context.facts,
    )
