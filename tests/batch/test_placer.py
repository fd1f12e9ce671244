"""Choices share one prompt, prompts that begin alike share what is computed, and memory is found for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from fake_engine import KV_TOKENS, MASK_BYTES, SLOTS, FakeEngine, FakeSession, collect, expected_tokens, settle, step

from colibrid.batch.request import ExpertPolicy, GenerateRequest
from colibrid.batch.scheduler import Scheduler
from colibrid.config.settings import BatchSettings, ExpertsSettings
from colibrid.engine import abi
from colibrid.errors import EngineFaultError

if TYPE_CHECKING:
    from colibrid.batch.generation import LiveGeneration
    from colibrid.batch.interfaces import EngineInfo

RequestOf = Callable[..., GenerateRequest]
SchedulerOf = Callable[..., Scheduler]
SYSTEM = tuple(range(100, 130))
PROMPT = (*SYSTEM, 5, 6)


async def serve(session: FakeSession, generation: LiveGeneration) -> list[int]:
    """Steps until it ends."""
    reader = asyncio.ensure_future(collect(generation))
    for _ in range(100):
        await settle()
        if reader.done():
            return await reader
        await step(session)
    raise AssertionError("it does not end")


def opens(session: FakeSession) -> list[int]:
    """Slots that were opened, in order."""
    return [one.slot for push in session.channel.pushed for one in push if one.kind == abi.CommandKind.OPEN]


def mask_of(*tokens: int) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(MASK_BYTES, "little")


@pytest.fixture
def scheduler(scheduler_of: SchedulerOf, info: EngineInfo) -> Scheduler:
    return scheduler_of(info=msgspec.structs.replace(info, output_is_prompt=True))


@pytest.fixture
async def session(scheduler: Scheduler, engine: FakeEngine) -> FakeSession:
    return engine.become_ready()


# ------------------------------------------------------------------------ order


async def test_a_lower_priority_is_placed_earlier(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """Whoever has the lower number goes first, equals in the order of their arrival; what runs is left alone."""
    running = [scheduler.submit(request_of(max_tokens=4, priority=5)) for _ in range(SLOTS)]
    await settle()
    waiting = [scheduler.submit(request_of(seed=i, priority=i % 3 - 1)) for i in range(6)]
    await step(session, 3)
    assert not any(generation.ended for generation in running)
    await step(session)
    assert all(generation.ended for generation in running)
    placed = {one.place.slot: i for i, one in enumerate(waiting) if one.place is not None}
    assert placed == {0: 0, 1: 3, 2: 1, 3: 4}


# ------------------------------------------------------------------------ masks


async def test_a_masked_request_generates_what_it_is_allowed(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """Each token waits for its own mask, and nobody else does."""
    masked = scheduler.submit(request_of(max_tokens=3, masked=True))
    other = scheduler.submit(request_of(max_tokens=6, seed=3))
    await settle()
    await step(session, 7)
    assert other.received == 6
    assert masked.received == 0
    for position, token in enumerate((70, 999, 0)):
        masked.submit_mask(position, mask_of(token))
        await settle()
        await step(session, 2)
        assert masked.received == position + 1
    assert await collect(masked) == [70, 999, 0]
    assert await collect(other) == expected_tokens((1, 2, 3), 3, 6)


async def test_masks_may_come_before_the_slot(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """What is allowed while a request waits in the queue is written when it is placed."""
    running = [scheduler.submit(request_of(max_tokens=2)) for _ in range(SLOTS)]
    waiting = scheduler.submit(request_of(max_tokens=2, masked=True))
    waiting.submit_mask(0, mask_of(5, 6))
    waiting.submit_mask(1, mask_of(8))
    await settle()
    await step(session, 6)
    assert all(generation.ended for generation in running)
    assert await collect(waiting) == [5, 8]
    assert session.channel.pushed[-1][-1].kind == abi.CommandKind.SET


async def test_a_mask_waits_for_room_in_the_command_ring(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A mask is not lost when the ring is full, nor told twice."""
    masked = scheduler.submit(request_of(max_tokens=2, masked=True))
    await settle()
    session.channel.full = True
    masked.submit_mask(0, mask_of(4))
    await settle()
    session.channel.full = False
    await asyncio.sleep(0.02)
    masked.submit_mask(1, mask_of(3))
    await settle()
    sets = [command.start for push in session.channel.pushed for command in push if command.kind == abi.CommandKind.SET]
    assert sets == [0, 1]
    await step(session, 2)
    assert await collect(masked) == [4, 3]


