"""The application on server.admin_socket: for whoever runs the daemon, told apart by the rights of the socket's file.

One table holds its routes; the public application has them, too, for keys of scope admin. Bodies, errors and log lines are
as in the public API; on the socket there are no keys.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from colibrid.http.admin_drain import drain
from colibrid.http.admin_experts import list_experts, replace_expert
from colibrid.http.admin_reload import reload_settings
from colibrid.http.admin_slots import list_slots
from colibrid.http.admin_state import ADMIN, AdminState
from colibrid.http.answer import json_response
from colibrid.http.context import context_of, open_context
from colibrid.http.contract import as_contract, log_request
from colibrid.http.errors import NotFoundError, error_response, shown
from colibrid.http.metrics import metrics_response
from colibrid.http.state import STATE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.typedefs import Handler, Middleware

    from colibrid.http.state import AppState

_CLIENT_LEFT = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminRoute:
    """One method of one path."""

    method: str
    path: str  # parts in braces are read with request.match_info
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    summary: str


async def list_routes(_request: web.Request) -> web.Response:
    """What can be asked here."""
    return json_response({"routes": [{"method": r.method, "path": r.path, "summary": r.summary} for r in ADMIN_ROUTES]})


async def _metrics(request: web.Request) -> web.Response:
    """For whoever may open the socket, whatever metrics.enabled says."""
    return metrics_response(request.app[STATE])


ADMIN_ROUTES: tuple[AdminRoute, ...] = (
    AdminRoute(method="GET", path="/admin", handler=list_routes, summary="These routes"),
    AdminRoute(
        method="GET",
        path="/admin/experts",
        handler=list_experts,
        summary="What each expert has computed, and those that replaced others",
    ),
    AdminRoute(
        method="POST",
        path="/admin/experts/{layer}/{expert}",
        handler=replace_expert,
        summary="Replace one expert by that of a file, or the kernel that computes it",
    ),
    AdminRoute(
        method="POST",
        path="/admin/reload",
        handler=reload_settings,
        summary="Take changed settings over, as SIGHUP does",
    ),
    AdminRoute(
        method="GET", path="/admin/slots", handler=list_slots, summary="Every slot of every engine, and who waits"
    ),
    AdminRoute(
        method="POST",
        path="/admin/drain",
        handler=drain,
        summary="Refuse new requests, let those that run end, and exit if asked to",
    ),
)


def create_admin(state: AppState, admin: AdminState) -> web.Application:
    """The application that looks at and changes what `state` serves."""
    app = web.Application(middlewares=[_pass_through()])
    app[STATE] = state
    app.on_response_prepare.append(_add_headers)
    add_admin(app, admin)
    app.router.add_get("/metrics", _metrics)
    return app


def add_admin(app: web.Application, admin: AdminState) -> None:
    """Adds the routes; who may ask is for `app` to see to."""
    app[ADMIN] = admin
    for route in ADMIN_ROUTES:
        app.router.add_route(route.method, route.path, route.handler)


def _pass_through() -> Middleware:
    """What every request passes through: identity, the error contract, one log line."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        context = open_context(request)
        try:
            response = await handler(request)
        except asyncio.CancelledError:
            log_request(request, context, _CLIENT_LEFT)
            raise
        except Exception as error:  # noqa: BLE001 - every error has a place in the contract
            response = error_response(as_contract(error, request, context, _no_route))
        log_request(request, context, response.status)
        return response

    return middleware


def _no_route(request: web.Request) -> NotFoundError:
    return NotFoundError(
        f"There is no route {shown(request.path)} on the admin socket; GET /admin lists them.", code="unknown_url"
    )


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "colibrid"
    context = context_of(request)
    if context is not None:
        response.headers["x-request-id"] = context.id
