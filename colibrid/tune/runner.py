"""The service of a pack, without HTTP: engines in processes of their own, asked for many things at once.

Use::

    with Runner(library, settings, pack, most=4) as runner:
        runner.use(Point(max_tokens_per_expert=256))  # opens a service; another one only if the settings are others
        found = runner.ask([answer_request(ids, policy_of(point), 64, stop), score_request(ids, policy_of(point))])

Where max_tokens_per_expert is set, answers depend on what else is in the batch. There requests run in waves: as many as
there are slots begin at one step, and the next ones when all of them have ended. So the same requests have the same
company in every run.
"""

from __future__ import annotations

import asyncio
from array import array
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from colibrid.batch.plan import reserved_tokens
from colibrid.batch.request import ExpertPolicy, GenerateRequest, GenerateResult, Sampling
from colibrid.batch.service import make_service
from colibrid.config.settings import TaskExpertsSettings
from colibrid.engine.channel import RESULT_RECORDS
from colibrid.errors import EngineFaultError, RequestError
from colibrid.text.lines import load_model_text
from colibrid.tune.progress import silent
from colibrid.tune.result import Point

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator, Sequence

    from colibrid.batch.generation import LiveGeneration
    from colibrid.batch.pool import EnginePool
    from colibrid.batch.request import Pooling
    from colibrid.config.settings import Settings
    from colibrid.engine.library import Library
    from colibrid.model.manifest import Manifest
    from colibrid.model.pack import Pack
    from colibrid.text.model_text import ModelText
    from colibrid.tune.progress import Progress

