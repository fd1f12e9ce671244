"""The scheduler over a fake engine: order, bounds, coalescing, cancellation, faults."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest
from fake_engine import KV_TOKENS, RING, SLOTS, FakeEngine, FakeSession, collect, expected_tokens, settle, step

from colibrid.batch.request import ExpertPolicy, ExpertUsage, GenerateRequest, TokenRecord
from colibrid.batch.scheduler import Scheduler
from colibrid.config.settings import BatchSettings, ExpertsSettings
from colibrid.engine import abi
from colibrid.engine.channel import Event
from colibrid.errors import EngineFaultError, OverloadedError, RequestError

RequestOf = Callable[..., GenerateRequest]
SchedulerOf = Callable[..., Scheduler]


@pytest.fixture
def scheduler(scheduler_of: SchedulerOf) -> Scheduler:
    return scheduler_of()


@pytest.fixture
async def session(scheduler: Scheduler, engine: FakeEngine) -> FakeSession:
    return engine.become_ready()


# ------------------------------------------------------------------ the way down


async def test_what_has_ended_is_freed_at_once(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A generation is no part of a circle when it has ended, nor when it was cancelled while it waited."""
    gc.collect()
    gc.disable()
    try:
        generations = [scheduler.submit(request_of(max_tokens=1, seed=seed)) for seed in range(SLOTS + 1)]
        seen = [weakref.ref(one) for one in generations]
        generations.pop().cancel()
        await settle()
        await step(session, 3)
        for generation in generations:
            await collect(generation)
        del generation, generations
        await settle()
        assert [ref() for ref in seen] == [None] * len(seen)
    finally:
        gc.enable()


async def test_a_request_is_served(scheduler: Scheduler, session: FakeSession, request_of: RequestOf) -> None:
    """Tokens come in order, and the result says how it ended."""
    generation = scheduler.submit(request_of(max_tokens=3, seed=7))
    await settle()
    await step(session, 3)
    assert await collect(generation) == expected_tokens((1, 2, 3), 7, 3)
    assert generation.result is not None
    assert generation.result.finish_reason == "length"
    assert (generation.result.prompt_tokens, generation.result.completion_tokens) == (3, 3)
    assert generation.result.stop_token is None
    assert generation.result.experts == ExpertUsage(4, 10, 2, 1)
    assert min(generation.result.queue_ms, generation.result.prefill_ms, generation.result.decode_ms) >= 0
    assert scheduler.counts.finished == 1
    assert scheduler.counts.running == 0


async def test_a_stop_id_is_the_last_record(scheduler: Scheduler, session: FakeSession, request_of: RequestOf) -> None:
    """The stop id is delivered, counted, and named in the result."""
    generation = scheduler.submit(request_of(max_tokens=9, stop_token_ids=(7,)))
    await settle()
    await step(session, 3)
    assert await collect(generation) == [6, 7]
    assert generation.result is not None
    assert (generation.result.finish_reason, generation.result.stop_token) == ("stop", 7)
    assert generation.result.completion_tokens == 2


