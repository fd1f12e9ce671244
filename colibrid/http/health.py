"""GET /livez, /readyz and /health, which need no key and hold nothing secret, and GET /version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import colibrid
from colibrid.http.answer import json_response
from colibrid.http.state import STATE

if TYPE_CHECKING:
    from aiohttp import web


async def livez(_request: web.Request) -> web.Response:
    """200 as long as the event loop turns: that this is answered at all is the news."""
    return json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """200 iff requests are served now, else 503; says what the engine is doing."""
    scheduler = request.app[STATE].scheduler
    readiness = scheduler.readiness
    ready = readiness.ready and not scheduler.draining
    response = json_response(
        {
            "status": "ready" if ready else "not_ready",
            "phase": "draining" if scheduler.draining else readiness.phase,
            "percent": readiness.percent,
            "reason": readiness.reason,
            "last_step_age_s": readiness.last_step_age_s,
            "restarts": readiness.restarts,
        },
        status=200 if ready else 503,
    )
    if not ready:
        response.headers["Retry-After"] = "1"
    return response


async def version(_request: web.Request) -> web.Response:
    """What vLLM's clients ask for."""
    return json_response({"version": colibrid.__version__})
