"""The HTTP application: routes, what every request passes through, and the runner."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from colibrid.http.admin import add_admin
from colibrid.http.context import context_of, open_context
from colibrid.http.contract import as_contract, forget_frames, log_request
from colibrid.http.errors import NotFoundError, error_response, shown
from colibrid.http.manual import add_manual
from colibrid.http.metrics import metrics, samples
from colibrid.http.origin import UNIX, cors_headers
from colibrid.http.plugged import SinkThread, authenticated, observed
from colibrid.http.quota import limit_headers
from colibrid.http.refusal import Refusals
from colibrid.http.routes import ROUTES
from colibrid.http.runner import run_application
from colibrid.http.sending import ReaderLeftError, connection_of
from colibrid.http.state import STATE, AppState
from colibrid.http.ui import UI_PATHS, add_ui

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from contextlib import AsyncExitStack

    from aiohttp.typedefs import Handler, Middleware

    from colibrid.http.admin_state import AdminState
    from colibrid.http.context import RequestContext
    from colibrid.http.credentials import Scope
    from colibrid.http.origin import Origins
    from colibrid.http.tls import ServerContext

_SCOPES: dict[str, Scope | None] = {route.path: route.scope for route in ROUTES if "{" not in route.path} | {
    "/docs": None,  # without a key
    "/metrics": "metrics",
    **dict.fromkeys(UI_PATHS),
}
_QUEUES = frozenset(route.path for route in ROUTES if route.queues)
# Asked every second by somebody: logged when debugging.
_QUIET_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics", "/ui/state"})
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
    "/props": _STATE,
    "/slots": _STATE,
    "/v1/tokenize": "use POST /tokenize",
    "/v1/detokenize": "use POST /detokenize",
}
_CLIENT_LEFT = 499
_PREFLIGHT = {  # what a page may send that server.allowed_origins lists
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "authorization, content-type, x-request-id",
    "Access-Control-Max-Age": "600",
}


def create_app(state: AppState, admin: AdminState | None = None) -> web.Application:
    """The application that serves `state`; with the routes of `admin`, for keys of scope admin."""
    app = web.Application(middlewares=[_pass_through(state)])
    app[STATE] = state
    app.on_response_prepare.append(_add_headers)
    for route in ROUTES:
        add = app.router.add_get if route.method == "GET" else app.router.add_post  # GET answers HEAD, too
        add(route.pattern, route.handler)
    add_manual(app, ROUTES)
    add_ui(app)
    if admin is not None:
        add_admin(app, admin)
    app.router.add_get("/metrics", metrics)
    state.served.count_routes(resource.canonical for resource in app.router.resources())
    return app


async def start_server(
    state: AppState,
    sockets: Sequence[socket.socket],
    stack: AsyncExitStack,
    tls: ServerContext | None = None,
    admin: AdminState | None = None,
) -> None:
    """Answers on `sockets`, see run_application, until `stack` is unwound. `admin`: see create_app."""
    stack.push_async_callback(state.structured.close)
    watching = asyncio.create_task(state.served.watch_loop())
    stack.callback(watching.cancel)
    for sink in state.plugins.sinks:
        pushing = asyncio.create_task(SinkThread(sink).push(lambda: samples(state)))
        stack.callback(pushing.cancel)
    refusals = Refusals(state.scheduler, _QUEUES, state.served)
    await run_application(create_app(state, admin), sockets, stack, tls=tls, gate=state.gate, refusals=refusals)


def _pass_through(state: AppState) -> Middleware:
    """What every request passes through: identity, access, the error contract, one log line."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        context = open_context(request)
        try:
            _check_origin(request, context, state.origins)
            if context.page is not None and request.method == "OPTIONS":
                response: web.StreamResponse = web.Response(status=204, headers=_PREFLIGHT)
            else:
                await _check_key(request, context, state)
                response = await _within_limits(request, context, handler, state)
        except asyncio.CancelledError:
            _note(request, context, state, _CLIENT_LEFT)
            raise
        except ReaderLeftError:
            response = web.Response(status=_CLIENT_LEFT)  # for the log: there is nobody to send it to
        except Exception as error:  # noqa: BLE001 - every error has a place in the contract
            response = error_response(as_contract(error, request, context, _no_route))
        _note(request, context, state, response.status)
        return response

    return middleware


def _note(request: web.Request, context: RequestContext, state: AppState, status: int) -> None:
    """Counts and logs a request that is over."""
    resource = request.match_info.route.resource
    state.served.answered(None if resource is None else resource.canonical, status)
    if context.error is not None:
        state.served.refused(context.error)
        forget_frames(context.error)
    log_request(request, context, status, quiet=request.path in _QUIET_PATHS)
    if state.plugins.observers:
        observed(request, context, state, status)


def _check_origin(request: web.Request, context: RequestContext, origins: Origins) -> None:
    """Raises ForbiddenError for a request that a foreign page sends, or that DNS rebinding has led here."""
    connection = connection_of(request)
    peer = origins.peer(connection.peername, request.headers, secure=connection.ssl_context is not None)
    if peer.address != UNIX:
        context.facts["client"] = peer.address
    origins.check_host(request.headers, connection.bound)
    context.page = origins.check_page(request.headers, peer)


async def _check_key(request: web.Request, context: RequestContext, state: AppState) -> None:
    scope = _scope_of(request.path)
    if scope is None:
        return
    if state.plugins.authenticators:
        context.key, metered = await authenticated(request.headers, scope, state)
    else:
        context.key, metered = state.keys.check(request.headers, scope), True
    if context.key is not None:
        context.facts["key"] = context.key.id
        context.meter = state.meters.of(context.key) if metered else None


async def _within_limits(
    request: web.Request, context: RequestContext, handler: Handler, state: AppState
) -> web.StreamResponse:
    """The handler's answer. Raises OverloadedError or RateLimitError before the body is read."""
    if request.method != "POST":
        return await handler(request)
    if request.path in _QUEUES:
        state.scheduler.check_room()
    if context.meter is None:
        return await handler(request)
    with context.meter.request():
        return await handler(request)


def _scope_of(path: str) -> Scope | None:
    """What a key must open for this path, whatever the method; unknown paths need a key, too. None: no key."""
    return "admin" if f"{path}/".startswith("/admin/") else _SCOPES.get(path, "inference")


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
    for name, value in cors_headers(context.page):
        response.headers[name] = value
    if context.meter is not None:
        for name, value in limit_headers(context.meter):
            response.headers[name] = value
    response.headers["x-request-id"] = context.id
    response.headers["openai-processing-ms"] = str(round(context.elapsed_ms))
    if context.server_timing is not None:
        response.headers["Server-Timing"] = context.server_timing
    if context.ignored:
        # Names come from the client: only characters that cannot end a header, and not too many.
        names = (name.encode("ascii", "replace").decode() for name in context.ignored[:20])
        safe = ",".join("".join(c if c.isprintable() else "?" for c in name)[:64] for name in names)
        response.headers["x-colibri-ignored"] = safe