async def test_requests_of_one_turn_go_down_in_one_push(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """What is submitted together is opened and prefilled together."""
    for seed in range(SLOTS):
        scheduler.submit(request_of(seed=seed))
    await settle()
    assert len(session.channel.pushed) == 1
    kinds = [command.kind for command in session.channel.pushed[0]]
    assert kinds == [abi.CommandKind.OPEN] * SLOTS + [abi.CommandKind.PREFILL] * SLOTS
    assert session.wakes == 1


async def test_the_window_collects_company_while_idle(
    scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf
) -> None:
    """An idle engine waits window_ms for more requests, and starts early when window_requests are there."""
    scheduler = scheduler_of(batch=BatchSettings(slots=SLOTS, window_ms=1000, window_requests=3))
    session = engine.become_ready()
    scheduler.submit(request_of(max_tokens=50))
    await settle()
    assert session.channel.pushed == []
    scheduler.submit(request_of(seed=1))
    async with asyncio.timeout(60):
        while not session.channel.pushed:  # noqa: ASYNC110 - the channel has no event
            await asyncio.sleep(0.01)
    assert [len(commands) for commands in session.channel.pushed] == [4]
    scheduler.submit(request_of(seed=2))  # running: joins at once
    await settle()
    assert [len(commands) for commands in session.channel.pushed] == [4, 2]


async def test_a_full_window_goes_at_once(scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf) -> None:
    """The last request that the window has room for starts all of them."""
    scheduler = scheduler_of(batch=BatchSettings(slots=SLOTS, window_ms=1000, window_requests=2))
    session = engine.become_ready()
    scheduler.submit(request_of())
    await settle()
    scheduler.submit(request_of(seed=1))
    await settle()
    assert [len(commands) for commands in session.channel.pushed] == [4]


async def test_the_queue_is_served_in_order(scheduler: Scheduler, session: FakeSession, request_of: RequestOf) -> None:
    """With all slots taken requests wait, and the first one waiting gets the first slot that is free."""
    running = [scheduler.submit(request_of(seed=seed, max_tokens=2 + seed)) for seed in range(SLOTS)]
    waiting = [scheduler.submit(request_of(seed=10 + i, max_tokens=1)) for i in range(2)]
    await settle()
    assert scheduler.counts.queued == 2
    await step(session, 2)
    assert running[0].ended
    await step(session, 1)
    assert waiting[0].ended
    assert await collect(waiting[0]) == expected_tokens((1, 2, 3), 10, 1)
    await step(session, 1)
    assert waiting[1].ended


async def test_requests_wait_for_kv_memory(scheduler: Scheduler, session: FakeSession, request_of: RequestOf) -> None:
    """A request that does not fit beside those that run waits, though a slot is free."""
    scheduler.submit(request_of(max_tokens=3 * KV_TOKENS // 4))
    large = scheduler.submit(request_of(max_tokens=KV_TOKENS // 2))
    await settle()
    assert scheduler.counts.running == 1
    assert not large.ended
    assert scheduler.counts.queued == 1


async def test_a_full_command_ring_loses_nothing(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """When commands do not fit, the request stays queued and is pushed a little later."""
    session.channel.full = True
    generation = scheduler.submit(request_of(max_tokens=1))
    await settle()
    assert scheduler.counts.queued == 1
    session.channel.full = False
    await asyncio.sleep(0.05)
    await step(session)
    assert await collect(generation) == [6]


async def test_values_reach_the_request_block(
    scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf
) -> None:
    """Expert policy is given per layer: never above a layer's own k, none in dense layers; defaults fill the gaps."""
    scheduler = scheduler_of(experts=ExpertsSettings(per_token=3, threshold=0.25))
    session = engine.become_ready()
    scheduler.submit(request_of(logprobs=2, stop_token_ids=(9,)))
    scheduler.submit(request_of(prompt_logprobs=4, experts=ExpertPolicy(per_token=1, threshold=0.5)))
    await settle()
    first, second = session.channel.blocks[0], session.channel.blocks[1]
    assert first.policy == [(3, 0.25), (0, 0.0), (2, 0.25)]
    assert second.policy == [(1, 0.5), (0, 0.0), (1, 0.5)]
    assert (first.flags, first.top_logprobs, first.choice) == (abi.RequestFlag.LOGPROBS, 2, 0)
    assert (second.flags, second.prompt_top_logprobs) == (abi.RequestFlag.PROMPT_LOGPROBS, 4)
    assert first.stop_ids == (9,)


# -------------------------------------------------------------------- the way up


async def test_tokens_alone_make_no_plan(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in which nobody comes or goes costs no planning, also while others wait."""
    plans = []
    make = scheduler._placer.plan
    monkeypatch.setattr(scheduler._placer, "plan", lambda tokens: plans.append(tokens) or make(tokens))
    readers = [asyncio.ensure_future(collect(scheduler.submit(request_of(max_tokens=40)))) for _ in range(SLOTS + 2)]
    await settle()
    await step(session, 2)
    before = len(plans)
    await step(session, 30)
    assert len(plans) == before
    await step(session, 60)
    assert all(reader.done() for reader in readers)


async def test_all_tokens_that_are_there_come_in_one_list(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A consumer that was away gets one list, not one list per token."""
    generation = scheduler.submit(request_of(max_tokens=5))
    await settle()
    for _ in range(5):
        session.channel.step()
    await step(session)
    assert [len(records) async for records in generation] == [5]


async def test_a_slow_reader_holds_only_its_own_slot(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """Unread records stop a slot at the size of its ring; reading wakes the engine and it goes on."""
    slow = scheduler.submit(request_of(max_tokens=RING + 4))
    fast = scheduler.submit(request_of(seed=5, max_tokens=RING + 4))
    reading = asyncio.create_task(collect(fast))
    await settle()
    await step(session, RING + 6)
    assert await reading == expected_tokens((1, 2, 3), 5, RING + 4)
    assert slow.received == RING
    wakes = session.wakes
    batches = aiter(slow)
    assert len(await anext(batches)) == RING
    assert session.wakes == wakes + 1
    await step(session, 5)
    assert len(await anext(batches)) == 4


async def test_logprobs_come_from_the_records(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """The token's logprob and as many of the likeliest as were asked for; the prompt's before the first token."""
    generation = scheduler.submit(request_of(max_tokens=2, logprobs=1, prompt_logprobs=0))
    await settle()
    await step(session, 2)
    batches = aiter(generation)
    records = await anext(batches)
    assert generation.prompt_records == (TokenRecord(1, None), TokenRecord(2, -1.0), TokenRecord(3, -2.0))
    assert records == [TokenRecord(6, 0.0, ((0, 0.0),)), TokenRecord(7, -0.5, ((1, -0.5),))]
    assert [batch async for batch in batches] == []


async def test_no_tokens_asked_for(scheduler: Scheduler, session: FakeSession, request_of: RequestOf) -> None:
    """max_tokens 0 scores the prompt: no records, but prompt records and a result."""
    generation = scheduler.submit(request_of(max_tokens=0, prompt_logprobs=1))
    await settle()
    await step(session)
    assert await collect(generation) == []
    assert len(generation.prompt_records) == 3
    assert generation.result is not None
    assert (generation.result.finish_reason, generation.result.completion_tokens) == ("length", 0)


async def test_events_of_the_past_are_ignored(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """An event of another generation changes nothing."""
    generation = scheduler.submit(request_of(max_tokens=2))
    await settle()
    await step(session)
    session.channel.events.append(Event(abi.EventKind.TOKEN, 0, 99, 0, 0, 500, int(abi.Finish.STOP), 0))
    await step(session)
    assert await collect(generation) == [6, 7]


# ------------------------------------------------------------------------ bounds


async def test_a_full_queue_refuses(scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf) -> None:
    """Slots and queue full: 503 at once, with a time after which to come back; a free place is taken again."""
    scheduler = scheduler_of(queue=1)
    session = engine.become_ready()
    for seed in range(SLOTS + 1):
        scheduler.submit(request_of(seed=seed, max_tokens=1))
    with pytest.raises(OverloadedError) as caught:
        scheduler.submit(request_of())
    assert caught.value.code == "server_is_overloaded"
    assert 1 <= caught.value.retry_after_s <= 30
    assert scheduler.counts.refused == 1
    await settle()
    await step(session)
    scheduler.submit(request_of())


async def test_without_a_queue_slots_still_serve(
    scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf
) -> None:
    """limits.queue 0 means that nobody waits, not that nobody is served."""
    scheduler = scheduler_of(queue=0)
    engine.become_ready()
    for seed in range(SLOTS):
        scheduler.submit(request_of(seed=seed))
    with pytest.raises(OverloadedError):
        scheduler.submit(request_of())


async def test_choices_are_queued_all_or_none(
    scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf
) -> None:
    """If one of several does not fit, none is queued."""
    scheduler = scheduler_of(queue=0)
    engine.become_ready()
    scheduler.submit(request_of()).cancel()
    first = scheduler.submit(request_of())
    with pytest.raises(OverloadedError):
        scheduler.submit_all([request_of(seed=i) for i in range(SLOTS)])
    with pytest.raises(OverloadedError):
        scheduler.submit_all([request_of(n=SLOTS)])
    first.cancel()
    with pytest.raises(RequestError):
        scheduler.submit_all([request_of(), request_of(prompt=())])
    assert scheduler.counts.queued == 0
    assert len(scheduler.submit_all([request_of(n=2), request_of(n=SLOTS - 2)])) == SLOTS


async def test_more_than_the_server_ever_holds_is_no_overload(
    scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf
) -> None:
    """Waiting would not help, so it is 400 with both numbers, and names what to lower."""
    scheduler = scheduler_of(queue=2)
    engine.become_ready()
    for requests, param in (
        ([request_of() for _ in range(SLOTS + 3)], "prompt"),
        ([request_of(n=SLOTS), request_of(n=3)], "n"),
    ):
        with pytest.raises(RequestError, match=f"{SLOTS + 3} choices .* the {SLOTS + 2} that") as caught:
            scheduler.submit_all(requests)
        assert (caught.value.status, caught.value.param) == (400, param)


async def test_an_engine_that_loads_refuses(scheduler: Scheduler, engine: FakeEngine, request_of: RequestOf) -> None:
    """Before the engine is ready, and while it restarts, the answer is model_loading."""
    with pytest.raises(OverloadedError) as caught:
        scheduler.submit(request_of())
    assert caught.value.code == "model_loading"
    engine.become_ready()
    engine.die()
    with pytest.raises(OverloadedError) as caught:
        scheduler.submit(request_of())
    assert caught.value.code == "model_loading"


async def test_what_never_fits_is_not_queued(scheduler: Scheduler, session: FakeSession, request_of: RequestOf) -> None:
    """A request beyond the whole KV tier is 400 with both numbers, never a request that waits for ever."""
    with pytest.raises(RequestError, match=f"holds {KV_TOKENS}") as caught:
        scheduler.submit(request_of(max_tokens=KV_TOKENS))
    assert caught.value.status == 400
    assert scheduler.counts.queued == 0


# ----------------------------------------------------------------- cancellation


async def test_cancel_frees_the_slot_within_one_step(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A running request that is cancelled is closed at the next step; its tokens on the way are dropped."""
    generation = scheduler.submit(request_of(max_tokens=100))
    await settle()
    await step(session, 2)
    generation.cancel()
    await settle()
    assert session.channel.pushed[-1] == [(abi.CommandKind.CLOSE, 0, 1, 0, 0)]
    await step(session)
    assert scheduler.counts.running == 0
    assert scheduler.counts.cancelled == 1


async def test_cancel_in_the_queue_is_immediate(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A request that has no slot yet leaves no trace in the engine."""
    for seed in range(SLOTS):
        scheduler.submit(request_of(seed=seed, max_tokens=50))
    waiting = scheduler.submit(request_of(seed=99))
    await settle()
    waiting.cancel()
    assert scheduler.counts.queued == 0
    assert len(session.channel.pushed) == 1


async def test_cancel_while_the_end_is_on_its_way(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """When cancel and the last token cross, the slot is freed once and can be used again."""
    generation = scheduler.submit(request_of(max_tokens=1))
    await settle()
    session.channel.step()  # its end lies in the ring, unread
    generation.cancel()
    await step(session, 2)
    assert scheduler.counts.running == 0
    again = scheduler.submit(request_of(max_tokens=1, seed=3))
    await settle()
    await step(session)
    assert await collect(again) == [9]


async def test_a_task_that_is_cancelled_frees_its_slot(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A client that disconnects cancels its handler, which is enough."""
    task = asyncio.create_task(collect(scheduler.submit(request_of(max_tokens=100))))
    await settle()
    await step(session)
    task.cancel()
    await settle()
    await step(session)
    assert scheduler.counts.running == 0


async def test_stop_gives_the_result_up_to_now(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A consumer that has all it wants gets usage and times at once; the slot is closed at the next step."""
    generation = scheduler.submit(request_of(max_tokens=100))
    await settle()
    await step(session, 2)
    assert not scheduler.idle
    generation.stop()
    result = generation.result
    assert result is not None
    assert (result.finish_reason, result.stop_token, result.completion_tokens) == ("stop", None, 2)
    assert (result.experts.assignments, result.experts.trimmed, result.experts.dropped) == (10, 2, 1)
    generation.stop()  # harmless
    generation.cancel()
    assert generation.result is result
    await settle()
    assert session.channel.pushed[-1] == [(abi.CommandKind.CLOSE, 0, 1, 0, 0)]
    await step(session)
    counts = scheduler.counts
    assert (counts.running, counts.finished, counts.cancelled) == (0, 1, 0)
    assert scheduler.idle
    assert [batch async for batch in generation] == [[TokenRecord(6), TokenRecord(7)]]


async def test_stop_before_the_first_token_is_a_cancel(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """There is no result where nothing was computed, and the place is given back all the same."""
    running = scheduler.submit(request_of(max_tokens=100))
    await settle()
    for _ in range(SLOTS - 1):
        scheduler.submit(request_of(max_tokens=50))
    queued = scheduler.submit(request_of(seed=9))
    queued.stop()
    running.stop()
    await settle()
    await step(session)
    assert (queued.result, running.result) == (None, None)
    assert (scheduler.counts.queued, scheduler.counts.cancelled) == (0, 2)
    assert scheduler.counts.running == SLOTS - 1


async def test_stop_after_the_engine_died(
    scheduler: Scheduler, session: FakeSession, engine: FakeEngine, request_of: RequestOf
) -> None:
    """A generation that failed has no result, and stopping it changes nothing."""
    generation = scheduler.submit(request_of(max_tokens=100))
    await settle()
    await step(session)
    engine.die()
    generation.stop()
    assert generation.result is None
    assert (scheduler.counts.failed, scheduler.counts.cancelled) == (1, 0)


# ------------------------------------------------------------------------ faults


async def test_a_failed_request_does_not_touch_its_neighbours(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """FAILED ends one request with a reason; the others go on."""
    session.channel.fail_status = abi.Status.NO_TOKEN
    bad = scheduler.submit(request_of(seed=1))
    good = scheduler.submit(request_of(seed=2, max_tokens=2))
    await settle()
    await step(session, 2)
    with pytest.raises(RequestError) as caught:
        await collect(bad)
    assert caught.value.param == "logit_bias"
    assert await collect(good) == expected_tokens((1, 2, 3), 2, 2)


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (abi.Status.MEMORY, RequestError, "context_length_exceeded"),
        (abi.Status.ARGUMENT, RequestError, None),
        (abi.Status.NOT_FINITE, EngineFaultError, None),
        (abi.Status.STATE, EngineFaultError, None),
    ],
)
async def test_each_failure_has_its_error(
    status: abi.Status,
    kind: type[RequestError],
    code: str | None,
    scheduler: Scheduler,
    session: FakeSession,
    request_of: RequestOf,
) -> None:
    """What the client did wrong is 400, what we did wrong is 500."""
    session.channel.fail_status = status
    generation = scheduler.submit(request_of())
    await settle()
    await step(session)
    with pytest.raises(RequestError) as caught:
        await collect(generation)
    assert type(caught.value) is kind
    assert caught.value.code == code


async def test_a_dying_engine_fails_what_runs_and_keeps_what_waits(
    scheduler: Scheduler, session: FakeSession, engine: FakeEngine, request_of: RequestOf
) -> None:
    """Running requests get what arrived and then an error, at once; queued ones are served by the next engine."""
    running = [scheduler.submit(request_of(seed=seed, max_tokens=5)) for seed in range(SLOTS)]
    waiting = scheduler.submit(request_of(seed=50, max_tokens=1))
    await settle()
    session.channel.step()  # one token each, not read yet
    engine.die()
    batches = aiter(running[1])
    assert [record.token for record in await anext(batches)] == expected_tokens((1, 2, 3), 1, 1)
    with pytest.raises(EngineFaultError, match="SIGKILL"):
        await anext(batches)
    assert scheduler.counts.running == 0
    session = engine.become_ready()
    await settle()
    await step(session)
    assert await collect(waiting) == expected_tokens((1, 2, 3), 50, 1)


async def test_a_cancel_during_the_fault_is_harmless(
    scheduler: Scheduler, session: FakeSession, engine: FakeEngine, request_of: RequestOf
) -> None:
    """Closes that were not pushed when the engine died are not sent to the next one."""
    generation = scheduler.submit(request_of(max_tokens=50))
    await settle()
    await step(session)
    generation.cancel()
    engine.die()
    session = engine.become_ready()
    await settle()
    assert session.channel.pushed == []
    assert scheduler.counts.running == 0


async def test_giving_up_fails_what_waits(
    scheduler: Scheduler, session: FakeSession, engine: FakeEngine, request_of: RequestOf
) -> None:
    """When no engine will come any more, nobody is left waiting."""
    for seed in range(SLOTS):
        scheduler.submit(request_of(seed=seed))
    waiting = scheduler.submit(request_of(seed=9))
    await settle()
    engine.die()
    engine.give_up()
    with pytest.raises(EngineFaultError, match="engines keep dying"):
        await collect(waiting)


# ----------------------------------------------------------------------- the end


async def test_drain_serves_what_was_accepted(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """New requests are refused with code draining; running and queued ones are finished."""
    accepted = [scheduler.submit(request_of(seed=seed, max_tokens=2)) for seed in range(SLOTS + 2)]
    draining = asyncio.create_task(scheduler.drain(10))
    await settle()
    with pytest.raises(OverloadedError) as caught:
        scheduler.submit(request_of())
    assert caught.value.code == "draining"
    assert scheduler.draining
    await step(session, 5)
    assert await draining is True
    assert [await collect(generation) for generation in accepted] == [
        expected_tokens((1, 2, 3), seed, 2) for seed in range(SLOTS + 2)
    ]


async def test_drain_lets_held_answers_go_on(scheduler: Scheduler, session: FakeSession, request_of: RequestOf) -> None:
    """An answer made of several requests gets its further ones while the server drains, which waits for its end."""
    with scheduler.held():
        assert not scheduler.idle
        first = scheduler.submit(request_of(max_tokens=1, seed=7))
        draining = asyncio.create_task(scheduler.drain(10))
        await settle()
        await step(session, 2)
        assert await collect(first) == expected_tokens((1, 2, 3), 7, 1)
        await settle()
        assert not draining.done()
        with pytest.raises(OverloadedError):
            scheduler.submit(request_of())
        second = scheduler.submit(request_of(max_tokens=1, seed=7), begun=True)
        await settle()
        await step(session, 2)
        assert await collect(second) == expected_tokens((1, 2, 3), 7, 1)
    assert await draining is True


async def test_drain_has_an_end(scheduler: Scheduler, session: FakeSession, request_of: RequestOf) -> None:
    """When the time is up the rest fails with a reason, and its slots are closed."""
    running = scheduler.submit(request_of(max_tokens=100))
    await settle()
    await step(session)
    assert await scheduler.drain(0.01) is False
    with pytest.raises(OverloadedError) as caught:
        await collect(running)
    assert caught.value.code == "draining"
    await settle()
    await step(session)
    assert scheduler.counts.running == 0


async def test_an_idle_scheduler_drains_at_once(scheduler: Scheduler, session: FakeSession) -> None:
    """Nothing to wait for."""
    assert await asyncio.wait_for(scheduler.drain(10), 1) is True


async def test_stop_fails_everything(scheduler: Scheduler, session: FakeSession, request_of: RequestOf) -> None:
    """After stop nobody waits, and the engine's events are not watched any more."""
    generations = [scheduler.submit(request_of(seed=seed, max_tokens=9)) for seed in range(SLOTS + 1)]
    await settle()
    await step(session)
    scheduler.stop()
    for generation in generations:
        with pytest.raises(OverloadedError):
            await collect(generation)
    session.step()
    await settle()


async def test_info_learns_from_the_engine(scheduler: Scheduler, engine: FakeEngine) -> None:
    """Memory and device are known once an engine was ready, and stay known while it restarts."""
    assert scheduler.info.memory is None
    engine.become_ready()
    engine.die()
    assert scheduler.info.memory is not None
    assert scheduler.info.device == "fake"
    assert scheduler.readiness.phase == "restarting"


# ------------------------------------------------------------------ the consumer's pace


async def test_a_pace_joins_tokens_and_the_end_does_not_wait(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A consumer with a pace gets in one list what came before its next beat, without waiting for the next token; the end
    comes at once.
    """
    generation = scheduler.submit(request_of(max_tokens=6))
    lists: list[int] = []
    pace_s = 1.5  # far more than what is done between two beats takes, on any machine

    async def consume() -> None:
        async for records in generation:
            lists.append(len(records))
            generation.pace(pace_s)

    consuming = asyncio.create_task(consume())
    await settle()
    await step(session, 1)
    await settle()
    assert lists == [1]
    await asyncio.sleep(pace_s - asyncio.get_running_loop().time() % pace_s)  # a beat has just been
    await step(session, 1)
    await settle()
    assert lists == [1, 1]  # the pace counts from the list after the first on
    for _ in range(3):
        await step(session, 1)
        await settle()
    assert lists == [1, 1]
    async with asyncio.timeout(60):
        while len(lists) == 2:  # noqa: ASYNC110 - the condition is of the other side
            await asyncio.sleep(0.01)
    assert lists == [1, 1, 3]
    began = asyncio.get_running_loop().time()
    await step(session, 1)
    await consuming
    assert asyncio.get_running_loop().time() - began < pace_s - 0.5
    assert lists == [1, 1, 3, 1]
