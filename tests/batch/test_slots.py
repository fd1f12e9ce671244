"""Slots go through their states in the right order only, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colibrid.batch.slots import SlotMemory, SlotState, SlotTable

SLOTS = 5


class SlotMachine(RuleBasedStateMachine):
    """A plain model beside the table: index -> (state, generation, owner)."""

    def __init__(self) -> None:
        super().__init__()
        self.table: SlotTable[int] = SlotTable(SLOTS)
        self.model: dict[int, tuple[SlotState, int, int]] = {}
        self.generations = [0] * SLOTS
        self.owners = 0

    def pick(self, data: st.DataObject, *states: SlotState) -> int:
        return data.draw(st.sampled_from([i for i, (state, _, _) in self.model.items() if state in states]))

    def has(self, *states: SlotState) -> bool:
        return any(state in states for state, _, _ in self.model.values())

    @precondition(lambda self: len(self.model) < SLOTS)
    @rule(tokens=st.integers(1, 100), reserve=st.booleans())
    def open(self, tokens: int, reserve: bool) -> None:
        slot = self.table.free()[0]
        generation = slot.generation + 1
        assert generation > self.generations[slot.index]
        self.owners += 1
        self.table.reserve(slot.index, generation, self.owners, SlotMemory(tokens))
        if not reserve:
            self.table.start(slot)
        self.generations[slot.index] = generation
        state = SlotState.RESERVED if reserve else SlotState.OPENING
        self.model[slot.index] = (state, generation, self.owners)

    @precondition(lambda self: self.has(SlotState.RESERVED))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        index = self.pick(data, SlotState.RESERVED)
        self.table.start(self.table[index])
        self.model[index] = (SlotState.OPENING, *self.model[index][1:])

    @precondition(lambda self: self.has(SlotState.OPENING, SlotState.CLOSING))
    @rule(data=st.data())
    def opened(self, data: st.DataObject) -> None:
        index = self.pick(data, SlotState.OPENING, SlotState.CLOSING)
        state, generation, owner = self.model[index]
        slot = self.table.find(index, generation)
        assert slot is not None
        self.table.opened(slot)
        after = SlotState.RUNNING if state is SlotState.OPENING else SlotState.CLOSING
        self.model[index] = (after, generation, owner)

    @precondition(lambda self: self.has(SlotState.OPENING, SlotState.RUNNING))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        index = self.pick(data, SlotState.OPENING, SlotState.RUNNING)
        _, generation, owner = self.model[index]
        slot = self.table.find(index, generation)
        assert slot is not None
        self.table.close(slot)
        self.model[index] = (SlotState.CLOSING, generation, owner)

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = self.pick(data, *SlotState)
        _, generation, owner = self.model.pop(index)
        slot = self.table.find(index, generation)
        assert slot is not None
        assert self.table.release(slot) == owner

    @rule()
    def lose_the_engine(self) -> None:
        assert self.table.release_all() == [self.model[index][2] for index in sorted(self.model)]
        self.model.clear()

    @invariant()
    def table_equals_model(self) -> None:
        self.table.check()
        assert self.table.busy == len(self.model)
        assert {slot.index for slot in self.table.free()} == set(range(SLOTS)) - set(self.model)
        assert [slot.index for slot in self.table.among(SlotState.OPENING, SlotState.RUNNING)] == sorted(
            i for i, (state, _, _) in self.model.items() if state in (SlotState.OPENING, SlotState.RUNNING)
        )
        for index, (state, generation, owner) in self.model.items():
            slot = self.table.find(index, generation)
            assert slot is not None
            assert (slot.state, slot.owner) == (state, owner)
            assert self.table.find(index, generation - 1) is None


TestSlotMachine = SlotMachine.TestCase


def _open(table: SlotTable[str], generation: int, owner: str, memory: SlotMemory) -> None:
    """Slot 0, from FREE to OPENING."""
    table.reserve(0, generation, owner, memory)
    table.start(table[0])


def test_events_of_an_earlier_owner_find_nothing() -> None:
    """A slot is found by its present generation only, and never when it is free."""
    table: SlotTable[str] = SlotTable(1)
    assert table.find(0, 0) is None
    _open(table, 1, "first", SlotMemory(10))
    slot = table.find(0, 1)
    assert slot is not None
    table.release(slot)
    _open(table, 2, "second", SlotMemory(10))
    assert table.find(0, 1) is None
    assert table.find(1, 1) is None
    assert table.find(-1, 2) is None


@pytest.mark.skipif(not __debug__, reason="assertions are off")
def test_wrong_transitions_are_caught() -> None:
    """Opening a busy slot, skipping a generation, closing twice and releasing a free slot are bugs that show."""
    table: SlotTable[str] = SlotTable(1)
    with pytest.raises(AssertionError):
        _open(table, 2, "owner", SlotMemory(1))
    _open(table, 1, "owner", SlotMemory(1))
    with pytest.raises(AssertionError):
        _open(table, 2, "other", SlotMemory(1))
    slot = table.find(0, 1)
    assert slot is not None
    table.close(slot)
    with pytest.raises(AssertionError):
        table.close(slot)
    table.release(slot)
    with pytest.raises(AssertionError):
        table.release(slot)


def test_the_source_of_a_copy_is_used_until_the_slot_is_open() -> None:
    """OPENED tells once which run the slot has copied from, and ends its waiting."""
    table: SlotTable[str] = SlotTable(1)
    _open(table, 1, "owner", SlotMemory(run=2, writes=True, prefix=20, source=5))
    table.wait(table[0])
    assert table[0].waiting
    assert table.opened(table[0]) == 5
    assert (table[0].waiting, table[0].memory.source, table[0].memory.run) == (False, 0, 2)
    table.close(table[0])
    assert table.opened(table[0]) == 0
