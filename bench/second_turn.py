"""Time to the first token of a conversation's second turn, with its first turn held and without.

    python bench/second_turn.py [MODEL] [--shape NAME] [--device cpu|cuda] [--held 1500] [--new 32] [--repeat 9]

One engine serves both, in turns: without, the same prompt comes as another tenant's, who holds nothing. Answers are
compared: reuse changes no token. Times are from submission to the first token, through scheduler and engine process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from colibrid.batch.request import GenerateRequest, Sampling
from colibrid.batch.service import make_service
from colibrid.cli.device import settled
from colibrid.cli.models import resolve_model
from colibrid.cli.shapes import SHAPES, write_shape
from colibrid.config.environment import read_environment
from colibrid.config.settings import BatchSettings, EngineSettings, ModelSettings, Settings
from colibrid.engine.library import Library
from colibrid.model.pack import open_pack

if TYPE_CHECKING:
    from colibrid.batch.interfaces import GenerationService

ANSWER = 64  # tokens of the first turn


def settings_of(args: argparse.Namespace) -> Settings:
    context = args.held + ANSWER + args.new + 16
    return Settings(
        batch=BatchSettings(slots=4),
        model=ModelSettings(max_seq_len=context, weights="dummy" if args.shape else "files"),
        engine=EngineSettings(device=args.device),
    )


async def ask(
    scheduler: GenerationService, prompt: list[int], tenant: str, max_tokens: int
) -> tuple[float, list[int], int]:
    """Milliseconds to the first token, the tokens, and how many of the prompt were held."""
    request = GenerateRequest(
        request_id="second-turn",
        prompt_ids=tuple(prompt),
        max_tokens=max_tokens,
        sampling=Sampling(seed=0, temperature=0.0),
        tenant=tenant,
    )
    began = time.perf_counter()
    first, tokens = 0.0, []
    async with scheduler.submit(request) as generation:
        async for records in generation:
            first = first or time.perf_counter() - began
            tokens += [record.token for record in records]
    assert generation.result is not None
    return first * 1000, tokens, generation.result.cached_tokens


async def measure(scheduler: GenerationService, vocab: int, args: argparse.Namespace) -> None:
    dice = random.Random(1)  # noqa: S311 (repeatable prompts, not secrets)
    times: dict[str, list[float]] = {"first turn": [], "held": [], "not held": []}
    for number in range(args.repeat + 1):  # the first one warms up
        prompt = [dice.randrange(vocab) for _ in range(args.held)]
        first, answer, _ = await ask(scheduler, prompt, f"with {number}", ANSWER)
        turn = [*prompt, *answer, *(dice.randrange(vocab) for _ in range(args.new))]
        held, tokens, cached = await ask(scheduler, turn, f"with {number}", 4)
        not_held, same, none = await ask(scheduler, turn, f"without {number}", 4)
        if tokens != same or none or cached < args.held:
            raise SystemExit(f"turn {number}: {cached} and {none} tokens held, {tokens} and {same} generated")
        if number:
            for name, value in zip(times, (first, held, not_held), strict=True):
                times[name].append(value)
    print(f"{'':12} | prompt tokens | held | first token ms: median | least | most")
    rows = (("first turn", args.held, 0), ("held", len(turn), cached), ("not held", len(turn), 0))
    for name, prompt_tokens, found in rows:
        values = times[name]
        print(
            f"{name:12} | {prompt_tokens:13} | {found:4} | {statistics.median(values):22.2f} | "
            f"{min(values):5.2f} | {max(values):5.2f}"
        )
    print(f"ratio {statistics.median(times['held']) / statistics.median(times['not held']):.3f}")


async def main(args: argparse.Namespace) -> None:
    library, environment = Library(), read_environment()
    settings = settled(settings_of(args), args.model, environment, library)
    with ExitStack() as stack:
        model = args.model
        if args.shape:
            model = str(write_shape(args.shape, Path(stack.enter_context(TemporaryDirectory()))))
        resolved = resolve_model(model, settings, environment, library)
        pack = open_pack(resolved.path, check_files=not args.shape)
        fleet, pool = make_service(library, settings, str(pack.path), pack.manifest)
        fleet.start()
        try:
            await fleet.wait_ready()
            print(f"{pack.manifest.name} on {pool.info.device}, {args.repeat} turns")
            await measure(pool, pack.manifest.hyperparameters.vocab_size, args)
        finally:
            pool.stop()
            await fleet.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time to the first token of a second turn, held and not held.")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--held", type=int, default=1500)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=9)
    asyncio.run(main(parser.parse_args()))
