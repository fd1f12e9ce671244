"""Several engines as one service: who gets a request, who takes over, and what clients see of a death."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import SLOTS, FakeEngine, FakeSession, collect, expected_tokens, settle, step
from fake_service import make_request, make_scheduler

from colibrid.batch.pool import MUCH, EnginePool
from colibrid.config.settings import BatchSettings
from colibrid.errors import EngineFaultError, OverloadedError, RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from colibrid.batch.generation import LiveGeneration

PROMPT = tuple(range(1, 41))  # long enough to be held


class Rig:
    """A pool over fake engines."""

    def __init__(self, engines: int, **sections: Any) -> None:
        self.engines = [FakeEngine() for _ in range(engines)]
        self.pool = EnginePool(self.engines, lambda engine, _: make_scheduler(engine, **sections))  # type: ignore[arg-type]

    def ready(self, *indexes: int) -> list[FakeSession]:
        return [self.engines[index].become_ready() for index in indexes]

    def session(self, index: int) -> FakeSession:
        session = self.engines[index].session
        assert session is not None
        return session

    async def step(self, times: int = 1) -> None:
        for _ in range(times):
            for engine in self.engines:
                if engine.session is not None:
                    await step(engine.session)

    @property
    def running(self) -> list[int]:
        return [lane.status().running for lane in self.pool.lanes]

    @property
    def queued(self) -> list[int]:
        return [lane.queued for lane in self.pool.lanes]

    async def serve(self, generation: LiveGeneration) -> list[int]:
        tokens = asyncio.create_task(collect(generation))
        for _ in range(200):
            await self.step()
            if tokens.done():
                break
        return await tokens


@pytest.fixture
async def two() -> AsyncIterator[Rig]:
    rig = Rig(2)
    rig.ready(0, 1)
    yield rig
    for engine in rig.engines:
        if engine.session is not None:
            engine.die()


async def test_requests_are_spread_over_the_engines(two: Rig) -> None:
    """Each request goes where least is to do, so both engines fill alike."""
    generations = [two.pool.submit(make_request(max_tokens=50, seed=seed)) for seed in range(2 * SLOTS)]
    await settle()
    await two.step()
    assert two.running == [SLOTS, SLOTS]
    for generation in generations:
        generation.cancel()
    await two.step(2)
    assert two.running == [0, 0]


async def test_a_prompt_goes_to_the_engine_that_holds_its_beginning(two: Rig) -> None:
    """The second turn of a conversation finds its first one, though another engine is as idle."""
    busy = two.pool.submit(make_request(max_tokens=90))  # on engine 0
    await settle()
    assert await two.serve(two.pool.submit(make_request(PROMPT, 3, seed=7))) == expected_tokens(PROMPT, 7, 3)
    assert [list(lane.scheduler.placer.holdings) != [] for lane in two.pool.lanes] == [False, True]
    also = two.pool.submit(make_request(max_tokens=90))  # least is to do on engine 1, which does nothing
    await settle()
    assert two.running == [1, 1]
    again = two.pool.submit(make_request((*PROMPT, 99), 3))
    await two.serve(again)
    assert again.result is not None
    assert again.result.cached_tokens >= len(PROMPT) - 1
    busy.cancel()
    also.cancel()
    await two.step(2)


async def test_a_much_busier_engine_does_not_get_the_prompt_that_it_holds(two: Rig) -> None:
    """Waiting costs more than a prompt: beyond a share of the slots, the other engine computes it anew."""
    await two.serve(two.pool.submit(make_request(PROMPT, 3)))
    holder = next(lane for lane in two.pool.lanes if list(lane.scheduler.placer.holdings))
    load = [
        holder.scheduler.submit(make_request(max_tokens=60, seed=seed)) for seed in range(max(1, SLOTS // MUCH) + 1)
    ]
    await settle()
    anew = two.pool.submit(make_request((*PROMPT, 99), 3))
    await two.serve(anew)
    assert anew.result is not None
    assert anew.result.cached_tokens == 0
    for generation in load:
        generation.cancel()
    await two.step(2)


async def test_a_death_fails_only_what_ran_there() -> None:
    """Requests of the dead engine end with the reason; what waited there goes on at the other, which serves on."""
    rig = Rig(2)
    rig.ready(0, 1)
    generations = [rig.pool.submit(make_request(max_tokens=30, seed=seed)) for seed in range(2 * SLOTS + 4)]
    await settle()
    assert rig.queued == [2, 2]
    doomed = [one for one in generations if one.place is not None and one._owner is rig.pool.lanes[0].scheduler]
    rig.engines[0].die()
    assert rig.pool.readiness.ready
    assert rig.pool.readiness.reason == "the engine was ended by SIGKILL"
    assert [engine.phase for engine in rig.pool.engines] == ["restarting", "ready"]
    assert rig.queued == [0, 4]
    assert len(doomed) == SLOTS
    for generation in doomed:
        with pytest.raises(EngineFaultError, match="SIGKILL"):
            await collect(generation)
    left = [one for one in generations if one not in doomed]
    done = asyncio.gather(*map(collect, left))
    await rig.step(120)
    assert await done == [expected_tokens((1, 2, 3), generations.index(one), 30) for one in left]
    assert rig.pool.idle
    rig.engines[1].die()


async def test_an_engine_that_comes_back_takes_what_waits(two: Rig) -> None:
    """What waits at one engine moves to one that has free slots, oldest first."""
    two.engines[1].die()
    generations = [two.pool.submit(make_request(max_tokens=40, seed=seed)) for seed in range(SLOTS + 3)]
    await settle()
    assert (two.running, two.queued) == ([SLOTS, 0], [3, 0])
    two.ready(1)
    await settle()
    assert (two.running, two.queued) == ([SLOTS, 3], [0, 0])
    for generation in generations:
        generation.cancel()
    await two.step(2)


async def test_free_slots_are_filled_from_the_longest_queue(two: Rig) -> None:
    """A lane that has finished its own work helps the others."""
    short = two.pool.lanes[1].scheduler.submit(make_request(max_tokens=1))
    long = [two.pool.lanes[0].scheduler.submit(make_request(max_tokens=60, seed=seed)) for seed in range(SLOTS + 3)]
    await settle()
    assert (two.running, two.queued) == ([SLOTS, 1], [3, 0])
    await two.serve(short)
    await settle()
    assert (two.running, two.queued) == ([SLOTS, 3], [0, 0])
    for generation in long:
        generation.cancel()
    await two.step(2)


async def test_an_engine_with_nothing_to_do_takes_what_has_to_wait(two: Rig) -> None:
    """Without waiting for an event of its own: there is none while it is idle."""
    long = [two.pool.lanes[0].scheduler.submit(make_request(max_tokens=60, seed=seed)) for seed in range(SLOTS + 3)]
    await settle()
    assert (two.running, two.queued) == ([SLOTS, 3], [0, 0])
    for generation in long:
        generation.cancel()
    await two.step(2)


async def test_a_lost_service_keeps_what_waits() -> None:
    """With no engine left, new requests are refused, waiting ones are served by whichever engine comes back first."""
    rig = Rig(2)
    rig.ready(0, 1)
    generations = [rig.pool.submit(make_request(max_tokens=2, seed=seed)) for seed in range(2 * SLOTS + 2)]
    await settle()
    rig.engines[0].die()
    rig.engines[1].die()
    assert not rig.pool.readiness.ready
    with pytest.raises(OverloadedError, match="not ready"):
        rig.pool.submit(make_request())
    waiting = [one for one in generations if not one.ended]
    assert len(waiting) == 2
    rig.ready(1)
    assert len(await rig.serve(waiting[0])) == 2
    assert len(await rig.serve(waiting[1])) == 2
    rig.engines[1].die()


async def test_an_engine_that_is_given_up_leaves_the_others_serving() -> None:
    """Its waiting requests move; only when the last engine is given up do they fail."""
    rig = Rig(2)
    (first,) = rig.ready(0)
    generations = [rig.pool.submit(make_request(max_tokens=9, seed=seed)) for seed in range(SLOTS + 1)]
    await settle()
    rig.engines[1].give_up()
    assert rig.pool.readiness.ready
    rig.engines[0].die()
    rig.engines[0].give_up()
    assert rig.pool.readiness.phase == "failed"
    for generation in generations:
        with pytest.raises(EngineFaultError):
            await collect(generation)
    assert rig.pool.idle
    assert first.channel.commands


async def test_the_queue_bound_is_of_all_engines_together() -> None:
    """Two engines with room for four waiting each refuse the ninth."""
    rig = Rig(2, queue=4)
    rig.ready(0, 1)
    generations = [rig.pool.submit(make_request(max_tokens=9, seed=seed)) for seed in range(2 * SLOTS + 8)]
    await settle()
    with pytest.raises(OverloadedError, match="queue is full"):
        rig.pool.submit(make_request())
    assert rig.pool.counts.queued == 8
    assert rig.pool.counts.refused == 1
    for generation in generations:
        generation.cancel()
    await rig.step(2)
    for engine in rig.engines:
        engine.die()


async def test_a_request_that_no_engine_can_hold_is_refused(two: Rig) -> None:
    """The reason is that of one engine."""
    with pytest.raises(RequestError, match="max_tokens"):
        two.pool.submit(make_request(max_tokens=100_000))


async def test_drain_waits_for_all_and_refuses_new_ones(two: Rig) -> None:
    """Draining ends when every engine is idle, and held answers may still add requests."""
    generations = [two.pool.submit(make_request(max_tokens=4, seed=seed)) for seed in range(3)]
    await settle()
    with two.pool.held():
        draining = asyncio.create_task(two.pool.drain(5.0))
        await settle()
        assert two.pool.draining
        with pytest.raises(OverloadedError, match="shutting down"):
            two.pool.submit(make_request())
        begun = two.pool.submit(make_request(max_tokens=2), begun=True)
        assert len(await two.serve(begun)) == 2
        await asyncio.gather(*map(two.serve, generations))
        assert not draining.done()
    assert await draining
    two.pool.stop()
    assert two.pool.idle


async def test_one_engine_needs_no_choice() -> None:
    """With one engine the pool is that engine's scheduler."""
    rig = Rig(1, batch=BatchSettings(slots=SLOTS))
    rig.ready(0)
    assert await rig.serve(rig.pool.submit(make_request(seed=5))) == expected_tokens((1, 2, 3), 5, 3)
    (status,) = rig.pool.engines
    assert (status.index, status.phase, status.slots, status.queued) == (0, "ready", SLOTS, 0)
    rig.engines[0].die()
