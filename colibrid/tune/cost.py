"""What a point costs: so many requests under way at all times, each followed by the next (a closed loop).

Every point gets the same prompts and generates the same number of tokens, so that only the setting differs. Times are
those of the caller: to the first token, between tokens, of the whole request. Experts are counted by the engine in all of
it, bytes and distinct experts in steps that do nothing but decode. Several rounds of one point are measured as one.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from colibrid.batch.request import Pooling
from colibrid.model.footprint import footprint
from colibrid.report.percentiles import percentile
from colibrid.tune.progress import silent
from colibrid.tune.result import Cost, Spread
from colibrid.tune.runner import all_of, answer_request, embed_request, policy_of, score_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from colibrid.batch.pool import EnginePool
    from colibrid.batch.request import ExpertUsage, GenerateRequest
    from colibrid.model.manifest import Manifest
    from colibrid.tune.data import Data
    from colibrid.tune.progress import Progress
    from colibrid.tune.result import Point, Task
    from colibrid.tune.runner import Runner

_COUNTERS = ("steps_prefill", "steps_decode", "tokens_decode", "expert_launches")
_LEAST_OUTPUT = 8  # tokens: fewer leave no steps that only decode


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How much is asked for."""

    concurrency: int = 8
    requests: int = 64  # that are measured
    output_tokens: int = 64  # of each, where the task generates
    pooling: Pooling = "mean"


class _Seen(NamedTuple):
    """One request, in milliseconds."""

    first: float | None
    gaps: tuple[float, ...]
    whole: float
    prompt_tokens: int
    output_tokens: int
    usage: ExpertUsage


class Round(NamedTuple):
    """What one or several closed loops of a point have shown."""

    seen: tuple[_Seen, ...]
    seconds: float
    steps: int  # that bytes are of
    rows: int  # of these steps
    launches: int  # of experts in them

    def and_then(self, other: Round) -> Round:
        """Both as one."""
        return Round(
            self.seen + other.seen,
            self.seconds + other.seconds,
            self.steps + other.steps,
            self.rows + other.rows,
            self.launches + other.launches,
        )


def measure_round(runner: Runner, data: Data, point: Point, load: Load, progress: Progress = silent) -> Round:
    """Opens a service for the point if there is another one. progress: requests that are done, and all.

    Errors as of Runner.ask.
    """
    runner.use(point)
    requests = list(_requests(data, point, load, runner.context))
    return runner.run(_measure(runner, requests, data.task, load, progress))


def cost_of(found: Round, manifest: Manifest, task: Task, concurrency: int) -> Cost:
    """The figures."""
    figures = footprint(manifest)
    layers = sum(layer.experts > 0 for layer in manifest.layers)
    tokens = sum(one.output_tokens for one in found.seen) or sum(one.prompt_tokens for one in found.seen)
    firsts = [one.first for one in found.seen if one.first is not None and task == "generate"]
    whole = _spread([one.whole for one in found.seen])
    assert whole is not None, "something was asked for"
    return Cost(
        concurrency=concurrency,
        requests=len(found.seen),
        seconds=found.seconds,
        tokens_per_s=tokens / found.seconds,
        ttft_ms=_spread(firsts),
        itl_ms=_spread([gap for one in found.seen for gap in one.gaps]),
        e2e_ms=whole,
        bytes_per_token=(found.steps * figures.dense_read + found.launches * figures.mean_expert) / max(found.rows, 1),
        distinct_experts=found.launches / max(found.steps * layers, 1),
        experts_per_token=_experts(found.seen, layers),
    )


async def _measure(
    runner: Runner, requests: Sequence[GenerateRequest], task: Task, load: Load, progress: Progress
) -> Round:
    service = runner.service
    warm = requests[: min(load.concurrency, len(requests))]
    await _closed_loop(service, warm, load.concurrency, silent)
    before = _counters(service)
    began = time.perf_counter()
    seen = await _closed_loop(service, requests, load.concurrency, progress)
    seconds = time.perf_counter() - began
    counted = _since(before, _counters(service))
    steps, rows = counted["steps_prefill"], sum(one.prompt_tokens for one in seen)
    if task == "generate":
        counted = await _only_decoding(service, warm[: runner.slots]) or counted
        steps, rows = counted["steps_decode"], counted["tokens_decode"]
    return Round(tuple(seen), seconds, steps, rows, counted["expert_launches"])


