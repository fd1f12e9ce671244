"""A scheduler over a fake engine, and a request for it: for tests of one engine and of several."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fake_engine import ROW, SLOTS, VOCAB

from colibrid.batch.interfaces import EngineInfo
from colibrid.batch.measures import ExpertLoad, Measures
from colibrid.batch.request import GenerateRequest, Sampling
from colibrid.batch.scheduler import Scheduler
from colibrid.config.settings import BatchSettings, ExpertsSettings, LimitsSettings

if TYPE_CHECKING:
    from colibrid.batch.scheduler import Engine

INFO = EngineInfo(
    model_id="fake",
    family="Fake",
    vocab_size=VOCAB,
    max_seq_len=1000,
    slots=SLOTS,
    experts_per_token=4,
    experts_most=4,
    batch_dependent=False,
    hidden=8,
    device="cpu",
    fingerprint="fp_0",
)
LAYER_EXPERTS = (4, 0, 2)
LAYER_SIZES = (4, 0, 3)


def make_request(
    prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 3, seed: int = 0, **more: Any
) -> GenerateRequest:
    sampling = more.pop("sampling", None) or Sampling(seed=seed)
    return GenerateRequest(request_id="r", prompt_ids=prompt, max_tokens=max_tokens, sampling=sampling, **more)


def make_scheduler(engine: Engine, *, queue: int = 8, info: EngineInfo = INFO, **sections: Any) -> Scheduler:
    return Scheduler(
        engine,
        info,
        LAYER_EXPERTS,
        batch=sections.get("batch", BatchSettings(slots=SLOTS)),
        limits=LimitsSettings(queue=queue, queue_timeout_s=sections.get("queue_timeout_s", 300.0)),
        experts=sections.get("experts", ExpertsSettings()),
        measures=Measures(ExpertLoad(LAYER_SIZES, ROW, INFO.max_seq_len)),
    )


def call_on(loop: asyncio.AbstractEventLoop, turns: int, function: object, *arguments: object) -> object:
    """Call on the loop, then let everything that is due run: so many turns of it."""

    async def run() -> object:
        assert callable(function)
        result = function(*arguments)
        for _ in range(turns):
            await asyncio.sleep(0)
        return result

    return loop.run_until_complete(run())
