"""A scheduler over a fake engine, and how to ask it for something."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fake_engine import FakeEngine
from fake_service import INFO, make_request, make_scheduler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from colibrid.batch.interfaces import EngineInfo
    from colibrid.batch.request import GenerateRequest
    from colibrid.batch.scheduler import Scheduler


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