async def test_a_mask_of_another_size_is_refused(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A mask covers the vocabulary exactly; the position is still free afterwards."""
    masked = scheduler.submit(request_of(max_tokens=1, masked=True))
    for size in (0, MASK_BYTES - 4, MASK_BYTES + 4):
        with pytest.raises(ValueError, match=f"a mask of {size} bytes"):
            masked.submit_mask(0, bytes(size))
    masked.submit_mask(0, mask_of(1))
    await settle()
    await step(session)
    assert await collect(masked) == [1]


async def test_masks_of_an_engine_that_died_are_forgotten(
    scheduler: Scheduler, engine: FakeEngine, session: FakeSession, request_of: RequestOf
) -> None:
    """The next engine gets only what its own requests are allowed."""
    lost = scheduler.submit(request_of(max_tokens=2, masked=True))
    await settle()
    session.channel.full = True
    lost.submit_mask(0, mask_of(4))
    engine.die()
    lost.submit_mask(1, mask_of(4))
    with pytest.raises(EngineFaultError):
        await collect(lost)
    fresh = engine.become_ready()
    masked = scheduler.submit(request_of(max_tokens=1, masked=True))
    masked.submit_mask(0, mask_of(9))
    await settle()
    await step(fresh, 2)
    assert await collect(masked) == [9]
    assert sum(command.kind == abi.CommandKind.SET for push in fresh.channel.pushed for command in push) == 1


# ---------------------------------------------------------------------- choices


async def test_choices_share_one_prompt(scheduler: Scheduler, session: FakeSession, request_of: RequestOf) -> None:
    """The prompt is computed once, each other choice adds its last token; every choice has its own output."""
    generations = scheduler.submit_all([request_of(prompt=PROMPT, n=3, max_tokens=4, seed=7)])
    assert [generation.choice for generation in generations] == [0, 1, 2]
    await settle()
    assert opens(session) == [0]
    assert scheduler.counts.running == 3
    await step(session, 8)
    for choice, generation in enumerate(generations):
        assert await collect(generation) == expected_tokens(PROMPT, 7, 4, choice)
        assert generation.result is not None
        assert (generation.result.prompt_tokens, generation.result.cached_tokens) == (len(PROMPT), 0)
    assert session.channel.computed == len(PROMPT) + 2
    assert session.channel.forgotten == 0
    scheduler._placer.check()


async def test_choices_wait_for_all_their_slots(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """None of them starts before there is a slot for each, and nobody overtakes them."""
    first = scheduler.submit(request_of(max_tokens=3))
    choices = scheduler.submit_all([request_of(n=SLOTS, max_tokens=2)])
    last = scheduler.submit(request_of(max_tokens=1))
    await settle()
    await step(session)
    assert opens(session) == [0]
    await step(session, 4)
    assert first.ended
    await step(session, 6)
    assert all(generation.ended for generation in choices)
    assert await serve(session, last) == expected_tokens((1, 2, 3), 0, 1)


async def test_prompts_of_one_token_are_not_shared(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """All choices open at once, since each has to compute the last token anyway."""
    generations = scheduler.submit_all([request_of(prompt=(8,), n=3, max_tokens=2)])
    await settle()
    assert opens(session) == [0, 1, 2]
    await step(session, 3)
    assert [await collect(one) for one in generations] == [expected_tokens((8,), 0, 2, choice) for choice in range(3)]


async def test_prompt_logprobs_are_those_of_the_first_choice(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """The others compute no position of the prompt but the last, and show the same records."""
    generations = scheduler.submit_all([request_of(n=2, max_tokens=1, prompt_logprobs=1)])
    await settle()
    await step(session, 4)
    for generation in generations:
        await collect(generation)
        assert [record.token for record in generation.prompt_records] == [1, 2, 3]
        assert generation.prompt_records[2].logprob == -2.0


async def test_scoring_alone_ends_every_choice(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """With max_tokens 0 the others end as the first one does, without a token."""
    generations = scheduler.submit_all([request_of(n=3, max_tokens=0, prompt_logprobs=0)])
    await settle()
    await step(session, 3)
    for generation in generations:
        assert await collect(generation) == []
        assert generation.result is not None
        assert len(generation.prompt_records) == 3


async def test_a_stop_ends_one_choice_only(scheduler: Scheduler, session: FakeSession, request_of: RequestOf) -> None:
    """A stop id, and a consumer that has enough, end their own choice and leave the others to their end."""
    tokens = expected_tokens(PROMPT, 0, 8, 1)
    generations = scheduler.submit_all([request_of(prompt=PROMPT, n=3, max_tokens=8, stop_token_ids=(tokens[2],))])
    await settle()
    await step(session, 2)
    generations[0].stop()
    assert generations[0].result is not None
    await step(session, 9)
    assert [len(generation.tokens) for generation in generations] == [2, 3, 2]  # choice 2 meets the same id earlier
    assert all(generation.result is not None for generation in generations)
    assert scheduler.idle


async def test_cancelling_all_choices_frees_all_slots(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """Before, while and after the prompt is computed: running and reserved slots are free within one step."""
    for steps in range(4):
        generations = scheduler.submit_all([request_of(prompt=PROMPT, n=SLOTS, max_tokens=8, seed=steps)])
        await settle()
        await step(session, steps)
        for generation in generations:
            generation.cancel()
        await settle()
        await step(session)
        assert scheduler.counts.running == 0
        assert scheduler.idle
        scheduler._placer.check()


async def test_the_others_go_on_when_the_first_choice_leaves_early(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """Without a first choice the next one computes the prompt; what each generates does not change."""
    generations = scheduler.submit_all([request_of(prompt=PROMPT, n=3, max_tokens=3)])
    await settle()
    generations[0].cancel()
    await settle()
    await step(session, 10)
    for choice in (1, 2):
        assert await collect(generations[choice]) == expected_tokens(PROMPT, 0, 3, choice)
    assert scheduler.idle
    scheduler._placer.check()


async def test_a_failed_prompt_is_tried_by_the_next_choice(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A failure is the first choice's own; if it was the prompt's, the others will find out."""
    session.channel.fail_status = abi.Status.NOT_FINITE
    generations = scheduler.submit_all([request_of(prompt=PROMPT, n=2, max_tokens=2)])
    await settle()
    await step(session, 6)
    with pytest.raises(EngineFaultError):
        await collect(generations[0])
    assert await collect(generations[1]) == expected_tokens(PROMPT, 0, 2, 1)


async def test_masks_of_reserved_slots_go_down_with_their_opening(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A choice may be masked before the engine knows of it."""
    generations = scheduler.submit_all([request_of(prompt=PROMPT, n=2, max_tokens=1, masked=True)])
    await settle()
    generations[1].submit_mask(0, (1 << 77).to_bytes(MASK_BYTES, "little"))
    generations[0].submit_mask(0, (1 << 3).to_bytes(MASK_BYTES, "little"))
    await settle()
    await step(session, 4)
    assert [await collect(generation) for generation in generations] == [[3], [77]]


async def test_choices_of_a_lost_engine_fail_together(
    scheduler: Scheduler, engine: FakeEngine, session: FakeSession, request_of: RequestOf
) -> None:
    """Also those that the engine had not heard of yet."""
    generations = scheduler.submit_all([request_of(prompt=PROMPT, n=3)])
    await settle()
    engine.die()
    for generation in generations:
        with pytest.raises(EngineFaultError):
            await collect(generation)
    assert scheduler.idle
    scheduler._placer.check()


# ----------------------------------------------------------------- prefix reuse


async def ask(scheduler: Scheduler, session: FakeSession, request: GenerateRequest) -> tuple[int, int]:
    """Serves a request. Returns the prompt tokens that were computed, and what it says was cached."""
    before = session.channel.computed
    generation = scheduler.submit(request)
    tokens = await serve(session, generation)
    assert tokens == expected_tokens(request.prompt_ids, request.sampling.seed, request.max_tokens)
    assert generation.result is not None
    scheduler._placer.check()
    assert session.channel.forgotten == 0
    return session.channel.computed - before, generation.result.cached_tokens


async def test_a_second_turn_computes_only_what_is_new(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """Prompt and answer of the first turn are there, but for the answer's last token, which never went in."""
    assert await ask(scheduler, session, request_of(prompt=PROMPT, max_tokens=5)) == (len(PROMPT), 0)
    turn = (*PROMPT, *expected_tokens(PROMPT, 0, 5), 7, 8, 9)
    held = len(PROMPT) + 4
    assert await ask(scheduler, session, request_of(prompt=turn, max_tokens=5)) == (len(turn) - held, held)
    assert await ask(scheduler, session, request_of(prompt=turn, max_tokens=5)) == (1, len(turn) - 1)


async def test_a_generated_answer_is_computed_again_where_bits_would_differ(
    scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf
) -> None:
    """On such a backend only what was computed as prompt is used."""
    scheduler = scheduler_of()
    session = engine.become_ready()
    session.channel.output_is_prompt = False
    await ask(scheduler, session, request_of(prompt=PROMPT, max_tokens=5))
    turn = (*PROMPT, *expected_tokens(PROMPT, 0, 5), 7, 8, 9)
    assert await ask(scheduler, session, request_of(prompt=turn)) == (len(turn) - len(PROMPT), len(PROMPT))


async def test_a_busy_slot_shares_its_prompt(scheduler: Scheduler, session: FakeSession, request_of: RequestOf) -> None:
    """A system prompt is used while the request that brought it still generates."""
    first = scheduler.submit(request_of(prompt=PROMPT, max_tokens=60))
    await settle()
    await step(session)
    cached = len(SYSTEM)
    prompt = (*SYSTEM, 9, 9, 9)
    assert await ask(scheduler, session, request_of(prompt=prompt, max_tokens=3)) == (3, cached)
    assert not first.ended
    assert await serve(session, first) == expected_tokens(PROMPT, 0, 60)


@pytest.mark.parametrize(
    ("reuse", "tenants", "cached"),
    [("key", ("a", "a"), True), ("key", ("a", "b"), False), ("all", ("a", "b"), True), ("off", ("a", "a"), False)],
)
async def test_keys_are_kept_apart(
    reuse: str, tenants: tuple[str, str], cached: bool, scheduler_of: SchedulerOf, engine: FakeEngine,
    request_of: RequestOf,
) -> None:  # fmt: skip
    """By default what one API key has computed is not used for another, since timing would tell that it was."""
    scheduler = scheduler_of(batch=BatchSettings(slots=SLOTS, prefix_reuse=reuse))  # type: ignore[arg-type]
    session = engine.become_ready()
    await ask(scheduler, session, request_of(prompt=PROMPT, tenant=tenants[0]))
    _, found = await ask(scheduler, session, request_of(prompt=(*PROMPT, 1), tenant=tenants[1]))
    assert found == (len(PROMPT) if cached else 0)
    assert len(list(scheduler._placer.holdings)) == (0 if reuse == "off" else 1 if cached else 2)


@pytest.mark.parametrize(
    "more", [{"experts": ExpertPolicy(per_token=1)}, {"experts": ExpertPolicy(threshold=0.5)}, {"prompt_logprobs": 0}]
)
async def test_what_another_computation_needs_is_not_taken(
    more: dict[str, Any], scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """Other experts give other bits; records of prompt positions come only of computing them."""
    await ask(scheduler, session, request_of(prompt=PROMPT))
    assert await ask(scheduler, session, request_of(prompt=PROMPT, **more)) == (len(PROMPT), 0)


async def test_nothing_is_shared_when_results_depend_on_company(
    scheduler_of: SchedulerOf, engine: FakeEngine, request_of: RequestOf
) -> None:
    """With a limit on an expert's tokens, what was computed is true of one step only."""
    scheduler = scheduler_of(experts=ExpertsSettings(max_tokens_per_expert=2))
    session = engine.become_ready()
    await ask(scheduler, session, request_of(prompt=PROMPT))
    assert await ask(scheduler, session, request_of(prompt=PROMPT)) == (len(PROMPT), 0)


async def test_a_new_engine_holds_nothing(
    scheduler: Scheduler, engine: FakeEngine, session: FakeSession, request_of: RequestOf
) -> None:
    """Holdings die with the engine that computed them."""
    await ask(scheduler, session, request_of(prompt=PROMPT))
    engine.die()
    fresh = engine.become_ready()
    assert await ask(scheduler, fresh, request_of(prompt=PROMPT)) == (len(PROMPT), 0)


async def test_holdings_make_room_for_requests(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """However many prompts come, each is served; the oldest holdings go, and those that are used stay."""
    await ask(scheduler, session, request_of(prompt=PROMPT, max_tokens=8))
    for seed in range(20):
        await ask(scheduler, session, request_of(prompt=tuple(range(seed, seed + 40)), max_tokens=8))
        computed, _ = await ask(scheduler, session, request_of(prompt=(*PROMPT, seed), max_tokens=8))
        assert computed == 1
        assert session.channel.used <= KV_TOKENS
    assert await ask(scheduler, session, request_of(prompt=tuple(range(40)), max_tokens=8)) == (40, 0)


async def test_memory_in_pieces_is_freed_until_the_request_fits(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """When the engine says that it waits, holdings go one after another, no more than it takes."""
    for seed in range(4):
        await ask(scheduler, session, request_of(prompt=tuple(range(seed, seed + 40)), max_tokens=8))
    session.channel.unusable = KV_TOKENS - session.channel.used
    generation = scheduler.submit(request_of(prompt=tuple(range(50, 120)), max_tokens=10))
    await settle()
    await step(session, 6)
    assert await serve(session, generation) == expected_tokens(range(50, 120), 0, 10)
    kept = [holding.run for holding in scheduler._placer.holdings]
    assert len(kept) == 3
    scheduler._placer.check()


async def test_a_prefix_that_is_in_the_way_of_its_own_request_goes(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """When nothing else is left to give, what would have been copied is computed anew, and nobody waits for ever."""
    await ask(scheduler, session, request_of(prompt=PROMPT, max_tokens=8))
    session.channel.unusable = KV_TOKENS - 64
    generation = scheduler.submit(request_of(prompt=(*PROMPT, 1, 2), max_tokens=8))
    assert await serve(session, generation) == expected_tokens((*PROMPT, 1, 2), 0, 8)
    assert generation.result is not None
    assert generation.result.cached_tokens == 0
    assert session.channel.forgotten == 1
    scheduler._placer.check()


async def test_what_a_newer_holding_holds_as_well_goes(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A conversation is one holding, however many turns it has."""
    prompt = PROMPT
    for turn in range(5):
        await ask(scheduler, session, request_of(prompt=prompt, max_tokens=4))
        prompt = (*prompt, *expected_tokens(prompt, 0, 4), turn)
        assert len(list(scheduler._placer.holdings)) == 1


async def test_a_run_that_failed_after_it_was_published_is_given_back(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """The engine may hold a run of which the daemon has not heard: it is told to forget it in any case."""
    generation = scheduler.submit(request_of(prompt=PROMPT, max_tokens=4))
    await settle()
    channel = session.channel
    for command in channel.commands:
        channel._apply(command)
    channel.commands.clear()
    assert channel._reserve(0, channel.slots[0])
    request = channel.slots[0].request
    assert request is not None
    channel._publish(request)
    channel._event(abi.EventKind.FAILED, 0, status=abi.Status.NO_TOKEN)
    channel._release(0, whole=False)
    await step(session, 2)
    assert generation.ended
    assert channel.used == 0
    scheduler._placer.check()


# ------------------------------------------------------------ replaced experts


async def test_nothing_from_before_a_switch_is_taken_over(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A held prompt is computed anew after an expert was replaced, and held again from then on."""
    first = request_of(prompt=PROMPT, max_tokens=3)
    assert await ask(scheduler, session, first) == (len(PROMPT), 0)
    assert await ask(scheduler, session, first) == (1, len(PROMPT) - 1)
    session.switch(1)
    await step(session)
    assert await ask(scheduler, session, first) == (len(PROMPT), 0)
    assert await ask(scheduler, session, first) == (1, len(PROMPT) - 1)
    assert session.channel.forgotten == 0, "the daemon did not ask for what is gone"
    scheduler._placer.check()


async def test_a_run_that_is_filled_during_a_switch_is_given_back(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """A prompt that was under way is not taken over either, and leaves no memory behind."""
    generation = scheduler.submit(request_of(prompt=PROMPT, max_tokens=6))
    await settle()
    await step(session, 2)
    session.switch(1)
    assert await serve(session, generation)
    assert generation.result is not None
    assert generation.result.experts.switches == ((1, len(PROMPT) + 1),)
    assert await ask(scheduler, session, request_of(prompt=PROMPT, max_tokens=3)) == (len(PROMPT), 0)
    await step(session)
    assert sum(run.stale for run in session.channel.runs.values()) == 0
    scheduler._placer.check()


async def test_choices_during_a_switch_compute_their_own_prompt(
    scheduler: Scheduler, session: FakeSession, request_of: RequestOf
) -> None:
    """Choices that open after the switch do not see the prompt that the first one computed before it."""
    members = scheduler.submit_all([request_of(prompt=PROMPT, max_tokens=3, n=2)])
    await settle()
    session.channel.step()
    session.switch(1)
    for one in members:
        assert len(await serve(session, one)) == 3
    assert session.channel.forgotten == 1
    scheduler._placer.check()