# ------------------------------------------------------------------ requests


def _requests(data: Data, point: Point, load: Load, context: int) -> Iterator[GenerateRequest]:
    """As many as are measured, from the data's beginning and round again."""
    prompts = list(_prompts(data, load, context))
    assert prompts, "data that was read has something to ask"
    for index in range(load.requests):
        ids = prompts[index % len(prompts)]
        if data.task == "embed":
            yield embed_request(ids, policy_of(point), load.pooling)
        elif data.task == "score":
            yield msgspec.structs.replace(score_request(ids, policy_of(point)), prompt_logprobs=0)
        else:  # so many tokens, whatever they are: no id ends it
            yield answer_request(ids, policy_of(point), max(_LEAST_OUTPUT, load.output_tokens), ())


def _prompts(data: Data, load: Load, context: int) -> Iterator[tuple[int, ...]]:
    """What is read: of a text that is there to be scored, where something is to be generated, the first half."""
    room = context if data.task != "generate" else max(1, context - max(_LEAST_OUTPUT, load.output_tokens))
    for item in data.items:
        if data.task != "generate":
            ids = item.ids
        else:
            ids = item.prompt if item.prompt is not None else item.ids[: max(1, len(item.ids) // 2)]
        if ids:
            yield ids[:room]


async def _closed_loop(
    service: EnginePool, requests: Sequence[GenerateRequest], concurrency: int, progress: Progress
) -> list[_Seen]:
    waiting = iter(requests)
    seen: list[_Seen] = []

    async def work() -> None:
        for request in waiting:
            seen.append(await _one(service, request))
            progress(len(seen), len(requests))

    await all_of(work() for _ in range(min(concurrency, len(requests))))
    return seen


async def _one(service: EnginePool, request: GenerateRequest) -> _Seen:
    began = last = time.perf_counter()
    first: float | None = None
    gaps: list[float] = []
    async with service.submit(request) as generation:
        async for records in generation:
            now = time.perf_counter()
            passed, count = (now - last) * 1000, len(records)
            if first is None:
                first = passed  # of tokens that came with it nobody knows when they were ready
            else:
                gaps += [passed / count] * count
            last = now
    assert generation.result is not None, "an iteration that ends without an error has a result"
    result = generation.result
    return _Seen(
        first=first,
        gaps=tuple(gaps),
        whole=(time.perf_counter() - began) * 1000,
        prompt_tokens=result.prompt_tokens,
        output_tokens=result.completion_tokens,
        usage=result.experts,
    )


# ------------------------------------------------------------------ counters


async def _only_decoding(service: EnginePool, requests: Sequence[GenerateRequest]) -> dict[str, int] | None:
    """What was counted while all of these requests were decoded, and nothing else was done; None: there was no such time,
    as their prompts took longer than their answers.
    """
    started = 0
    ended = False
    begin: dict[str, int] | None = None
    found: dict[str, int] | None = None

    async def one(request: GenerateRequest) -> None:
        nonlocal started, ended, begin, found
        got = 0
        async with service.submit(request) as generation:
            async for records in generation:
                started += not got
                got += len(records)
                ended = ended or got == request.max_tokens
                if started < len(requests) or ended:
                    continue
                if begin is None:
                    begin = _counters(service)
                elif (since := _since(begin, _counters(service)))["steps_decode"]:
                    found = since  # until one of them ends

    await asyncio.gather(*map(one, requests))
    return found


def _since(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - count for name, count in before.items()}


def _counters(service: EnginePool) -> dict[str, int]:
    found = dict.fromkeys(_COUNTERS, 0)
    for report in service.reports:
        for name in _COUNTERS:
            found[name] += (report.counters or {}).get(name, 0)
    return found


def _experts(seen: Sequence[_Seen], layers: int) -> float:
    """Of a token and MoE layer. The last token that a request generates is computed by nobody."""
    rows = sum(one.prompt_tokens + max(one.output_tokens - 1, 0) for one in seen)
    return sum(one.usage.assignments for one in seen) / max(rows * layers, 1)


def _spread(values: Sequence[float]) -> Spread | None:
    """None of no values."""
    if not values:
        return None
    return Spread(p50=percentile(values, 0.5), p99=percentile(values, 0.99))
