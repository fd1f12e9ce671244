"""An engine without a model, for tests of the scheduler: it answers commands as the C engine would, step by step.

Token number p of a choice is (sum of its prompt + seed + choice + p) % vocabulary, so that any mix-up of requests
shows. With masks it is the lowest id that the mask of position p allows. Shared runs are checked against what they are
used for; tenants are told apart by their seeds.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from colibrid.engine import abi
from colibrid.engine.channel import _RECORD, Command, Event, SlotRecord, SlotRequest, SlotUsage
from colibrid.engine.spec import run_tokens
from colibrid.engine.state import MemoryPlan, Readiness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from colibrid.batch.generation import LiveGeneration
    from colibrid.engine.supervisor import EngineListener

VOCAB = 1000
SLOTS = 4
KV_TOKENS = 400
RING = 8
ROW = 4  # counts of a layer
MASK_BYTES = 128
TENANT_SEEDS = 1000  # seeds of one tenant


def expected_tokens(prompt: Sequence[int], seed: int, count: int, choice: int = 0) -> list[int]:
    return [(sum(prompt) + seed + choice + position) % VOCAB for position in range(count)]


@dataclass
class FakeRun:
    """A shared run, and what it is made of."""

    request: SlotRequest
    capacity: int
    ids: list[int]
    tokens: int = 0  # that others may see; 0 until published
    daemon: bool = False
    users: int = 1
    stale: bool = False  # from before an expert was replaced


@dataclass
class FakeSlot:
    request: SlotRequest | None = None
    generation: int = 0
    opened: bool = False
    told: bool = False  # that it has to wait
    own: int = 0  # KV tokens
    asked: int = 0
    cached: int = 0
    produced: list[int] = field(default_factory=list)
    tail: int = 0
    allowed: dict[int, int] = field(default_factory=dict)  # output position -> lowest id of its mask


@dataclass
class FakeChannel:
    """The daemon's end and the engine behind it."""

    advance_step = 1

    slots: list[FakeSlot] = field(default_factory=lambda: [FakeSlot() for _ in range(SLOTS)])
    order: list[int] = field(default_factory=list)  # slots that are not free, oldest first
    runs: dict[int, FakeRun] = field(default_factory=dict)
    blocks: dict[int, SlotRequest] = field(default_factory=dict)
    masks: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (slot, half) -> what was written last
    commands: list[Command] = field(default_factory=list)
    pushed: list[list[Command]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    full: bool = False
    fail_status: int | None = None  # the next opening is answered by FAILED with this
    output_is_prompt: bool = True
    unusable: int = 0  # KV tokens in pieces too small for anything
    computed: int = 0  # prompt tokens
    forgotten: int = 0  # prefixes that were not there
    weights_generation: int = 0

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

    def pop_fields(self) -> list[Event]:
        found, self.events = self.events, []
        return found

    def raw_record(self, slot: int, index: int) -> bytes:
        assert index >= self.slots[slot].tail, "a record is read after it was given back"
        room = [0] * (abi.MAX_TOP_LOGPROBS - 2)
        return _RECORD.pack(0, 0, -0.5 * index, 2, index, index + 1, *room, -0.5 * index, -9.0, *room)

    def prompt_reader(self, slot: int, count: int) -> Callable[[], list[SlotRecord]]:
        request = self.slots[slot].request
        assert request is None or request.flags & abi.RequestFlag.PROMPT_LOGPROBS
        first = SlotRecord(-1, float("nan"), ())
        return lambda: [first, *(SlotRecord(-1, -float(i), ((i, -1.0),)) for i in range(1, count))]

    def pooled(self, slot: int) -> bytes:
        return b"\0\0\x80?"

    def usage(self, slot: int) -> SlotUsage:
        return SlotUsage(10, 2, 1, 0, self.slots[slot].cached)

    def expert_counts(self, slot: int) -> bytes:
        return array("I", [1, 2, 3, 4, 0, 0, 0, 0, 5, 0, 1, 0]).tobytes()

    def stats(self) -> tuple[abi.Phase, abi.Stats]:
        return abi.Phase.READY, abi.Stats(steps_decode=7, expert_assignments=21)

    def advance(self, slot: int, old_tail: int, tail: int) -> bool:
        state = self.slots[slot]
        assert old_tail == state.tail <= tail <= len(state.produced)
        state.tail = tail
        return len(state.produced) - old_tail >= RING

    # ------------------------------------------------------------ as the C engine

    @property
    def used(self) -> int:
        """KV tokens that are taken."""
        return sum(slot.own for slot in self.slots) + sum(run.capacity for run in self.runs.values())

    def step(self) -> None:
        """Apply commands, then one token for each slot that may have one."""
        for command in self.commands:
            self._apply(command)
        self.commands.clear()
        for index in self.order:
            if not self.slots[index].opened and not self._reserve(index, self.slots[index]):
                break
        for index in list(self.order):
            slot = self.slots[index]
            if slot.opened and slot.request is not None and slot.asked == len(slot.request.prompt_ids):
                self._produce(index, slot)

    def _apply(self, command: Command) -> None:
        if command.kind == abi.CommandKind.RELEASE_RUN:
            self._release_run(command.start)
            return
        slot = self.slots[command.slot]
        if command.kind == abi.CommandKind.OPEN:
            assert slot.request is None, "a slot is opened twice"
            assert command.generation > slot.generation
            request = self.blocks.pop(command.slot)
            assert request.generation == command.generation
            self.slots[command.slot] = FakeSlot(request, command.generation)
            self.order.append(command.slot)
            if self.fail_status is not None:
                self._event(abi.EventKind.FAILED, command.slot, status=self.fail_status)
                self.fail_status = None
                self._release(command.slot, whole=False)
        elif slot.request is None or slot.generation != command.generation:
            return
        elif command.kind == abi.CommandKind.PREFILL:
            slot.asked = command.start + command.tokens
        elif command.kind == abi.CommandKind.SET:
            mask = int.from_bytes(self.masks[command.slot, command.start % 2], "little")
            slot.allowed[command.start] = (mask & -mask).bit_length() - 1
        else:
            self._event(abi.EventKind.CLOSED, command.slot)
            self._release(command.slot, whole=True)

    def _reserve(self, index: int, slot: FakeSlot) -> bool:
        """Take memory. False, and it is told once, if there is not enough."""
        request = slot.request
        assert request is not None
        prefix = self.runs.get(request.prefix_run)
        cached = request.prefix_tokens
        if cached and (prefix is None or prefix.stale or prefix.tokens < cached):
            self.forgotten += 1
            cached, prefix = 0, None
        total = len(request.prompt_ids) + request.max_tokens
        need = run_tokens(total if request.publish_run else total - cached)
        if need > KV_TOKENS - self.unusable - self.used:
            if not slot.told:
                slot.told = True
                self._event(abi.EventKind.WAITING, index)
            return False
        if prefix is not None:
            check_prefix(prefix, request, cached)
            prefix.users += not request.publish_run  # else it is copied at once
        else:
            slot.request = request = msgspec.structs.replace(request, prefix_run=0)
        if request.publish_run:
            assert request.publish_run not in self.runs, "a run is published under an id that is taken"
            assert 1 <= request.publish_run <= 2 * SLOTS
            self.runs[request.publish_run] = FakeRun(request, need, list(request.prompt_ids))
        slot.opened, slot.cached = True, cached
        slot.own = 0 if request.publish_run else need
        self.computed += len(request.prompt_ids) - cached
        self._event(abi.EventKind.OPENED, index)
        return True

    def switch(self, weights_generation: int) -> None:
        """Replace an expert between two steps."""
        self.weights_generation = weights_generation
        for run in self.runs.values():
            run.stale = True
        self.events.append(Event(abi.EventKind.SWITCHED, abi.NO_SLOT, 0, weights_generation, 0, 0, 0, 0))
        for index in self.order:
            slot = self.slots[index]
            if slot.produced and slot.request is not None:
                position = len(slot.request.prompt_ids) + len(slot.produced) - 1
                self._event(abi.EventKind.SWITCHED, index, record=weights_generation, position=position)

    def _produce(self, index: int, slot: FakeSlot) -> None:
        request = slot.request
        assert request is not None
        if request.max_tokens == 0:
            self._publish(request)
            self._event(abi.EventKind.FINISHED, index)
            self._release(index, whole=True)
            return
        if len(slot.produced) - slot.tail >= RING:
            return
        position = len(slot.produced)
        token = (sum(request.prompt_ids) + request.seed + request.choice + position) % VOCAB
        if request.flags & abi.RequestFlag.MASKED:
            if position not in slot.allowed:
                return
            token = slot.allowed.pop(position)
        if position == 0:
            self._publish(request)
        slot.produced.append(token)
        flags = abi.Finish.LENGTH if len(slot.produced) == request.max_tokens else 0
        if token in request.stop_ids:
            flags |= abi.Finish.STOP
        self._event(abi.EventKind.TOKEN, index, record=position, position=position, token=token, flags=flags)
        if flags:
            self._release(index, whole=True)

    def _publish(self, request: SlotRequest) -> None:
        if request.publish_run:
            run = self.runs[request.publish_run]
            run.tokens, run.daemon = len(run.ids), True
            run.users += 1

    def _release(self, index: int, *, whole: bool) -> None:
        slot = self.slots[index]
        request = slot.request
        assert request is not None
        if slot.opened and request.publish_run:
            run = self.runs[request.publish_run]
            if whole and run.tokens and self.output_is_prompt:
                run.ids += slot.produced[:-1]
                run.tokens = len(run.ids)
            self._leave(request.publish_run)
        elif slot.opened and request.prefix_run:
            self._leave(request.prefix_run)
        slot.request, slot.own = None, 0
        self.order.remove(index)

    def _release_run(self, run: int) -> None:
        if run in self.runs and self.runs[run].daemon:
            self.runs[run].daemon = False
            self._leave(run)
            for slot in self.slots:
                slot.told = False

    def _leave(self, run: int) -> None:
        self.runs[run].users -= 1
        if not self.runs[run].users:
            del self.runs[run]

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


def check_prefix(run: FakeRun, request: SlotRequest, tokens: int) -> None:
    """What is taken over is what would be computed, and belongs to the same tenant."""
    assert tokens < len(request.prompt_ids)
    assert list(request.prompt_ids[:tokens]) == run.ids[:tokens], "somebody else's prompt"
    assert list(request.policy) == list(run.request.policy), "computed by other experts"
    assert request.seed // TENANT_SEEDS == run.request.seed // TENANT_SEEDS, "another tenant's prompt"
    assert not request.flags & abi.RequestFlag.PROMPT_LOGPROBS, "positions that are not computed have no records"


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

    def switch(self, weights_generation: int) -> None:
        """Between two steps of the engine another expert takes a place."""
        self.channel.switch(weights_generation)
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


async def settle() -> None:
    """Let everything that is due run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def step(session: FakeSession, times: int = 1) -> None:
    """Steps of the engine, and all that comes of them."""
    for _ in range(times):
        session.step()
        await asyncio.sleep(0.001)  # the eventfd reaches the loop through its selector
        await settle()


async def collect(generation: LiveGeneration) -> list[int]:
    """All tokens to the end."""
    return [record.token async for records in generation for record in records]
