"""Several engines behind one daemon: what a second one adds, that it gives the same tokens, and what one death costs.

    python bench/replicas.py --device cuda --engines 1,2 --shape qwen3-30b-a3b      one engine a GPU
    python bench/replicas.py --device cpu --engines 1,2                             the bundled model, shares of the cores

Requests go through pool, schedulers and engine processes; there is no HTTP. For each number of engines the same requests
are kept running, as many at once as --clients says. Then one of the engines is killed in mid-stream: only what ran there
may fail, and the others must not stand still. Exits 1 if a token differs or a request fails that should not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from colibrid.batch.request import GenerateRequest, Sampling
from colibrid.batch.service import make_service
from colibrid.cli.device import settled
from colibrid.cli.models import resolve_model
from colibrid.cli.shapes import SHAPES, write_shape
from colibrid.config.environment import read_environment
from colibrid.config.settings import Settings
from colibrid.engine.library import Library
from colibrid.errors import EngineFaultError
from colibrid.model.pack import open_pack

if TYPE_CHECKING:
    from colibrid.batch.pool import EnginePool
    from colibrid.engine.fleet import Fleet

Tokens = tuple[int, ...]


class Load(NamedTuple):
    """What is asked."""

    clients: int
    requests: int
    prompt_tokens: int
    max_tokens: int
    vocab: int

    def request(self, number: int) -> GenerateRequest:
        """Always the same for a number."""
        dice = random.Random(number)  # noqa: S311 (repeatable prompts, not secrets)
        prompt = tuple(dice.randrange(self.vocab) for _ in range(self.prompt_tokens))
        sampling = Sampling(seed=number, temperature=0.7)
        return GenerateRequest(request_id="r", prompt_ids=prompt, max_tokens=self.max_tokens, sampling=sampling)


async def ask(pool: EnginePool, request: GenerateRequest) -> Tokens:
    """All tokens of one request."""
    async with pool.submit(request) as generation:
        return tuple([record.token async for records in generation for record in records])


async def keep_busy(pool: EnginePool, load: Load) -> tuple[float, list[Tokens]]:
    """Seconds for all requests, and their tokens in order."""
    waiting = iter(range(load.requests))
    answers: dict[int, Tokens] = {}

    async def client() -> None:
        for number in waiting:
            answers[number] = await ask(pool, load.request(number))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(load.clients):
            group.create_task(client())
    return time.perf_counter() - began, [answers[number] for number in range(load.requests)]


async def all_ready(fleet: Fleet) -> float:
    """Seconds until every engine is ready."""
    began = time.perf_counter()
    while not all(one.readiness.ready for one in fleet.supervisors):
        if fleet.failure is not None:
            raise fleet.failure
        await asyncio.sleep(0.002)
    return time.perf_counter() - began


async def kill_one(fleet: Fleet, pool: EnginePool, load: Load) -> tuple[int, int, float, float]:
    """Requests that failed and that were served, the longest gap between tokens of the others, seconds to recover."""
    failed, served, gap = 0, 0, 0.0

    async def one(number: int) -> None:
        nonlocal failed, served, gap
        last = None
        try:
            async with pool.submit(load.request(number)) as generation:
                async for _ in generation:
                    now = time.perf_counter()
                    gap = max(gap, now - (last or now))
                    last = now
            served += 1
        except EngineFaultError:
            failed += 1

    fresh = range(load.requests, load.requests + load.clients)  # prompts that no engine holds
    tasks = [asyncio.create_task(one(number)) for number in fresh]
    await asyncio.sleep(0.2)
    victim = fleet.supervisors[max(range(len(pool.lanes)), key=lambda index: pool.engines[index].running)]
    if victim.engine_pid is None:
        raise SystemExit("a busy engine has no process")
    os.kill(victim.engine_pid, signal.SIGKILL)
    while victim.readiness.ready:  # noqa: ASYNC110 - the pidfd tells the supervisor, not us
        await asyncio.sleep(0.001)
    if not pool.readiness.ready:
        raise SystemExit("the pool is not ready though another engine is")
    recovered = await all_ready(fleet)
    await asyncio.gather(*tasks)
    return failed, served, gap, recovered


async def serve(
    settings: Settings, folder: str, manifest: Any, stack: AsyncExitStack
) -> tuple[Fleet, EnginePool, float]:
    """Engines that are all ready, and how long that took."""
    fleet, pool = make_service(Library(), settings, folder, manifest)
    stack.push_async_callback(fleet.stop)
    stack.callback(pool.stop)
    fleet.start()
    return fleet, pool, await all_ready(fleet)


async def main(args: argparse.Namespace) -> int:
    library, environment = Library(), read_environment()
    same: list[Tokens] | None = None
    bad = 0
    with TemporaryDirectory() as place:
        model = str(write_shape(args.shape, Path(place))) if args.shape else args.model
        print(f"{'engines':7} | ready s | requests/s | tokens/s | of each engine")
        for count in args.engines:
            raw = {
                "engine": {"device": args.device, "replicas": count},
                "model": {"weights": "dummy" if args.shape else "files", "max_seq_len": args.context},
            }
            settings = settled(msgspec.convert(raw, Settings), model, environment, library)
            resolved = resolve_model(model, settings, environment, library)
            pack = open_pack(resolved.path, check_files=not args.shape)
            load = Load(args.clients, args.requests, args.prompt, args.tokens, pack.manifest.hyperparameters.vocab_size)
            async with AsyncExitStack() as stack:
                fleet, pool, ready = await serve(settings, str(pack.path), pack.manifest, stack)
                await keep_busy(pool, load._replace(requests=args.clients))  # warms up
                before = [_done(one) for one in fleet.supervisors]
                seconds, answers = await keep_busy(pool, load)
                done = [_done(one) - was for one, was in zip(fleet.supervisors, before, strict=True)]
                rate = sum(map(len, answers)) / seconds
                print(f"{count:7} | {ready:7.2f} | {args.requests / seconds:10.1f} | {rate:8.0f} | {done} requests")
                same = same or answers
                if answers != same:
                    bad += 1
                    print("  other tokens than with the first number of engines")
                if count > 1:
                    failed, served, gap, recovered = await kill_one(fleet, pool, load)
                    print(
                        f"  one of them killed: {failed} requests failed, {served} served, longest gap of the others "
                        f"{gap * 1e3:.0f} ms, all ready again after {recovered:.2f} s"
                    )
                    bad += failed > load.clients // count + 1
    return 1 if bad else 0


def _done(supervisor: Any) -> int:
    process = supervisor._process  # noqa: SLF001 (looked at only)
    return int(process.channel.stats()[1].requests_done)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a second engine adds, and what the death of one costs.")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--engines", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    sys.exit(asyncio.run(main(parser.parse_args())))
