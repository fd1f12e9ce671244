"""GET /admin/experts and POST /admin/experts/{layer}/{expert}: what replaced the pack's experts, and replacing one."""

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
from colibrid.http.load import load_json
from colibrid.http.state import STATE

if TYPE_CHECKING:
    from aiohttp import web

_MAX_DIGITS = 6


class SwapBody(msgspec.Struct, kw_only=True):
    """What shall take the expert's place."""

    file: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    module: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


async def list_experts(request: web.Request) -> web.Response:
    """Assignments by layer and expert, and every expert that is not as the pack has it, or was not for some time."""
    swaps, state = request.app[ADMIN].swaps, request.app[STATE]
    experts = state.settings.experts
    return json_response(
        {
            "weights_generation": swaps.weights_generation,
            "swap_slots": experts.swap_slots,
            "load": load_json(state),
            "replaced": [msgspec.to_builtins(version) for version in swaps.versions],
        }
    )


async def replace_expert(request: web.Request) -> web.Response:
    """Answers when the new expert serves."""
    layer, expert = _number(request, "layer"), _number(request, "expert")
    body = await read_body(request, SwapBody, {})
    if current(request).ignored:
        raise RequestError(f"Unknown field {shown(current(request).ignored[0])}; send file, module or both.")
    outcome = await request.app[ADMIN].swaps.replace(layer, expert, body.file, body.module)
    return json_response(
        {
            **msgspec.to_builtins(outcome.version),
            "streams": outcome.streams,
            "free_slots": outcome.free_slots,
            "milliseconds": round(outcome.milliseconds, 1),
        }
    )


def _number(request: web.Request, name: str) -> int:
    text = request.match_info[name]
    if not text.isdecimal() or not text.isascii() or len(text) > _MAX_DIGITS:
        raise RequestError(f"{name} is {shown(text)}; it must be a number from 0 on.", param=name)
    return int(text)
