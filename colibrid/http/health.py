"""GET /livez, /readyz and /health, which need no key and hold nothing secret, and GET /version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

import colibrid
from colibrid.http.answer import json_response
from colibrid.http.state import STATE

if TYPE_CHECKING:
    from aiohttp import web

    from colibrid.batch.interfaces import GenerationService
    from colibrid.engine.state import EngineStatus


async def livez(_request: web.Request) -> web.Response:
    """200 as long as the event loop turns: that this is answered at all is the news."""
    return json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """200 iff requests are served now, be it by one engine of several, else 503; says what the engines are doing."""
    scheduler = request.app[STATE].scheduler
    return _answer(scheduler, _readiness(scheduler))


async def health(request: web.Request) -> web.Response:
    """As readyz, with each engine by itself."""
    scheduler = request.app[STATE].scheduler
    engines = scheduler.engines
    details = {
        "engines_ready": sum(engine.phase == "ready" for engine in engines),
        "engines": [_engine(engine) for engine in engines],
    }
    return _answer(scheduler, _readiness(scheduler) | details)


def _readiness(scheduler: GenerationService) -> dict[str, Any]:
    readiness = scheduler.readiness
    return {
        "status": "ready" if _ready(scheduler) else "not_ready",
        "phase": "draining" if scheduler.draining else readiness.phase,
        "percent": readiness.percent,
        "reason": readiness.reason,
        "last_step_age_s": readiness.last_step_age_s,
        "restarts": readiness.restarts,
    }


def _engine(engine: EngineStatus) -> dict[str, Any]:
    memory = engine.memory
    bill = {
        "memory_bytes": None if memory is None else memory.total,
        "kv_tokens": None if memory is None else memory.kv_tokens,
    }
    return {name: value for name, value in msgspec.structs.asdict(engine).items() if name != "memory"} | bill


def _ready(scheduler: GenerationService) -> bool:
    return scheduler.readiness.ready and not scheduler.draining


def _answer(scheduler: GenerationService, body: dict[str, Any]) -> web.Response:
    ready = _ready(scheduler)
    response = json_response(body, status=200 if ready else 503)
    if not ready:
        response.headers["Retry-After"] = "1"
    return response


async def version(_request: web.Request) -> web.Response:
    """What vLLM's clients ask for."""
    return json_response({"version": colibrid.__version__})
