"""The daemon's view of the engine's N slots: who owns which, and in which state. Pure.

               open               OPENED
        FREE ─────────▶ OPENING ─────────▶ RUNNING
          ▲                │ close            │ close
          │                ▼                  ▼
          └── release ── CLOSING ◀────────────┘        release: any state but FREE, when the engine says so

Each opening has its own generation, so that an event of an earlier owner can never be taken for one of the present.
Invariant: a slot has an owner iff it is not FREE.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class SlotState(Enum):
    FREE = "free"
    OPENING = "opening"
    RUNNING = "running"
    CLOSING = "closing"


@dataclass(slots=True)
class Slot(Generic[Owner]):
    """One slot; changed by its table only."""

    index: int
    state: SlotState = SlotState.FREE
    generation: int = 0  # of the present owner, or of the last one
    run_tokens: int = 0  # KV tokens reserved for the owner
    owner: Owner | None = None


class SlotTable(Generic[Owner]):
    """All slots of one engine after another; generations go on over restarts."""

    def __init__(self, count: int) -> None:
        self._slots: list[Slot[Owner]] = [Slot(index) for index in range(count)]

    def __len__(self) -> int:
        return len(self._slots)

    def free(self) -> list[Slot[Owner]]:
        """Slots that can be opened, lowest first."""
        return [slot for slot in self._slots if slot.state is SlotState.FREE]

    def running(self) -> list[Slot[Owner]]:
        """Slots whose owner is being served: opening or running."""
        return [slot for slot in self._slots if slot.state in (SlotState.OPENING, SlotState.RUNNING)]

    @property
    def busy(self) -> int:
        """Slots that are not free."""
        return sum(slot.state is not SlotState.FREE for slot in self._slots)

    @property
    def run_tokens(self) -> int:
        """KV tokens reserved by all owners."""
        return sum(slot.run_tokens for slot in self._slots)

    def find(self, index: int, generation: int) -> Slot[Owner] | None:
        """The slot if it has an owner of this generation."""
        if not 0 <= index < len(self._slots):
            return None
        slot = self._slots[index]
        return slot if slot.state is not SlotState.FREE and slot.generation == generation else None

    def open(self, index: int, generation: int, owner: Owner, run_tokens: int) -> None:
        """FREE to OPENING. The generation must be the next one."""
        slot = self._slots[index]
        assert slot.state is SlotState.FREE, f"slot {index} is {slot.state.value}, not free"
        assert generation == slot.generation + 1, f"slot {index}: generation {generation} after {slot.generation}"
        slot.state = SlotState.OPENING
        slot.generation = generation
        slot.owner = owner
        slot.run_tokens = run_tokens

    def opened(self, slot: Slot[Owner]) -> None:
        """OPENING to RUNNING; CLOSING stays, as the answer to the close is still to come."""
        assert slot.state in (SlotState.OPENING, SlotState.CLOSING), f"slot {slot.index} is {slot.state.value}"
        if slot.state is SlotState.OPENING:
            slot.state = SlotState.RUNNING

    def close(self, slot: Slot[Owner]) -> None:
        """OPENING or RUNNING to CLOSING: the engine was told to stop."""
        assert slot.state in (SlotState.OPENING, SlotState.RUNNING), f"slot {slot.index} is {slot.state.value}"
        slot.state = SlotState.CLOSING

    def release(self, slot: Slot[Owner]) -> Owner:
        """The engine has released the slot: to FREE. Returns who owned it."""
        assert slot.owner is not None, f"slot {slot.index} is free"
        owner = slot.owner
        slot.state = SlotState.FREE
        slot.owner = None
        slot.run_tokens = 0
        return owner

    def release_all(self) -> list[Owner]:
        """The engine is gone: everything is FREE. Returns the owners, in order of their slots."""
        return [self.release(slot) for slot in self._slots if slot.state is not SlotState.FREE]

    def check(self) -> None:
        """AssertionError if the invariant is broken."""
        for index, slot in enumerate(self._slots):
            assert slot.index == index
            assert (slot.owner is None) == (slot.state is SlotState.FREE)
            assert slot.run_tokens == 0 or slot.owner is not None
