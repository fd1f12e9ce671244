"""Planning is a pure function from queue, slots, holdings and memory to commands."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from colibrid.batch.holdings import Holdings, Prefix
from colibrid.batch.plan import Changes, Close, FreeSlot, Mask, Opening, Plan, Waiting, make_plan, reserved_tokens
from colibrid.engine.abi import CommandKind
from colibrid.engine.channel import Command

RUNS = 8
LONG = tuple(range(100, 140))  # 40 tokens


def ids_of(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def waiting(owner: str, tokens: int = 16, prompt: int = 4, **more: object) -> Waiting[str]:
    """A request of `prompt` tokens that reserves `tokens` in all."""
    return Waiting(owner, ids_of(*range(prompt)), tokens - prompt, **more)  # type: ignore[arg-type]


def holdings_of(*held: tuple[str, tuple[int, ...]]) -> Holdings:
    """Idle holdings of 48 tokens each, the first one least recently used."""
    holdings = Holdings(RUNS)
    for run, (scope, ids) in enumerate(held, 1):
        holdings.open(run, scope, ids_of(*ids), 48)
        holdings.publish(run)
        holdings.leave(run)
    return holdings


def plan_of(
    queue: list[Waiting[str]], free: list[FreeSlot], memory: int = 400, holdings: Holdings | None = None
) -> Plan[str]:
    return make_plan(iter(queue), free, holdings or Holdings(RUNS), memory)


def slots(count: int) -> list[FreeSlot]:
    return [FreeSlot(index, 1) for index in range(count)]


def test_the_queue_is_placed_in_order_into_the_lowest_slots() -> None:
    """Requests get free slots first come first served; the rest waits."""
    plan = plan_of([waiting("a"), waiting("b"), waiting("c")], [FreeSlot(1, 7), FreeSlot(3, 2)])
    assert [(place.waiting.owner, place.slots) for place in plan.placements] == [
        ("a", (FreeSlot(1, 7),)),
        ("b", (FreeSlot(3, 2),)),
    ]


def test_a_request_that_does_not_fit_keeps_its_place() -> None:
    """Nobody overtakes the head of the queue, even if he would fit."""
    plan = plan_of([waiting("small"), waiting("large", 96), waiting("tiny", 16)], slots(3), 100)
    assert [place.waiting.owner for place in plan.placements] == ["small"]


def test_all_choices_are_placed_or_none() -> None:
    """A request waits until it has a slot for each of its choices, and nobody takes those that are free meanwhile."""
    queue = [waiting("one"), waiting("three", choices=3), waiting("last")]
    assert [place.waiting.owner for place in plan_of(queue, slots(3)).placements] == ["one"]
    placed = plan_of(queue, slots(5)).placements
    assert [len(place.slots) for place in placed] == [1, 3, 1]


def test_the_first_of_several_choices_opens_and_publishes_the_prompt() -> None:
    """The others get their slots, and wait for the run; a prompt of one token is not worth that."""
    (place,) = plan_of([waiting("a", choices=3)], slots(3)).placements
    assert place.run == 1
    assert place.openings == [Opening(0, 1, 4)]
    (place,) = plan_of([waiting("a", prompt=1, choices=3)], slots(3)).placements
    assert place.run == 0
    assert place.openings == [Opening(index, 1, 1) for index in range(3)]


def test_commands_are_closes_then_releases_then_opens_then_prefills() -> None:
    """All prefills come after all opens, and cover the whole prompt; what makes room comes before."""
    due = Changes((Close(2, 9),), (), (5,), (Opening(4, 8, 7),))
    queue = [waiting("a", prompt=5), waiting("b", prompt=6, tokens=384)]
    holdings = holdings_of(("x", LONG))
    plan = make_plan(queue, [FreeSlot(0, 1), FreeSlot(1, 4)], holdings, 352, due)
    assert plan.commands() == [
        Command(CommandKind.CLOSE, 2, 9),
        Command(CommandKind.RELEASE_RUN, 0, 0, 5),
        Command(CommandKind.RELEASE_RUN, 0, 0, 1),
        Command(CommandKind.OPEN, 4, 8),
        Command(CommandKind.OPEN, 0, 1),
        Command(CommandKind.OPEN, 1, 4),
        Command(CommandKind.PREFILL, 4, 8, 0, 7),
        Command(CommandKind.PREFILL, 0, 1, 0, 5),
        Command(CommandKind.PREFILL, 1, 4, 0, 6),
    ]


def test_masks_follow_the_opening_that_they_belong_to() -> None:
    """Masks of running slots go down in their order; those of a request that opens come after its opening."""
    queue = [waiting("a", masks=((0, 1),)), waiting("b", prompt=1, choices=2, masks=((), (0,)))]
    due = Changes(masks=(Mask(2, 9, 7), Mask(3, 9, 0)), openings=(Opening(5, 2, 9, (0,)),))
    commands = make_plan(queue, slots(3), Holdings(RUNS), 99, due).commands()
    assert [command for command in commands if command.kind == CommandKind.SET] == [
        Command(CommandKind.SET, 2, 9, 7),
        Command(CommandKind.SET, 3, 9, 0),
        Command(CommandKind.SET, 5, 2, 0),
        Command(CommandKind.SET, 0, 1, 0),
        Command(CommandKind.SET, 0, 1, 1),
        Command(CommandKind.SET, 2, 1, 0),
    ]
    last_open = max(i for i, command in enumerate(commands) if command.kind == CommandKind.OPEN)
    assert all(command.kind != CommandKind.SET for command in commands[2 : last_open + 1])


def test_nothing_to_do_is_an_empty_plan() -> None:
    """A plan without changes is false, one with any of them is not."""
    assert not plan_of([], slots(1))
    assert not plan_of([waiting("a")], [])
    for due in (Changes((Close(0, 1),)), Changes((), (Mask(0, 1, 2),)), Changes(releases=(1,))):
        assert make_plan([], [], Holdings(RUNS), 0, due)
    assert make_plan([], [], Holdings(RUNS), 0, Changes(openings=(Opening(0, 1, 4),)))


def test_a_request_reserves_its_prompt_once_and_the_output_of_each_choice() -> None:
    """The reservation is one run for prompt and max_tokens, and one for the last token and max_tokens of each other."""
    assert reserved_tokens(9, 7, 1) == 16
    assert reserved_tokens(1000, 15, 3) == 1024 + 2 * 16
    assert waiting("a", tokens=16, prompt=9, choices=3).tokens == 16 + 2 * 16


def test_a_prompt_that_begins_alike_takes_the_longest_holding() -> None:
    """The prefix is copied into the run that is published; the last token is always computed."""
    holdings = holdings_of(("x", LONG[:20]), ("x", LONG[:30]), ("y", LONG))
    request = Waiting("a", ids_of(*LONG), 8, scope="x")
    (place,) = plan_of([request], slots(1), holdings=holdings).placements
    assert (place.prefix, place.run) == (Prefix(2, 30), 4)
    request = Waiting("a", ids_of(*LONG), 8, scope="y")
    (place,) = plan_of([request], slots(1), holdings=holdings).placements
    assert place.prefix == Prefix(3, 39)
    request = Waiting("a", ids_of(*LONG), 8, scope="y", uses_prefix=False)
    (place,) = plan_of([request], slots(1), holdings=holdings).placements
    assert (place.prefix, place.run) == (None, 4)


def test_the_least_recently_used_holding_makes_room() -> None:
    """As many go as are needed, oldest first; what is to be copied stays, unless there is no other room."""
    held = [("x", (token, *LONG)) for token in range(3)]
    request = Waiting("a", ids_of(*LONG), 8, scope="z")
    for memory, gone in ((48, ()), (47, (1,)), (0, (1,)), (-1, (1, 2)), (-97, None)):
        plan = plan_of([request], slots(1), memory, holdings_of(*held))
        assert plan.releases == (gone or ())
        assert bool(plan.placements) is (gone is not None)
    same = Waiting("a", ids_of(0, *LONG[:38]), 8, scope="x")
    plan = plan_of([same], slots(1), 0, holdings_of(*held))
    assert (plan.releases, plan.placements[0].prefix) == ((2,), Prefix(1, 38))
    plan = plan_of([same], slots(1), -96, holdings_of(*held))
    assert (plan.releases, plan.placements[0].prefix) == ((1, 2, 3), None)


def test_without_a_free_id_a_holding_goes() -> None:
    """Run ids are as scarce as memory."""
    held = [("x", (token, *LONG)) for token in range(RUNS)]
    plan = plan_of([Waiting("a", ids_of(*LONG), 8, scope="z")], slots(1), 400, holdings_of(*held))
    assert plan.releases == (1,)
    assert plan.placements[0].run == 1


def test_two_requests_of_one_plan_never_get_in_each_others_way() -> None:
    """A holding that the first copies from is not evicted for the second, and an evicted one is not copied from."""
    held = [("x", (0, *LONG)), ("x", (1, *LONG))]
    first = Waiting("a", ids_of(0, *LONG[:38]), 8, scope="x")
    second = Waiting("b", ids_of(1, *LONG[:38]), 8, scope="x")
    plan = plan_of([first, second], slots(2), 48, holdings_of(*held))
    assert [place.prefix for place in plan.placements] == [Prefix(1, 38), None]
    assert plan.releases == (2,)
    assert plan_of([first, second], slots(2), 0, holdings_of(*held)).releases == (2,)


@given(
    st.lists(st.tuples(st.integers(5, 50), st.integers(1, 3)), max_size=12),
    st.integers(0, 8),
    st.integers(0, 400),
    st.integers(0, 4),
)
def test_plans_never_promise_more_than_there_is(
    sizes: list[tuple[int, int]], free_slots: int, memory: int, held: int
) -> None:
    """Placements are a prefix of the queue, in different slots, within the memory; and no shorter than possible."""
    queue = [waiting(str(index), size, choices=choices) for index, (size, choices) in enumerate(sizes)]
    free = [FreeSlot(2 * index, index) for index in range(free_slots)]
    plan = plan_of(queue, free, memory, holdings_of(*(("x", (token, *LONG)) for token in range(held))))
    placed = [place.waiting for place in plan.placements]
    assert placed == queue[: len(placed)]
    taken = [slot for place in plan.placements for slot in place.slots]
    assert taken == free[: len(taken)]
    runs = [place.run for place in plan.placements if place.run]
    assert len(set(runs)) == len(runs)
    assert all(run > held or run in plan.releases for run in runs)
    used = sum(item.tokens for item in placed)
    assert used <= memory + 48 * len(plan.releases)
    assert not plan.releases or used > memory + 48 * (len(plan.releases) - 1)
    if len(placed) < len(queue):
        head = queue[len(placed)]
        assert len(taken) + head.choices > free_slots or used + head.tokens > memory + 48 * held
