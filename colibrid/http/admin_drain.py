"""POST /admin/drain: refuse new requests, let those that run end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from colibrid.errors import RequestError
from colibrid.http.admin_state import ADMIN
from colibrid.http.answer import json_response
from colibrid.http.body import read_body
from colibrid.http.context import current
from colibrid.http.errors import shown
from colibrid.http.state import STATE

if TYPE_CHECKING:
    from aiohttp import web


class DrainBody(msgspec.Struct, kw_only=True):
    """How to drain. Once begun it goes on until the daemon is started again."""

    exit: bool = False  # then end the daemon
    timeout_s: Annotated[float, Meta(ge=0, le=86400)] | None = None  # null: server.drain_timeout_s


async def drain(request: web.Request) -> web.Response:
    """Answers when everything has ended, or at once where the daemon shall exit: it drains on its way."""
    body = await read_body(request, DrainBody, {}) if request.body_exists else DrainBody()
    if current(request).ignored:
        raise RequestError(f"Unknown field {shown(current(request).ignored[0])}; send exit, timeout_s or both.")
    state, drainer = request.app[STATE], request.app[ADMIN].drainer
    if body.exit:
        if body.timeout_s is not None:
            raise RequestError(
                "timeout_s is for draining without exit; an exit takes server.drain_timeout_s.", param="timeout_s"
            )
        drainer.exit()
        return json_response({"draining": True, "complete": False, "exit": True})
    timeout_s = state.settings.server.drain_timeout_s if body.timeout_s is None else body.timeout_s
    complete = await drainer.drain(timeout_s)
    return json_response({"draining": True, "complete": complete, "exit": False})
