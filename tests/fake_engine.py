"""An engine without a model, for tests of the scheduler: it answers commands as the C engine would, step by step.

Token number p of a request is (sum of its prompt + seed + p) % vocabulary, so that any mix-up of requests shows. With
masks it is the lowest id that the mask of position p allows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from colibrid.engine import abi
from colibrid.engine.channel import Command, Event, SlotRecord, SlotRequest, SlotUsage
from colibrid.engine.state import MemoryPlan, Readiness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from colibrid.engine.supervisor import EngineListener

VOCAB = 1000
SLOTS = 4
KV_TOKENS = 400
RING = 8
MASK_BYTES = 128


def expected_tokens(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    return [(sum(prompt) + seed + position) % VOCAB for position in range(count)]


@dataclass
class FakeSlot:
    request: SlotRequest | None = None
    generation: int = 0
    opened: bool = False
    asked: int = 0
    produced: int = 0
    tail: int = 0
    allowed: dict[int, int] = field(default_factory=dict)  # output position -> lowest id of its mask


@dataclass
class FakeChannel:
    """The daemon's end and the engine behind it."""

    slots: list[FakeSlot] = field(default_factory=lambda: [FakeSlot() for _ in range(SLOTS)])
    blocks: dict[int, SlotRequest] = field(default_factory=dict)
    masks: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (slot, half) -> what was written last
    commands: list[Command] = field(default_factory=list)
    pushed: list[list[Command]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    full: bool = False
    fail_status: int | None = None  # the next opening is answered by FAILED with this

    # ------------------------------------------------------------ as DaemonChannel

    def write_request(self, slot: int, request: SlotRequest) -> None:
        assert self.slots[slot].request is None, "a block is written while the engine owns it"
        self.blocks[slot] = request

    def write_mask(self, slot: int, position: int, mask: bytes) -> None:
        assert len(mask) == MASK_BYTES
        self.masks[slot, position % 2] = mask

    def push(self, commands: Sequence[Command]) -> bool:
        if self.full:
            return False
        self.pushed.append(list(commands))
        self.commands.extend(commands)
        return True

    def pop(self) -> list[Event]:
        found, self.events = self.events, []
        return found

    def record(self, slot: int, index: int) -> SlotRecord:
        assert index >= self.slots[slot].tail, "a record is read after it was given back"
        return SlotRecord(0, -0.5 * index, ((index, -0.5 * index), (index + 1, -9.0)))

    def prompt_reader(self, slot: int, count: int) -> Callable[[], list[SlotRecord]]:
        first = SlotRecord(-1, float("nan"), ())
        return lambda: [first, *(SlotRecord(-1, -float(i), ((i, -1.0),)) for i in range(1, count))]

    def pooled(self, slot: int) -> bytes:
        return b"\0\0\x80?"

    def usage(self, slot: int) -> SlotUsage:
        return SlotUsage(10, 2, 1, 0, 0)

    def advance(self, slot: int, old_tail: int, tail: int) -> bool:
        state = self.slots[slot]
        assert old_tail == state.tail <= tail <= state.produced
        state.tail = tail
        return state.produced - old_tail >= RING

    # ------------------------------------------------------------ as the C engine

    def step(self) -> None:
        """Apply commands, then one token for each slot that may have one."""
        for command in self.commands:
            self._apply(command)
        self.commands.clear()
        for index, slot in enumerate(self.slots):
            if slot.request is not None and not slot.opened:
                slot.opened = True
                self._event(abi.EventKind.OPENED, index)
            if slot.request is not None and slot.asked == len(slot.request.prompt_ids):
                self._produce(index, slot)

    def _apply(self, command: Command) -> None:
        slot = self.slots[command.slot]
        if command.kind == abi.CommandKind.OPEN:
            assert slot.request is None, "a slot is opened twice"
            assert command.generation > slot.generation
            request = self.blocks.pop(command.slot)
            assert request.generation == command.generation
            self.slots[command.slot] = FakeSlot(request, command.generation)
            if self.fail_status is not None:
                self._event(abi.EventKind.FAILED, command.slot, status=self.fail_status)
                self.fail_status = None
                self._release(command.slot)
        elif slot.request is None or slot.generation != command.generation:
            return
        elif command.kind == abi.CommandKind.PREFILL:
            slot.asked = command.start + command.tokens
        elif command.kind == abi.CommandKind.SET:
            mask = int.from_bytes(self.masks[command.slot, command.start % 2], "little")
            slot.allowed[command.start] = (mask & -mask).bit_length() - 1
        else:
            self._event(abi.EventKind.CLOSED, command.slot)
            self._release(command.slot)

    def _produce(self, index: int, slot: FakeSlot) -> None:
        request = slot.request
        assert request is not None
        if request.max_tokens == 0:
            self._event(abi.EventKind.FINISHED, index)
            self._release(index)
            return
        if slot.produced - slot.tail >= RING:
            return
        position = slot.produced
        token = (sum(request.prompt_ids) + request.seed + position) % VOCAB
        if request.flags & abi.RequestFlag.MASKED:
            if position not in slot.allowed:
                return
            token = slot.allowed.pop(position)
        slot.produced += 1
        flags = abi.Finish.LENGTH if slot.produced == request.max_tokens else 0
        if token in request.stop_ids:
            flags |= abi.Finish.STOP
        self._event(abi.EventKind.TOKEN, index, record=position, position=position, token=token, flags=flags)
        if flags:
            self._release(index)

    def _release(self, index: int) -> None:
        self.slots[index].request = None

    def _event(
        self,
        kind: abi.EventKind,
        slot: int,
        *,
        record: int = 0,
        position: int = 0,
        token: int = 0,
        flags: int = 0,
        status: int = 0,
    ) -> None:
        generation = self.slots[slot].generation
        self.events.append(Event(kind, slot, generation, record, position, token, flags, status))


MEMORY = MemoryPlan(
    weights=1, kv=KV_TOKENS, kv_bytes_per_token=1, kv_tokens=KV_TOKENS, temp=1, dispatch=0, host=1, total=KV_TOKENS + 3
)


class FakeSession:
    """As EngineSession."""

    def __init__(self) -> None:
        self.channel = FakeChannel()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.memory = MEMORY
        self.device = "fake"
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1

    def clear_events(self) -> None:
        os.eventfd_read(self.event_fd)

    def step(self) -> None:
        """One step of the engine, and its signal."""
        self.channel.step()
        if self.channel.events:
            os.eventfd_write(self.event_fd, 1)

    def close(self) -> None:
        os.close(self.event_fd)


class FakeEngine:
    """As Supervisor, as far as the scheduler looks."""

    def __init__(self) -> None:
        self.readiness = Readiness(phase="loading")
        self.listener: EngineListener | None = None
        self.session: FakeSession | None = None

    def attach(self, listener: EngineListener) -> None:
        self.listener = listener

    def become_ready(self) -> FakeSession:
        assert self.listener is not None
        self.session = FakeSession()
        self.readiness = Readiness(phase="ready")
        self.listener.engine_ready(self.session)  # type: ignore[arg-type]
        return self.session

    def die(self, reason: str = "the engine was ended by SIGKILL") -> None:
        assert self.listener is not None
        assert self.session is not None
        self.readiness = Readiness(phase="restarting", reason=reason)
        self.listener.engine_lost(reason)
        self.session.close()
        self.session = None

    def give_up(self) -> None:
        assert self.listener is not None
        self.readiness = Readiness(phase="failed")
        self.listener.engine_gave_up("engines keep dying")
