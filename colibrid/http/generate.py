"""POST /generate: the short form for scripts and first tries."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from colibrid.http.answer import answer
from colibrid.http.body import parse, read_json
from colibrid.http.completions import CompletionWriter
from colibrid.http.context import current
from colibrid.http.params import completion_job
from colibrid.http.state import STATE
from colibrid.http.types import GENERATE_REFUSED, CompletionBody, GenerateBody

if TYPE_CHECKING:
    from aiohttp import web


async def generate(request: web.Request) -> web.StreamResponse:
    """Completes one prompt."""
    state = request.app[STATE]
    raw = await read_json(request, state.settings.server.max_body_bytes, "prompt")
    short, current(request).ignored = parse(raw, GenerateBody, GENERATE_REFUSED, strict=state.settings.server.strict)
    body = CompletionBody(
        prompt=short.prompt,
        max_tokens=short.max_new_tokens,
        temperature=short.temperature,
        top_p=short.top_p,
        top_k=short.top_k,
        seed=short.seed,
        stop=short.stop,
        experts=short.experts,
    )
    answer_id = f"gen-{secrets.token_hex(12)}"
    job = await completion_job(body, state, answer_id)
    return await answer(request, state, job, _ShortWriter(body, state, answer_id), stream=False)


class _ShortWriter(CompletionWriter):
    """The answer without the wrapping of choices."""

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        full = super().whole(choices, usage)
        return {
            "id": full["id"],
            "model": full["model"],
            "text": choices[0]["text"],
            "finish_reason": choices[0]["finish_reason"],
            "usage": usage,
        }
