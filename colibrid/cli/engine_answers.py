"""Asks a pack's engine many things at once, without a server: greedy answers, and how likely given texts are."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from colibrid.batch.request import GenerateRequest, Sampling
from colibrid.cli.assembly import assemble

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from colibrid.batch.interfaces import GenerationService
    from colibrid.config.settings import Settings
    from colibrid.engine.library import Library
    from colibrid.model.cache import Resolved

IN_FLIGHT = 64  # requests that the engine has or will have next


class Answers(NamedTuple):
    """What the engine said."""

    tokens: list[list[int]]  # of each prompt
    logprobs: list[list[float]]  # of each text's tokens but the first


def answers(
    settings: Settings,
    resolved: Resolved,
    library: Library,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop: tuple[int, ...],
    progress: Callable[[int, int], None],
) -> Answers:
    """Runs until everything is answered. Where the context is short, answers and texts are cut.

    ModelError, ConfigError, EngineError: as from serving. RequestError: a prompt leaves no room for an answer.
    """
    work = _Work(prompts, texts, max_tokens, stop)
    return asyncio.run(_run(settings, resolved, library, work, progress))


class _Work(NamedTuple):
    prompts: Sequence[Sequence[int]]
    texts: Sequence[Sequence[int]]
    max_tokens: int
    stop: tuple[int, ...]

    def requests(self, context: int) -> list[GenerateRequest]:
        """Of prompts, then of texts."""
        asked = [_request(ids, max(1, min(self.max_tokens, context - len(ids))), self.stop) for ids in self.prompts]
        return asked + [_request(ids[:context], 0, ()) for ids in self.texts]


def _request(ids: Sequence[int], max_tokens: int, stop: tuple[int, ...]) -> GenerateRequest:
    return GenerateRequest(
        request_id="verify",
        prompt_ids=tuple(ids),
        max_tokens=max_tokens,
        sampling=Sampling(seed=0, temperature=0.0),
        stop_token_ids=stop,
        prompt_logprobs=None if max_tokens else 0,
    )


async def _run(
    settings: Settings,
    resolved: Resolved,
    library: Library,
    work: _Work,
    progress: Callable[[int, int], None],
) -> Answers:
    async with AsyncExitStack() as stack:
        parts = assemble(settings, resolved, library)
        stack.callback(parts.pool.stop)
        stack.push_async_callback(parts.fleet.stop)
        parts.fleet.start()
        await parts.fleet.wait_ready()
        requests = work.requests(parts.pool.info.max_seq_len)
        gate = asyncio.Semaphore(IN_FLIGHT)
        done = 0

        async def one(request: GenerateRequest) -> tuple[list[int], list[float]]:
            nonlocal done
            async with gate:
                found = await _answer(parts.pool, request)
            done += 1
            progress(done, len(requests))
            return found

        found = await asyncio.gather(*map(one, requests))
    count = len(work.prompts)
    return Answers([tokens for tokens, _ in found[:count]], [logprobs for _, logprobs in found[count:]])


async def _answer(service: GenerationService, request: GenerateRequest) -> tuple[list[int], list[float]]:
    tokens = []
    async with service.submit(request) as generation:
        async for records in generation:
            tokens += [record.token for record in records]
        prompt = generation.prompt_records if request.prompt_logprobs is not None else ()
        scores = [record.logprob for record in prompt if record.logprob is not None]
    ends = set(request.stop_token_ids)
    return [token for token in tokens if token not in ends], scores
