"""GET /admin/slots: what each engine is at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.http.answer import json_response
from colibrid.http.state import STATE

if TYPE_CHECKING:
    from aiohttp import web

    from colibrid.http.state import AppState


async def list_slots(request: web.Request) -> web.Response:
    """Requests are named by their ids."""
    return json_response({"engines": slots_json(request.app[STATE], ids=True)})


def slots_json(state: AppState, *, ids: bool) -> list[dict[str, Any]]:
    """One object an engine. ids: with those of requests, by which a client could be found."""
    engines = zip(state.scheduler.engines, state.scheduler.slot_reports, strict=True)
    return [
        {
            "engine": engine.index,
            "phase": engine.phase,
            "running": engine.running,
            "queued": engine.queued,
            "slots": [
                msgspec.structs.asdict(slot if ids else msgspec.structs.replace(slot, request_id=None))
                for slot in slots
            ],
        }
        for engine, slots in engines
    ]
