"""GET /ui: a static page to try the model and to look at the engine, and GET /ui/state, what it looks at.

The page, its script and its style hold no data and need no key; everything else that it asks for does, where keys are
set. Its policy lets it load nothing but these files and ask nobody but this server.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from colibrid.http.admin_slots import slots_json
from colibrid.http.answer import json_response
from colibrid.http.errors import NotFoundError
from colibrid.http.load import load_json
from colibrid.http.state import STATE

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

_FOLDER = Path(__file__).parent / "page"
_FILES = {
    "/ui": ("ui.html", "text/html"),
    "/ui/ui.css": ("ui.css", "text/css"),
    "/ui/ui.js": ("ui.js", "text/javascript"),
}
UI_PATHS = tuple(_FILES)
UI_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add_ui(app: web.Application) -> None:
    """Adds the static files, read now."""
    for path, (name, kind) in _FILES.items():
        app.router.add_get(path, _file((_FOLDER / name).read_bytes(), kind))


def _file(body: bytes, kind: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        _check_on(request)
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=UI_HEADERS)

    return handler


async def ui_state(request: web.Request) -> web.Response:
    """Slots without the ids of requests, and the experts' load; for a key of scope metrics."""
    _check_on(request)
    state = request.app[STATE]
    info = state.scheduler.info
    found: dict[str, Any] = {
        "model": info.model_id,
        "device": info.device,
        "prompt_tokens": sum(one.measures.prompt_tokens for one in state.scheduler.reports),
        "output_tokens": sum(one.measures.output_tokens for one in state.scheduler.reports),
        "engines": slots_json(state, ids=False),
        "load": load_json(state),
    }
    return json_response(found)


def _check_on(request: web.Request) -> None:
    if not request.app[STATE].settings.server.ui:
        raise NotFoundError("The page is switched off here; set server.ui to have it.", code="unknown_url")
