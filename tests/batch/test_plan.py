"""Planning is a pure function from queue, slots and memory to commands."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from colibrid.batch.plan import Close, FreeSlot, Mask, Waiting, make_plan, reserved_tokens
from colibrid.batch.request import GenerateRequest, Sampling
from colibrid.engine.abi import CommandKind
from colibrid.engine.channel import Command


def waiting(owner: str, tokens: int = 10, prompt: int = 4) -> Waiting[str]:
    return Waiting(owner, prompt, tokens)


def test_the_queue_is_placed_in_order_into_the_lowest_slots() -> None:
    """Requests get free slots first come first served; the rest waits."""
    free = [FreeSlot(1, 7), FreeSlot(3, 2)]
    plan = make_plan([waiting("a"), waiting("b"), waiting("c")], free, 100)
    assert [(place.waiting.owner, place.slot, place.generation) for place in plan.placements] == [
        ("a", 1, 7),
        ("b", 3, 2),
    ]


def test_a_request_that_does_not_fit_keeps_its_place() -> None:
    """Nobody overtakes the head of the queue, even if he would fit."""
    free = [FreeSlot(0, 1), FreeSlot(1, 1), FreeSlot(2, 1)]
    plan = make_plan([waiting("small"), waiting("large", 95), waiting("tiny", 1)], free, 100)
    assert [place.waiting.owner for place in plan.placements] == ["small"]


def test_commands_are_closes_then_opens_then_prefills() -> None:
    """All prefills come after all opens, and cover the whole prompt."""
    plan = make_plan(
        [waiting("a", prompt=5), waiting("b", prompt=6)], [FreeSlot(0, 1), FreeSlot(1, 4)], 99, [Close(2, 9)]
    )
    assert plan.commands() == [
        Command(CommandKind.CLOSE, 2, 9),
        Command(CommandKind.OPEN, 0, 1),
        Command(CommandKind.OPEN, 1, 4),
        Command(CommandKind.PREFILL, 0, 1, 0, 5),
        Command(CommandKind.PREFILL, 1, 4, 0, 6),
    ]


def test_masks_follow_the_opening_that_they_belong_to() -> None:
    """Masks of running slots go down in their order; those of a request that opens come after its opening."""
    queue = [Waiting("a", 5, 10, (0, 1)), waiting("b", prompt=6)]
    plan = make_plan(queue, [FreeSlot(0, 1), FreeSlot(1, 4)], 99, [], [Mask(2, 9, 7), Mask(3, 9, 0)])
    assert plan.commands() == [
        Command(CommandKind.SET, 2, 9, 7),
        Command(CommandKind.SET, 3, 9, 0),
        Command(CommandKind.OPEN, 0, 1),
        Command(CommandKind.OPEN, 1, 4),
        Command(CommandKind.PREFILL, 0, 1, 0, 5),
        Command(CommandKind.PREFILL, 1, 4, 0, 6),
        Command(CommandKind.SET, 0, 1, 0),
        Command(CommandKind.SET, 0, 1, 1),
    ]
    assert make_plan([], [], 0, [], [Mask(0, 1, 2)])


def test_nothing_to_do_is_an_empty_plan() -> None:
    """A plan without changes is false, one with a close is not."""
    assert not make_plan([], [FreeSlot(0, 1)], 100)
    assert not make_plan([waiting("a")], [], 100)
    assert make_plan([], [], 0, [Close(0, 1)])


def test_a_request_reserves_its_prompt_and_all_its_output() -> None:
    """The reservation is the run that holds prompt and max_tokens."""
    request = GenerateRequest(request_id="r", prompt_ids=(1,) * 9, max_tokens=7, sampling=Sampling(seed=0))
    assert reserved_tokens(request) == 16


@given(
    st.lists(st.integers(1, 50), max_size=12),
    st.integers(0, 8),
    st.integers(0, 200),
)
def test_plans_never_promise_more_than_there_is(sizes: list[int], slots: int, memory: int) -> None:
    """Placements are a prefix of the queue, in different free slots, within the memory; and no shorter than possible."""
    queue = [waiting(str(index), size) for index, size in enumerate(sizes)]
    free = [FreeSlot(2 * index, index) for index in range(slots)]
    plan = make_plan(iter(queue), free, memory)
    placed = [place.waiting for place in plan.placements]
    assert placed == queue[: len(placed)]
    assert [FreeSlot(place.slot, place.generation) for place in plan.placements] == free[: len(placed)]
    used = sum(item.run_tokens for item in placed)
    assert used <= memory
    if len(placed) < min(len(queue), slots):
        assert used + queue[len(placed)].run_tokens > memory
