"""What engines and slots look like from outside. Values only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from colibrid.batch.measures import Measures
from colibrid.engine.state import EngineStatus

if TYPE_CHECKING:
    from colibrid.batch.generation import LiveGeneration
    from colibrid.batch.slots import Slot


class Traffic(NamedTuple):
    """Bytes of weights that a step must read at least."""

    step: float = 0.0  # for whatever it computes
    expert: float = 0.0  # for each expert that has something to do, on average


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, with what its scheduler and itself have counted."""

    status: EngineStatus
    measures: Measures
    counters: dict[str, int] | None  # clb_stats, since the engine was opened; None while there is none
    traffic: Traffic


class SlotReport(msgspec.Struct, frozen=True, kw_only=True):
    """One slot. What a free one does not have is None."""

    slot: int
    state: str
    waiting: bool  # for memory
    request_id: str | None = None
    choice: int | None = None
    priority: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # planned to be taken from an earlier prompt
    output_tokens: int | None = None
    max_tokens: int | None = None
    age_s: float | None = None  # since it was submitted


def slot_report(slot: Slot[LiveGeneration], now: float) -> SlotReport:
    """`now`: on the event loop's clock."""
    owner = slot.owner
    if owner is None:
        return SlotReport(slot=slot.index, state=slot.state.value, waiting=False)
    return SlotReport(
        slot=slot.index,
        state=slot.state.value,
        waiting=slot.waiting,
        request_id=owner.request.request_id,
        choice=owner.choice,
        priority=owner.request.priority,
        prompt_tokens=len(owner.request.prompt_ids),
        cached_tokens=slot.memory.prefix,
        output_tokens=owner.received,
        max_tokens=owner.request.max_tokens,
        age_s=round(now - owner.clock.submitted, 3),
    )
