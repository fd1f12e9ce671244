"""Holdings are found by what they hold, and go when nobody needs them."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colibrid.batch.holdings import HELD_TOKENS, Holdings, Prefix

RUNS = 5
BASE = tuple(range(7, 7 + 3 * HELD_TOKENS))


def ids_of(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def hold(holdings: Holdings, run: int, tokens: tuple[int, ...], scope: str | None = "x", users: int = 0) -> None:
    """A published holding."""
    holdings.open(run, scope, ids_of(*tokens), 2 * len(tokens))
    holdings.publish(run)
    if not users:
        holdings.leave(run)


@given(
    st.lists(st.integers(0, 2), max_size=70), st.lists(st.integers(0, 2), min_size=1, max_size=70), st.integers(0, 70)
)
def test_a_match_is_the_longest_common_beginning(held: list[int], tail: list[int], common: int) -> None:
    """It is what a comparison token by token finds, never the whole prompt, and never less than it is worth."""
    prompt = (*held[:common], *tail)
    expected = 0
    while expected < min(len(held), len(prompt) - 1) and held[expected] == prompt[expected]:
        expected += 1
    holdings = Holdings(RUNS)
    if held:
        hold(holdings, 3, tuple(held))
    found = holdings.match("x", ids_of(*prompt))
    assert found == (Prefix(3, expected) if expected >= HELD_TOKENS else None)


def test_only_the_same_scope_finds_a_holding() -> None:
    """Another tenant's, another policy's and a single request's prompts are nobody's business."""
    holdings = Holdings(RUNS)
    hold(holdings, 1, BASE, "x")
    hold(holdings, 2, BASE, None, users=1)
    assert holdings.match("x", ids_of(*BASE, 1)) == Prefix(1, len(BASE))
    assert holdings.match("y", ids_of(*BASE, 1)) is None
    assert holdings.match(None, ids_of(*BASE, 1)) is None
    assert holdings.match("x", ids_of(*BASE, 1), skip=[1]) is None


def test_what_is_not_there_is_not_found() -> None:
    """Neither a prompt that is still being computed nor a run that the engine was told to forget."""
    holdings = Holdings(RUNS)
    holdings.open(1, "x", ids_of(*BASE), 64)
    assert holdings.match("x", ids_of(*BASE, 1)) is None
    holdings.publish(1)
    assert holdings.match("x", ids_of(*BASE, 1)) == Prefix(1, len(BASE))
    holdings[1].released = True
    assert holdings.match("x", ids_of(*BASE, 1)) is None


def test_a_holding_grows_by_what_was_generated() -> None:
    """The next turn finds prompt and answer."""
    holdings = Holdings(RUNS)
    holdings.open(1, "x", ids_of(*BASE), 64)
    holdings.publish(1)
    holdings.grow(1, ids_of(1, 2, 3))
    assert holdings.match("x", ids_of(*BASE, 1, 2, 3, 4)) == Prefix(1, len(BASE) + 3)
    assert holdings.match("x", ids_of(*BASE, 1, 9, 3, 4)) == Prefix(1, len(BASE) + 1)
    holdings.check()


def test_among_equals_the_most_recently_used_is_found() -> None:
    """So that the other one may go."""
    holdings = Holdings(RUNS)
    hold(holdings, 1, (*BASE, 1))
    hold(holdings, 2, (*BASE, 2))
    assert holdings.match("x", ids_of(*BASE, 3)) == Prefix(2, len(BASE))
    holdings.use(1)
    assert holdings.match("x", ids_of(*BASE, 3)) == Prefix(1, len(BASE))


def test_idle_holdings_come_least_recently_used_first() -> None:
    """Using one makes it the last to go; one that is in use is not there at all."""
    holdings = Holdings(RUNS)
    for run in (1, 2, 3):
        hold(holdings, run, (run, *BASE))
    holdings.use(1)
    assert [holding.run for holding in holdings.idle()] == [2, 3]
    assert not holdings.leave(1)
    assert [holding.run for holding in holdings.idle()] == [2, 3, 1]


def test_what_another_holds_as_well_is_covered() -> None:
    """A holding covers idle ones of its scope that are a beginning of it, or equal."""
    holdings = Holdings(RUNS)
    hold(holdings, 1, BASE)
    hold(holdings, 2, BASE, users=1)
    hold(holdings, 3, (*BASE, 1))
    hold(holdings, 4, (*BASE, 2))
    hold(holdings, 5, BASE, "y")
    assert holdings.covered(3) == [1]
    assert holdings.covered(1) == []
    assert holdings.is_covered(1)
    assert not holdings.is_covered(4)
    assert not holdings.is_covered(5)


@pytest.mark.parametrize("why", ["unpublished", "nobody's", "released"])
def test_the_last_user_of_a_useless_run_says_so(why: str) -> None:
    """A prompt that was not completed, one that only its own choices shared, and a forgotten run are dropped."""
    holdings = Holdings(RUNS)
    holdings.open(1, None if why == "nobody's" else "x", ids_of(*BASE), 64)
    holdings.use(1)
    if why != "unpublished":
        holdings.publish(1)
    holdings[1].released = why == "released"
    assert not holdings.leave(1)
    assert holdings.leave(1)
    holdings.drop(1)
    assert holdings.free() == [1, 2, 3, 4, 5]


@pytest.mark.skipif(not __debug__, reason="assertions are off")
def test_wrong_changes_are_caught() -> None:
    """An id twice, out of range, published twice, dropped in use, or left by nobody are bugs that show."""
    holdings = Holdings(RUNS)
    holdings.open(1, "x", ids_of(*BASE), 64)
    for wrong in (
        lambda: holdings.open(1, "x", b"", 0),
        lambda: holdings.open(RUNS + 1, "x", b"", 0),
        lambda: holdings.drop(1),
        lambda: holdings.grow(1, b""),
    ):
        with pytest.raises(AssertionError):
            wrong()
    holdings.publish(1)
    with pytest.raises(AssertionError):
        holdings.publish(1)
    holdings.leave(1)
    with pytest.raises(AssertionError):
        holdings.leave(1)


class HoldingsMachine(RuleBasedStateMachine):
    """Against a plain model: run -> [scope, ids, published tokens, users]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Holdings(RUNS)
        self.model: dict[int, list[object]] = {}

    @precondition(lambda self: len(self.model) < RUNS)
    @rule(scope=st.sampled_from(["x", "y", None]), length=st.integers(1, len(BASE)), first=st.integers(0, 1))
    def open(self, scope: str | None, length: int, first: int) -> None:
        run = self.table.free()[0]
        ids = ids_of(*BASE[:length], *[first] * 20)
        self.table.open(run, scope, ids, len(ids))
        self.model[run] = [scope, ids, 0, 1]

    @precondition(lambda self: any(entry[2] == 0 for entry in self.model.values()))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from([run for run, entry in self.model.items() if entry[2] == 0]))
        self.table.publish(run)
        self.model[run][2] = len(self.model[run][1]) // 4  # type: ignore[arg-type]

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(list(self.model)))
        if self.model[run][3] or self.model[run][2]:
            self.table.use(run)
            self.model[run][3] += 1  # type: ignore[operator]

    @precondition(lambda self: any(entry[3] for entry in self.model.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from([run for run, entry in self.model.items() if entry[3]]))
        entry = self.model[run]
        entry[3] -= 1  # type: ignore[operator]
        useless = not entry[3] and (entry[0] is None or not entry[2])
        assert self.table.leave(run) is useless
        if useless:
            self.table.drop(run)
            del self.model[run]

    @precondition(lambda self: any(not entry[3] for entry in self.model.values()))
    @rule()
    def evict(self) -> None:
        victim = self.table.idle()[0].run
        self.table.drop(victim)
        del self.model[victim]

    @invariant()
    def table_equals_model(self) -> None:
        self.table.check()
        assert {one.run: [one.scope, one.ids, one.tokens, one.users] for one in self.table} == self.model
        assert set(self.table.free()) == set(range(1, RUNS + 1)) - set(self.model)
        assert {one.run for one in self.table.idle()} == {run for run, entry in self.model.items() if not entry[3]}


TestHoldingsMachine = HoldingsMachine.TestCase
