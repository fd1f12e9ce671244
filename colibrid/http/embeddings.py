"""POST /v1/embeddings: one vector of length 1 for each text."""

from __future__ import annotations

import asyncio
import base64
import math
import secrets
import sys
from array import array
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from colibrid.batch.request import GenerateRequest, Sampling
from colibrid.errors import EngineFaultError, OverloadedError, RequestError
from colibrid.http.answer import within
from colibrid.http.body import read_body
from colibrid.http.context import current
from colibrid.http.limits import MAX_INPUTS
from colibrid.http.params import check_model, expert_policy
from colibrid.http.prompts import encode_prompts, prompt_entries, truncated, usable_tokens
from colibrid.http.quota import Spending, served_as
from colibrid.http.state import STATE
from colibrid.http.types import EMBEDDINGS_REFUSED, EmbeddingsBody
from colibrid.http.usage import expert_usage, named, times, timing_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.batch.interfaces import Generation, GenerationService
    from colibrid.batch.request import GenerateResult
    from colibrid.http.state import AppState

_INLINE_VALUES = 4096  # written down on the event loop: about a millisecond
_ROOM_S = 0.02  # until the queue is looked at again by a request of which some texts were taken already


async def embeddings(request: web.Request) -> web.Response:
    """Embeds one text or several."""
    state = request.app[STATE]
    body = await read_body(request, EmbeddingsBody, EMBEDDINGS_REFUSED, "input")
    context = current(request)
    requests = served_as(context.meter, await _requests(body, state), context.tenant)
    results: list[GenerateResult] = []
    with Spending(context.meter, requests) as spending, state.scheduler.held():
        spending.used = sum(len(one.prompt_ids) for one in requests)  # whoever leaves early has had them computed
        try:
            await within(request, body.timeout_s, _run(requests, state.scheduler, results))
        except OverloadedError:
            spending.used = 0
            raise
    usage = _note(request, state, results, body.profile)
    size = body.dimensions or state.scheduler.info.hidden

    def write() -> bytes:
        return _written(results, size, body.encoding_format or "float", state.scheduler.info.model_id, usage)

    if len(results) * size <= _INLINE_VALUES:
        return web.Response(body=write(), content_type="application/json")
    written = await asyncio.get_running_loop().run_in_executor(state.scribe, write)
    return web.Response(body=written, content_type="application/json")


async def _requests(body: EmbeddingsBody, state: AppState) -> list[GenerateRequest]:
    check_model(body.model, state)
    info = state.scheduler.info
    if body.dimensions is not None and body.dimensions > info.hidden:
        raise RequestError(
            f"dimensions = {body.dimensions} is more than the {info.hidden} of the model; lower it.",
            param="dimensions",
            code="invalid_value",
        )
    if body.truncate_prompt_tokens == 0:
        raise RequestError(
            "truncate_prompt_tokens = 0 would leave no text; send -1 or 1 and more.", param="truncate_prompt_tokens"
        )
    policy = expert_policy(body.experts, body.profile, state)
    entries = prompt_entries(body.input, "input", MAX_INPUTS)
    prompts = await encode_prompts(
        entries,
        state,
        add_special=body.add_special_tokens is not False,
        most=usable_tokens(body, state),
        field="input",
    )
    name = f"embd-{secrets.token_hex(12)}"
    return [
        GenerateRequest(
            request_id=f"{name}-{index}",
            prompt_ids=truncated(prompt, body.truncate_prompt_tokens, info.max_seq_len).ids,
            max_tokens=0,
            sampling=Sampling(seed=0),
            experts=policy,
            priority=body.priority or 0,
            pooling=state.settings.embeddings.pooling,
        )
        for index, prompt in enumerate(prompts)
    ]


async def _run(requests: Sequence[GenerateRequest], scheduler: GenerationService, found: list[GenerateResult]) -> None:
    """Adds the results to `found`, in order.

    As many texts as there are slots are under way at once, so that a long list leaves the queue to others. The first
    ones are refused as any request is when the queue is full; the others wait for room.
    """
    results: dict[int, GenerateResult] = {}
    waiting = iter(list(enumerate(requests))[scheduler.info.slots :])
    running = list(scheduler.submit_all(requests[: scheduler.info.slots]))

    async def work(index: int, generation: Generation) -> None:
        results[index] = await _result(generation)
        for following, request in waiting:
            running[index] = await _submit(request, scheduler)
            results[following] = await _result(running[index])

    tasks = [asyncio.ensure_future(work(index, generation)) for index, generation in enumerate(running)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        for generation in running:
            generation.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    found.extend(results[index] for index in range(len(requests)))


async def _submit(request: GenerateRequest, scheduler: GenerationService) -> Generation:
    while True:
        try:
            return scheduler.submit(request, begun=True)
        except OverloadedError as error:
            if error.code != "server_is_overloaded":
                raise
        await asyncio.sleep(_ROOM_S)


async def _result(generation: Generation) -> GenerateResult:
    async with generation:
        async for _ in generation:
            pass
    if generation.result is None:
        raise EngineFaultError("The request was cancelled; try again.", code="cancelled")
    return generation.result


def _written(results: Sequence[GenerateResult], size: int, encoding: str, model: str, usage: dict[str, Any]) -> bytes:
    data = [
        msgspec.Raw(
            msgspec.json.encode({"object": "embedding", "index": index, "embedding": _value(one, size, encoding)})
        )
        for index, one in enumerate(results)
    ]
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


def _value(result: GenerateResult, size: int, encoding: str) -> list[float] | str:
    assert result.pooled is not None, "it was asked to pool"
    vector = shortened(array("f", result.pooled), size)
    if encoding == "float":
        return vector.tolist()
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode("ascii")


def shortened(vector: array[float], size: int) -> array[float]:
    """The first `size` values, of length 1 again (all zero if they are zero)."""
    if size == len(vector):
        return vector
    kept = vector[:size]
    length = math.hypot(*kept)
    return array("f", [value / length for value in kept]) if length else kept


def _note(
    request: web.Request, state: AppState, results: Sequence[GenerateResult], profile: str | None
) -> dict[str, Any]:
    """The usage; also for the headers and the log line."""
    context = current(request)
    tokens = sum(result.prompt_tokens for result in results)
    usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
    if state.scheduler.info.experts_per_token > 0:
        usage["experts"] = expert_usage([result.experts for result in results], profile)
    timed = [(one.queue_ms, one.prefill_ms, one.decode_ms) for one in results]
    context.server_timing = timing_header(timed)
    context.facts.update(model=state.scheduler.info.model_id, prompt_tokens=tokens, texts=len(results))
    context.facts.update(**named(profile), **times(timed))
    return usage