T = TypeVar("T")
_NAME = "tune"  # of every request
_NOBODY = -1  # the likeliest token of a prompt's first position, which nothing predicts


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one request got. What it did not ask for is empty."""

    tokens: tuple[int, ...]  # generated, without the stop id that ended it
    logprobs: array[float]  # of each generated token, the stop id's the last
    prompt_logprobs: array[float]  # of each token of the prompt; NaN for the first
    prompt_best: array[int]  # the likeliest token at each place of the prompt, where prompt_logprobs is at least 1
    result: GenerateResult

    @property
    def pooled(self) -> array[float]:
        """The vector of length 1."""
        return array("f", self.result.pooled or b"")


def policy_of(point: Point) -> ExpertPolicy:
    """What a request says to get this point."""
    return ExpertPolicy(per_token=point.per_token, threshold=point.threshold)


def answer_request(
    prompt: Sequence[int], policy: ExpertPolicy, max_tokens: int, stop: tuple[int, ...]
) -> GenerateRequest:
    """The likeliest tokens, up to one that is in `stop`."""
    return GenerateRequest(
        request_id=_NAME,
        prompt_ids=tuple(prompt),
        max_tokens=max_tokens,
        sampling=Sampling(seed=0, temperature=0.0),
        stop_token_ids=stop,
        experts=policy,
    )


def score_request(ids: Sequence[int], policy: ExpertPolicy) -> GenerateRequest:
    """How likely each token is, and which is the likeliest."""
    return GenerateRequest(
        request_id=_NAME,
        prompt_ids=tuple(ids),
        max_tokens=0,
        sampling=Sampling(seed=0, temperature=0.0),
        prompt_logprobs=1,
        experts=policy,
    )


def embed_request(ids: Sequence[int], policy: ExpertPolicy, pooling: Pooling) -> GenerateRequest:
    """One vector."""
    return GenerateRequest(
        request_id=_NAME,
        prompt_ids=tuple(ids),
        max_tokens=0,
        sampling=Sampling(seed=0, temperature=0.0),
        experts=policy,
        pooling=pooling,
    )


def serving(settings: Settings, point: Point, most: int = 0) -> Settings:
    """The settings of a service for this point, whose requests say the rest.

    Nothing is taken from earlier prompts: data repeats itself as traffic may not. most: the largest per_token that
    requests will ask for; 0: the model's own.
    """
    replace = msgspec.structs.replace
    allowed = max(most, settings.experts.max_per_token or 0) or None
    own = TaskExpertsSettings()
    return replace(
        settings,
        experts=replace(
            settings.experts,
            per_token=None,
            threshold=0.0,
            max_per_token=allowed,
            max_tokens_per_expert=point.max_tokens_per_expert,
            generate=own,
            score=own,
            embed=own,
        ),
        batch=replace(
            settings.batch,
            slots=settings.batch.slots if point.slots is None else point.slots,
            window_ms=settings.batch.window_ms if point.window_ms is None else point.window_ms,
            prefix_reuse="off",
        ),
        limits=replace(settings.limits, queue=100_000, queue_timeout_s=None),
    )


class Runner:
    """Owns an event loop, and one service at a time. See the module's docstring; not for use on an event loop."""

    def __init__(self, library: Library, settings: Settings, pack: Pack, *, most: int = 0) -> None:
        """settings: with engine.device settled. most: as for `serving`."""
        self.pack = pack
        self.settings = settings
        self._library = library
        self._most = most
        self._loop = asyncio.Runner()
        self._open: tuple[Settings, EnginePool, AsyncExitStack] | None = None
        self._text: ModelText | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close_service()
        finally:
            if self._text is not None:
                self._text.tokenizer.close()
            self._loop.close()

    # --------------------------------------------------------------- service

    def use(self, point: Point) -> None:
        """Have a service for this point: what its requests cannot say, the rest is up to them.

        ModelError, ConfigError, EngineError: as from serving.
        """
        self.serve(serving(self.settings, point, self._most))

    def answer_as(self, point: Point) -> None:
        """As use(), but a service that differs in nothing except its speed stays."""
        if point.max_tokens_per_expert is not None:
            self.use(msgspec.structs.replace(point, window_ms=None))
        elif self._open is None or self.service.info.batch_dependent:
            self.use(Point())

    def serve(self, settings: Settings) -> None:
        """Have a service with these settings; opens one unless it is the present one."""
        if self._open is None or self._open[0] != settings:
            self.close_service()
            self._loop.run(self._start(settings))

    def close_service(self) -> None:
        """End the engines. Harmless without."""
        if self._open is not None:
            stack, self._open = self._open[2], None
            self._loop.run(stack.aclose())

    async def _start(self, settings: Settings) -> None:
        async with AsyncExitStack() as stack:
            fleet, pool = make_service(self._library, settings, str(self.pack.path), self.manifest)
            stack.push_async_callback(fleet.stop)
            stack.callback(pool.stop)
            fleet.start()
            await fleet.wait_ready()
            self._open = settings, pool, stack.pop_all()

    @property
    def service(self) -> EnginePool:
        """The present one; its coroutines belong into `run`."""
        assert self._open is not None, "use() or serve() comes first"
        return self._open[1]

    @property
    def slots(self) -> int:
        """Requests that run at once, over all engines."""
        return sum(lane.slots for lane in self.service.lanes)

    @property
    def context(self) -> int:
        """Tokens of a request, prompt and answer."""
        return self.service.info.max_seq_len

    @property
    def manifest(self) -> Manifest:
        return self.pack.manifest

    @property
    def text(self) -> ModelText:
        """Tokenizer and chat template. ModelError: the pack has none."""
        if self._text is None:
            self._text = load_model_text(self.pack.path, self.manifest.text)
        return self._text

    def loads(self) -> list[list[int]]:
        """(token, expert) pairs by layer and expert since the service was opened; nothing for layers without experts."""
        found = [[0] * layer.experts for layer in self.manifest.layers]
        for report in self.service.reports:
            for load in report.measures.load.layers():
                found[load.layer] = [a + b for a, b in zip(found[load.layer], load.assignments, strict=True)]
        return found

    # -------------------------------------------------------------- requests

    def run(self, work: Coroutine[object, object, T]) -> T:
        """On the event loop of the service."""
        return self._loop.run(work)

    def ask(self, requests: Sequence[GenerateRequest], progress: Progress = silent) -> list[Answer]:
        """The answers to all, in the order of the requests. progress: called with those that are done, and all.

        RequestError: one of them can never be served, or the engine failed it.
        """
        return self.run(self._ask(requests, progress))

    async def _ask(self, requests: Sequence[GenerateRequest], progress: Progress) -> list[Answer]:
        done = 0

        async def finished(generation: LiveGeneration) -> Answer:
            nonlocal done
            found = await _answer(generation)
            done += 1
            progress(done, len(requests))
            return found

        found: list[Answer] = []
        if self.service.info.batch_dependent:
            for wave in self._waves(requests):
                found += await all_of([finished(one) for one in self.service.submit_all(wave)])
            return found
        gate = asyncio.Semaphore(2 * self.slots)  # what runs, and what is next

        async def one(request: GenerateRequest) -> Answer:
            async with gate:
                return await finished(self.service.submit(request))

        return await all_of([one(request) for request in requests])

    def _waves(self, requests: Sequence[GenerateRequest]) -> Iterator[list[GenerateRequest]]:
        """Requests that one engine can begin at one step."""
        memory = self.service.info.memory
        assert memory is not None, "the engine is ready"
        wave: list[GenerateRequest] = []
        left = memory.kv_tokens
        for request in requests:
            if request.max_tokens > RESULT_RECORDS:
                raise RequestError(
                    f"max_tokens is {request.max_tokens}; at most {RESULT_RECORDS} where answers depend on the batch",
                    param="max_tokens",
                )
            wanted = reserved_tokens(len(request.prompt_ids), request.max_tokens, request.n)
            if wave and (len(wave) == self.service.info.slots or wanted > left):
                yield wave
                wave, left = [], memory.kv_tokens
            wave.append(request)
            left -= wanted
        if wave:
            yield wave


async def all_of(work: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """As gather, but nothing goes on after an error."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(generation: LiveGeneration) -> Answer:
    request = generation.request
    tokens: list[int] = []
    logprobs = array("d")
    async with generation:
        async for records in generation:
            tokens += [record.token for record in records]
            logprobs.extend(record.logprob for record in records if record.logprob is not None)
        prompt = generation.prompt_records if request.prompt_logprobs is not None else ()
    if generation.result is None:
        raise EngineFaultError("the request was cancelled")
    if generation.result.stop_token is not None:
        tokens.pop()
    return Answer(
        tokens=tuple(tokens),
        logprobs=logprobs,
        prompt_logprobs=array("d", [float("nan") if one.logprob is None else one.logprob for one in prompt]),
        prompt_best=array("i", [one.top[0][0] if one.top else _NOBODY for one in prompt]),
        result=generation.result,
    )
