"""A scheduler over a fake engine, and how to ask it for something."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import SLOTS, VOCAB, FakeEngine

from colibrid.batch.interfaces import EngineInfo
from colibrid.batch.request import GenerateRequest, Sampling
from colibrid.batch.scheduler import Scheduler
from colibrid.config.settings import BatchSettings, ExpertsSettings, LimitsSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

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


def make_request(
    prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 3, seed: int = 0, **more: Any
) -> GenerateRequest:
    sampling = more.pop("sampling", None) or Sampling(seed=seed)
    return GenerateRequest(request_id="r", prompt_ids=prompt, max_tokens=max_tokens, sampling=sampling, **more)


def make_scheduler(engine: FakeEngine, *, queue: int = 8, info: EngineInfo = INFO, **sections: Any) -> Scheduler:
    return Scheduler(
        engine,
        info,
        LAYER_EXPERTS,
        batch=sections.get("batch", BatchSettings(slots=SLOTS)),
        limits=LimitsSettings(queue=queue),
        experts=sections.get("experts", ExpertsSettings()),
    )


@pytest.fixture
def request_of() -> Callable[..., GenerateRequest]:
    return make_request


@pytest.fixture
def info() -> EngineInfo:
    return INFO


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    if engine.session is not None:
        engine.die()


@pytest.fixture
def scheduler_of(engine: FakeEngine) -> Callable[..., Scheduler]:
    """Makes a scheduler; the engine is not ready yet."""
    return lambda **sections: make_scheduler(engine, **sections)
