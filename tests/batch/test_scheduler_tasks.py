"""What the scheduler adds to a request by its task: expert policies, and the pooled vector of its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fake_engine import settle

from colibrid.batch.request import ExpertPolicy, GenerateRequest
from colibrid.batch.scheduler import Scheduler
from colibrid.config.settings import ExpertsSettings, TaskExpertsSettings
from colibrid.engine import abi

if TYPE_CHECKING:
    from fake_engine import FakeEngine

RequestOf = Callable[..., GenerateRequest]
SchedulerOf = Callable[..., Scheduler]


async def test_experts_follow_the_task(scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf) -> None:
    """The request's own word, then its task's setting (generate, score, embed; also by layer), then the general one."""
    task = TaskExpertsSettings
    scheduler = scheduler_of(
        experts=ExpertsSettings(
            per_token=4,
            threshold=0.5,
            generate=task(per_token=3),
            score=task(threshold=0.1),
            embed=task(per_token=[2, 0, 1]),
        )
    )
    session = engine.become_ready()
    scheduler.submit(request_of())
    scheduler.submit(request_of(max_tokens=0))
    scheduler.submit(request_of(max_tokens=0, pooling="last"))
    scheduler.submit(request_of(experts=ExpertPolicy(per_token=1, threshold=0.0)))
    await settle()
    blocks = session.channel.blocks
    assert [blocks[slot].policy for slot in range(4)] == [
        [(3, 0.5), (0, 0.0), (2, 0.5)],
        [(4, 0.1), (0, 0.0), (2, 0.1)],
        [(2, 0.5), (0, 0.0), (1, 0.5)],
        [(1, 0.0), (0, 0.0), (1, 0.0)],
    ]
    assert blocks[2].flags == abi.RequestFlag.POOL_LAST


async def test_a_pooled_vector_comes_with_the_result(
    scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf
) -> None:
    """It is copied when the end is told, before the slot can be opened again."""
    scheduler = scheduler_of()
    session = engine.become_ready()
    generation = scheduler.submit(request_of(max_tokens=0, pooling="mean"))
    await settle()
    session.step()
    assert [record async for records in generation for record in records] == []
    assert generation.result is not None
    assert generation.result.pooled == b"\0\0\x80?"
