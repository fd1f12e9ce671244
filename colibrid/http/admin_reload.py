"""POST /admin/reload: what SIGHUP does, with an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibrid.errors import ColibridError, RequestError
from colibrid.http.admin_state import ADMIN
from colibrid.http.answer import json_response

if TYPE_CHECKING:
    from aiohttp import web


async def reload_settings(request: web.Request) -> web.Response:
    """Which keys have changed, and which wait for a restart. 400 with all mistakes where nothing has changed."""
    try:
        change = await request.app[ADMIN].reloader.reload()
    except ColibridError as error:
        raise RequestError(f"The old settings stay in force. {error}", code="configuration_refused") from error
    return json_response({"changed": change.live, "needs_restart": change.restart})
