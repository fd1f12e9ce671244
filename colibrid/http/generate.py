"""POST /generate: the short form for scripts and first tries."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from colibrid.errors import RequestError
from colibrid.http.answer import answer
from colibrid.http.body import read_body
from colibrid.http.completions import CompletionChoiceWriter, CompletionWriter
from colibrid.http.constraint import constrained
from colibrid.http.params import completion_job
from colibrid.http.plugged import admitted
from colibrid.http.state import STATE
from colibrid.http.types import GENERATE_REFUSED, CompletionBody, GenerateBody

if TYPE_CHECKING:
    from aiohttp import web

    from colibrid.http.run import Choice


async def generate(request: web.Request) -> web.StreamResponse:
    """Completes one prompt."""
    state = request.app[STATE]
    short = await read_body(request, GenerateBody, GENERATE_REFUSED, "prompt")
    _check_single(short.prompt)
    body = CompletionBody(
        prompt=short.prompt,
        max_tokens=short.max_new_tokens,
        temperature=short.temperature,
        top_p=short.top_p,
        top_k=short.top_k,
        seed=short.seed,
        stop=short.stop,
        experts=short.experts,
        profile=short.profile,
    )
    answer_id = f"gen-{secrets.token_hex(12)}"
    job, grammar = admitted(request, await completion_job(body, state, answer_id), None, state)
    job = await constrained(job, grammar, state)
    return await answer(request, state, job, _ShortWriter(body, state, answer_id, job.experts), stream=False)


def _check_single(prompt: object) -> None:
    """Raises RequestError for several prompts: the answer has room for one text."""
    if isinstance(prompt, list) and any(isinstance(entry, str | list) for entry in prompt[:1]):
        raise RequestError(
            "prompt: /generate takes one prompt, a string or token ids; send several to /v1/completions.",
            param="prompt",
        )


class _ShortWriter(CompletionWriter):
    """The answer without the wrapping of choices."""

    def choice(self, choice: Choice) -> CompletionChoiceWriter:
        self._only = super().choice(choice)
        return self._only

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        full = super().whole(usage)
        only = self._only.whole()
        return {
            "id": full["id"],
            "model": full["model"],
            "text": only["text"],
            "finish_reason": only["finish_reason"],
            "usage": usage,
        }
