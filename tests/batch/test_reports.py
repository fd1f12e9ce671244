"""colibrid.batch.reports, and what the scheduler counts for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import SLOTS, FakeEngine, collect, settle, step
from fake_service import make_request, make_scheduler

from colibrid.errors import EngineFaultError

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.batch.scheduler import Scheduler


async def serve(scheduler: Scheduler, engine: FakeEngine, *, steps: int = 3, **wanted: Any) -> None:
    generation = scheduler.submit(make_request(**wanted))
    await settle()
    assert engine.session is not None
    await step(engine.session, steps)
    await collect(generation)


async def test_requests_are_measured(engine: FakeEngine) -> None:
    """First tokens, times between tokens, tokens, ends and experts are counted, each as often as it happened."""
    scheduler = make_scheduler(engine)
    engine.become_ready()
    await serve(scheduler, engine, max_tokens=3)
    await serve(scheduler, engine, max_tokens=0, prompt=(9, 9))
    seen = scheduler.measures
    assert (seen.prompt_tokens, seen.output_tokens) == (5, 3)
    assert (sum(seen.first_token_s.counts), sum(seen.between_tokens_s.counts)) == (1, 2)
    assert seen.endings == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert [list(one.assignments) for one in seen.load.layers()] == [[2, 4, 6, 8], [10, 0, 2]]


async def test_choices_share_a_prompt(engine: FakeEngine) -> None:
    """A prompt counts once however many choices it has; each choice has its own first token and end."""
    scheduler = make_scheduler(engine)
    session = engine.become_ready()
    generations = scheduler.submit_all([make_request(max_tokens=2, n=2)])
    await settle()
    await step(session, 5)
    for generation in generations:
        await collect(generation)
    seen = scheduler.measures
    assert (seen.prompt_tokens, seen.output_tokens) == (3, 4)
    assert sum(seen.first_token_s.counts) == 2
    assert seen.endings["length"] == 2


async def test_prompts_computed_before(engine: FakeEngine) -> None:
    """Tokens of a prompt that were taken from an earlier one are counted as such."""
    scheduler = make_scheduler(engine)
    engine.become_ready()
    prompt = tuple(range(64))
    await serve(scheduler, engine, prompt=prompt, max_tokens=1)
    await serve(scheduler, engine, prompt=(*prompt, 5), max_tokens=1)
    seen = scheduler.measures
    assert seen.prompt_tokens == 129
    assert 0 < seen.cached_tokens <= 64


async def test_other_ends(engine: FakeEngine) -> None:
    """A request that its consumer leaves is an abort, one that dies with the engine an error."""
    scheduler = make_scheduler(engine)
    session = engine.become_ready()
    left, died = scheduler.submit(make_request(max_tokens=9)), scheduler.submit(make_request(max_tokens=9))
    await settle()
    await step(session, 2)
    left.cancel()
    await settle()
    await step(session, 1)
    engine.die()
    with pytest.raises(EngineFaultError):
        await collect(died)
    assert scheduler.measures.endings == {"stop": 0, "length": 0, "abort": 1, "error": 1}
    assert list(scheduler.measures.load.layers()[0].assignments) == [1, 2, 3, 4]  # of the one that was closed


async def test_slots_and_counters(engine: FakeEngine, request_of: Callable[..., Any]) -> None:
    """A busy slot names its request and how far it is, a free one nothing; counters are there while an engine is."""
    scheduler = make_scheduler(engine)
    assert scheduler.engine_counters is None
    session = engine.become_ready()
    scheduler.submit(request_of(max_tokens=9, priority=4))
    await settle()
    await step(session, 2)
    busy, *free = scheduler.slot_reports
    assert (busy.slot, busy.state, busy.request_id, busy.prompt_tokens) == (0, "running", "r", 3)
    assert (busy.output_tokens, busy.max_tokens, busy.priority, busy.choice) == (2, 9, 4, 0)
    assert busy.age_s is not None
    assert busy.age_s >= 0
    assert [one.state for one in free] == ["free"] * (SLOTS - 1)
    assert {one.request_id for one in free} == {None}
    assert scheduler.engine_counters is not None
    assert (scheduler.engine_counters["steps_decode"], scheduler.engine_counters["expert_assignments"]) == (7, 21)
