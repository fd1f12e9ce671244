"""A generation hands on what arrives, once, and lets go however its consumer ends."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from colibrid.batch.generation import LiveGeneration
from colibrid.batch.request import ExpertUsage, GenerateRequest, GenerateResult, Sampling, TokenRecord
from colibrid.errors import EngineFaultError

REQUEST = GenerateRequest(request_id="r", prompt_ids=(1,), max_tokens=3, sampling=Sampling(seed=0))
RESULT = GenerateResult(
    finish_reason="stop",
    stop_token=3,
    prompt_tokens=1,
    completion_tokens=3,
    cached_tokens=0,
    experts=ExpertUsage(1, 1, 0, 0),
    queue_ms=0.0,
    prefill_ms=0.0,
    decode_ms=0.0,
)


class Owner:
    """Counts what a generation tells its scheduler."""

    def __init__(self) -> None:
        self.cancels = 0
        self.consumed_up_to = 0
        self.masks: list[tuple[int, bytes]] = []

    def cancelled(self, generation: LiveGeneration) -> None:
        self.cancels += 1

    def masked(self, generation: LiveGeneration, position: int, mask: bytes) -> None:
        self.masks.append((position, mask))

    def consumed(self, generation: LiveGeneration) -> None:
        self.consumed_up_to = generation.consumed


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def generation(owner: Owner) -> LiveGeneration:
    return LiveGeneration(REQUEST, owner, 0.0)


async def test_records_come_in_the_lists_in_which_they_arrived(generation: LiveGeneration, owner: Owner) -> None:
    """Everything that has arrived is one list; lists are never empty; reading is reported."""
    generation.add(1)
    generation.add(2)
    batches = aiter(generation)
    assert await anext(batches) == [TokenRecord(1), TokenRecord(2)]
    assert owner.consumed_up_to == 2
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    generation.wake()  # a false alarm yields nothing
    await asyncio.sleep(0)
    assert not waiting.done()
    generation.add(3)
    generation.finish(RESULT)
    assert await waiting == [TokenRecord(3)]
    with pytest.raises(StopAsyncIteration):
        await anext(batches)
    assert generation.result == RESULT
    assert owner.cancels == 0


async def test_an_error_comes_after_what_has_arrived(generation: LiveGeneration) -> None:
    """Tokens before a fault are delivered, then the fault is raised, and there is no result."""
    generation.add(1)
    generation.fail(EngineFaultError("the engine died"))
    batches = aiter(generation)
    assert await anext(batches) == [TokenRecord(1)]
    with pytest.raises(EngineFaultError):
        await anext(batches)
    assert generation.result is None


async def test_breaking_out_cancels(generation: LiveGeneration, owner: Owner) -> None:
    """A consumer that leaves its loop releases the slot."""
    generation.add(1)
    async for _ in generation:
        break
    for _ in range(20):
        await asyncio.sleep(0)  # the loop closes abandoned generators
    assert owner.cancels == 1


async def test_an_exception_in_the_loop_cancels(generation: LiveGeneration, owner: Owner) -> None:
    """A consumer that fails releases the slot when it leaves the block."""
    generation.add(1)

    async def consume() -> None:
        async with generation:
            async for _ in generation:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consume()
    assert owner.cancels == 1


async def test_a_cancelled_task_cancels(generation: LiveGeneration, owner: Owner) -> None:
    """A handler that is cancelled while it waits for tokens releases the slot at once."""

    async def consume() -> None:
        async for _ in generation:
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert owner.cancels == 1


async def test_leaving_the_block_without_reading_cancels(generation: LiveGeneration, owner: Owner) -> None:
    """A generation that nobody iterates is not left running."""
    async with generation:
        pass
    assert owner.cancels == 1


async def test_cancel_ends_the_iteration_quietly_and_once(generation: LiveGeneration, owner: Owner) -> None:
    """After cancel the loop ends without a result; more cancels are harmless."""
    waiting = asyncio.create_task(anext(aiter(generation), None))
    await asyncio.sleep(0)
    generation.cancel()
    generation.cancel()
    assert await waiting is None
    assert generation.result is None
    assert owner.cancels == 1


async def test_cancel_after_the_end_is_harmless(generation: LiveGeneration, owner: Owner) -> None:
    """A finished generation has no slot to release."""
    generation.finish(RESULT)
    generation.cancel()
    assert owner.cancels == 0
    assert generation.result == RESULT


async def test_a_generation_is_iterated_once(generation: LiveGeneration) -> None:
    """Two readers would each miss tokens, so the second is refused."""
    generation.finish(RESULT)
    assert [batch async for batch in generation] == []
    with pytest.raises(RuntimeError):
        aiter(generation)


def test_masks_are_for_one_position_after_another(owner: Owner) -> None:
    """At most two are ahead of the tokens, none is given twice, and an ended generation takes none."""
    generation = LiveGeneration(msgspec.structs.replace(REQUEST, masked=True), owner, 0.0)
    generation.submit_mask(0, b"a")
    for position in (0, 2, -1):
        with pytest.raises(ValueError, match="after 1 masks, 0 tokens"):
            generation.submit_mask(position, b"x")
    generation.submit_mask(1, b"b")
    with pytest.raises(ValueError, match="after 2 masks, 0 tokens"):
        generation.submit_mask(2, b"x")
    generation.add(1)
    generation.submit_mask(2, b"c")
    generation.cancel()
    generation.submit_mask(3, b"x")
    assert owner.masks == [(0, b"a"), (1, b"b"), (2, b"c")]


def test_a_request_without_masks_takes_none(generation: LiveGeneration) -> None:
    """A mask that nobody would look at is an error of the caller."""
    with pytest.raises(ValueError, match="not submitted as masked"):
        generation.submit_mask(0, b"")


def test_generations_of_one_pace_share_their_beats(owner: Owner) -> None:
    """Whenever two of one pace were woken, their next beat is the same; without a pace each moment will do."""
    generations = [LiveGeneration(REQUEST, owner, 0.0) for _ in range(3)]
    for one, pace in zip(generations, (0.25, 0.25, 0.0), strict=True):
        one.pace(pace)
        one.wake_at(99.0)
    first, second, third = generations
    first.wake_at(100.01)
    second.wake_at(100.24)
    third.wake_at(100.1)
    assert (first.due, second.due, third.due) == (100.25, 100.25, 100.1)
    second.wake_at(100.25)
    assert second.due == 100.5
