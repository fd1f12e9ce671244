"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colibrid.http.answer import json_response
from colibrid.http.params import check_model
from colibrid.http.state import STATE

if TYPE_CHECKING:
    from aiohttp import web

    from colibrid.http.state import AppState


async def list_models(request: web.Request) -> web.Response:
    """The one served model, as a list."""
    return json_response({"object": "list", "data": [_describe(request.app[STATE])]})


async def show_model(request: web.Request) -> web.Response:
    """The served model, or 404."""
    state = request.app[STATE]
    check_model(request.match_info["id"], state)
    return json_response(_describe(state))


def _describe(state: AppState) -> dict[str, Any]:
    info = state.scheduler.info
    return {
        "id": info.model_id,
        "object": "model",
        "created": state.created,
        "owned_by": "colibrid",
        "aliases": list(state.aliases),
        "profiles": [
            {"name": name, "per_token": policy.per_token, "threshold": policy.threshold}
            for name, policy in state.profiles.items()
        ],
        "max_model_len": info.max_seq_len,
        "status": "ready" if state.scheduler.readiness.ready else "loading",
    }
