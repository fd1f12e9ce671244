"""colibrid.batch.deadline, through the scheduler."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from fake_engine import SLOTS, FakeEngine, collect, expected_tokens, settle, step

from colibrid.config.settings import BatchSettings, ExpertsSettings, LimitsSettings
from colibrid.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.batch.request import GenerateRequest
    from colibrid.batch.scheduler import Scheduler

    RequestOf = Callable[..., GenerateRequest]
    SchedulerOf = Callable[..., Scheduler]


async def test_waiting_has_an_end(scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf) -> None:
    """Who has waited too long gets 503 with Retry-After and leaves the queue; who has a slot, or came later, goes on."""
    scheduler = scheduler_of(queue_timeout_s=3.0)
    session = engine.become_ready()
    running = [scheduler.submit(request_of(seed=seed, max_tokens=2)) for seed in range(SLOTS)]
    await settle()
    early = scheduler.submit(request_of())
    await asyncio.sleep(1.5)
    late = scheduler.submit(request_of(seed=9, max_tokens=2))
    with pytest.raises(OverloadedError, match=r"queue_timeout_s = 3 s") as caught:
        await collect(early)
    assert (caught.value.code, caught.value.status) == ("server_is_overloaded", 503)
    assert (scheduler.counts.queued, scheduler.counts.failed) == (1, 1)
    await step(session, 3)
    for seed, one in enumerate(running):
        assert await collect(one) == expected_tokens((1, 2, 3), seed, 2)
    await settle()
    await step(session, 3)
    assert await collect(late) == expected_tokens((1, 2, 3), 9, 2)
    assert scheduler.idle


async def test_all_choices_end_together(scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf) -> None:
    """Of a request with several choices all end, and nothing of it stays."""
    scheduler = scheduler_of(queue_timeout_s=0.05)
    engine.become_ready()
    blocking = [scheduler.submit(request_of(seed=seed)) for seed in range(SLOTS)]
    await settle()
    choices = scheduler.submit_all([request_of(n=3)])
    for choice in choices:
        with pytest.raises(OverloadedError):
            await collect(choice)
    assert scheduler.counts.queued == 0
    for one in blocking:
        one.cancel()


async def test_the_limit_changes_while_requests_wait(
    scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf
) -> None:
    """A reload sets or lifts the limit, also for what waits already; without one requests wait on."""
    scheduler = scheduler_of(queue_timeout_s=None)
    engine.become_ready()
    blocking = [scheduler.submit(request_of(seed=seed)) for seed in range(SLOTS)]
    await settle()
    waiting = scheduler.submit(request_of())
    await asyncio.sleep(0.05)
    assert scheduler.counts.queued == 1

    def follow(timeout_s: float | None) -> None:
        limits = LimitsSettings(queue=8, queue_timeout_s=timeout_s)
        batch = BatchSettings(slots=SLOTS)
        scheduler.follow(batch=batch, limits=limits, experts=ExpertsSettings(), fingerprint="fp_1")

    follow(0.01)
    follow(None)
    await asyncio.sleep(0.05)
    assert scheduler.counts.queued == 1
    follow(0.01)
    with pytest.raises(OverloadedError):
        await collect(waiting)
    for one in blocking:
        one.cancel()
    scheduler.stop()


async def test_room_is_told_without_a_request(
    scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf
) -> None:
    """check_room refuses exactly when submit would: engine not ready, queue full, draining."""
    scheduler = scheduler_of(queue=1)
    with pytest.raises(OverloadedError, match="not ready"):
        scheduler.check_room()
    engine.become_ready()
    held = []
    for seed in range(SLOTS + 1):
        scheduler.check_room()
        held.append(scheduler.submit(request_of(seed=seed)))
    with pytest.raises(OverloadedError, match="queue is full") as caught:
        scheduler.check_room()
    assert caught.value.retry_after_s >= 1
    with pytest.raises(OverloadedError):
        scheduler.submit(request_of())
    held[0].cancel()
    scheduler.check_room()
    assert scheduler.counts.refused == 3
    scheduler.stop()
    with pytest.raises(OverloadedError, match="shutting down"):
        scheduler.check_room()
