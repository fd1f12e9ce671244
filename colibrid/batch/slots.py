"""The daemon's view of the engine's N slots: who owns which, and in which state. Pure.

          reserve             start             OPENED
     FREE ────────▶ RESERVED ──────▶ OPENING ─────────▶ RUNNING
      ▲               │                 │ close            │ close
      │               │                 ▼                  │
      │               │              CLOSING ◀─────────────┘
      │               │                 │                  release: any state but FREE; of all but RESERVED
      └── release ────┴─────────────────┘                  when the engine says so

Each opening has its own generation, so that an event of an earlier owner can never be taken for one of the present.
The engine does not know of a reserved slot yet; it may wait for another one to complete the prompt that both share.
Invariant: a slot has an owner iff it is not FREE.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

Owner = TypeVar("Owner")


class SlotState(Enum):
    FREE = "free"
    RESERVED = "reserved"
    OPENING = "opening"
    RUNNING = "running"
    CLOSING = "closing"


class SlotMemory(NamedTuple):
    """Where a slot keeps K and V. Run ids are those of holdings.py; 0 is none."""

    run_tokens: int = 0  # KV tokens of its own run
    run: int = 0  # the shared run that it uses as long as it lasts
    writes: bool = False  # it computes into that run, and will publish it
    prefix: int = 0  # positions that it takes from an older run: from `source`, else from `run`
    source: int = 0  # the shared run that it copies from while it opens


NO_MEMORY = SlotMemory()


@dataclass(slots=True)
class Slot(Generic[Owner]):
    """One slot; changed by its table only."""

    index: int
    state: SlotState = SlotState.FREE
    generation: int = 0  # of the present owner, or of the last one
    memory: SlotMemory = NO_MEMORY
    waiting: bool = False  # the engine has said that the memory does not fit now
    owner: Owner | None = None


class SlotTable(Generic[Owner]):
    """All slots of one engine after another; generations go on over restarts."""

    def __init__(self, count: int) -> None:
        self._slots: list[Slot[Owner]] = [Slot(index) for index in range(count)]

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> Slot[Owner]:
        return self._slots[index]

    def among(self, *states: SlotState) -> list[Slot[Owner]]:
        """Slots in one of these states, lowest first."""
        return [slot for slot in self._slots if slot.state in states]

    def free(self) -> list[Slot[Owner]]:
        """Slots that can be opened, lowest first."""
        return self.among(SlotState.FREE)

    @property
    def busy(self) -> int:
        """Slots that are not free."""
        return len(self._slots) - [slot.owner for slot in self._slots].count(None)

    @property
    def run_tokens(self) -> int:
        """KV tokens of the own runs of all owners."""
        return sum(slot.memory.run_tokens for slot in self._slots)

    def find(self, index: int, generation: int) -> Slot[Owner] | None:
        """The slot if it has an owner of this generation."""
        if not 0 <= index < len(self._slots):
            return None
        slot = self._slots[index]
        return slot if slot.generation == generation and slot.owner is not None else None

    def reserve(self, index: int, generation: int, owner: Owner, memory: SlotMemory) -> None:
        """FREE to RESERVED. The generation must be the next one."""
        slot = self._slots[index]
        assert slot.state is SlotState.FREE, f"slot {index} is {slot.state.value}, not free"
        assert generation == slot.generation + 1, f"slot {index}: generation {generation} after {slot.generation}"
        slot.state = SlotState.RESERVED
        slot.generation = generation
        slot.owner = owner
        slot.memory = memory

    def start(self, slot: Slot[Owner]) -> None:
        """RESERVED to OPENING: the engine is told."""
        assert slot.state is SlotState.RESERVED, f"slot {slot.index} is {slot.state.value}"
        slot.state = SlotState.OPENING

    def wait(self, slot: Slot[Owner]) -> None:
        """The engine has no memory for it yet."""
        assert slot.state in (SlotState.OPENING, SlotState.CLOSING), f"slot {slot.index} is {slot.state.value}"
        slot.waiting = True

    def opened(self, slot: Slot[Owner]) -> int:
        """OPENING to RUNNING; CLOSING stays, as the answer to the close is still to come.

        Returns the run that it copied from, which it does not use any more; 0: none.
        """
        assert slot.state in (SlotState.OPENING, SlotState.CLOSING), f"slot {slot.index} is {slot.state.value}"
        if slot.state is SlotState.OPENING:
            slot.state = SlotState.RUNNING
        slot.waiting = False
        source = slot.memory.source
        slot.memory = slot.memory._replace(source=0)
        return source

    def close(self, slot: Slot[Owner]) -> None:
        """OPENING or RUNNING to CLOSING: the engine was told to stop."""
        assert slot.state in (SlotState.OPENING, SlotState.RUNNING), f"slot {slot.index} is {slot.state.value}"
        slot.state = SlotState.CLOSING

    def release(self, slot: Slot[Owner]) -> Owner:
        """The engine has released the slot, or never knew of it: to FREE. Returns who owned it."""
        assert slot.owner is not None, f"slot {slot.index} is free"
        owner = slot.owner
        slot.state = SlotState.FREE
        slot.owner = None
        slot.memory = NO_MEMORY
        slot.waiting = False
        return owner

    def release_all(self) -> list[Owner]:
        """The engine is gone: everything is FREE. Returns the owners, in order of their slots."""
        return [self.release(slot) for slot in self._slots if slot.state is not SlotState.FREE]

    def check(self) -> None:
        """AssertionError if the invariant is broken."""
        for index, slot in enumerate(self._slots):
            assert slot.index == index
            assert (slot.owner is None) == (slot.state is SlotState.FREE)
            assert slot.owner is not None or (slot.memory == NO_MEMORY and not slot.waiting)
            assert slot.memory.run or not slot.memory.writes
