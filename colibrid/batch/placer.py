"""Who waits, who runs in which slot, and what the engine's memory holds: one owner for the three.

    add ─▶ queue ─▶ plan ─▶ execute: request blocks, one push ─▶ slots and holdings
                     ▲                                             │ published: the other choices open
                     └────── released: room, or choices that lost their first one ◀──┘

Of several choices the first computes the prompt into a shared run; the others hold reserved slots until it is there.
The engine tells when a run does not fit, though the sum of all would: then idle holdings go, one after another, and
last of all the runs that only waiting slots want, whose prompts are then computed anew.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from colibrid.batch.generation import LiveGeneration, Place
from colibrid.batch.holdings import Holdings, Prefix
from colibrid.batch.plan import Changes, Close, FreeSlot, Mask, Opening, Plan, Waiting, make_plan
from colibrid.batch.queue import Group, Queue
from colibrid.batch.slots import Slot, SlotMemory, SlotState, SlotTable
from colibrid.batch.translate import slot_request

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from colibrid.engine.channel import DaemonChannel

_SERVED = (SlotState.OPENING, SlotState.RUNNING)
_ENDING = (SlotState.RUNNING, SlotState.CLOSING)  # will give memory back without our doing


class Model(NamedTuple):
    """What a placer must know of what is served."""

    slots: int
    layer_experts: tuple[int, ...]  # the model's own experts per token in each layer, 0 in dense layers
    output_is_prompt: bool  # K and V of a generated token have the bits that they would have in a prompt


class Placer:
    """See the module's docstring. Lives on the scheduler's event loop; pushes nothing that it was not told to."""

    def __init__(self, model: Model) -> None:
        self.queue = Queue()
        self.slots: SlotTable[LiveGeneration] = SlotTable(model.slots)
        self.holdings = Holdings(2 * model.slots)
        self._model = model
        self._closes: list[Close] = []  # these are to be pushed
        self._masks: list[Mask] = []
        self._releases: list[int] = []
        self._openings: list[Slot[LiveGeneration]] = []
        self._more_room = False  # since the last plan

    @property
    def idle(self) -> bool:
        """True iff nothing runs and nothing waits."""
        return not self.queue and not self.slots.busy

    @property
    def due(self) -> bool:
        """True iff a plan would, or may, say something new."""
        pending = self._closes or self._masks or self._releases or self._openings
        return bool(pending or (self.queue and self._more_room))

    def add(self, members: list[LiveGeneration], scope: Hashable | None) -> None:
        """Queue all choices of one request."""
        self.queue.add(members, scope)

    # ------------------------------------------------------------------ down

    def plan(self, kv_tokens: int) -> Plan[Group]:
        """What to push now, in a KV memory of so many tokens."""
        self._more_room = False
        free = [FreeSlot(slot.index, slot.generation + 1) for slot in self.slots.free()]
        left = kv_tokens - self.slots.run_tokens - self.holdings.capacity
        due = Changes(
            tuple(self._closes), tuple(self._masks), tuple(self._releases), tuple(map(_opening, self._openings))
        )
        return make_plan(map(_waiting, self.queue), free, self.holdings, left, due)

    def execute(self, channel: DaemonChannel, plan: Plan[Group], now: float) -> bool:
        """Write the blocks and push. False, and nothing has changed, if the ring is full."""
        memories = [_memories(place.waiting, place.run, place.prefix) for place in plan.placements]
        for slot in self._openings:
            assert slot.owner is not None, "a reserved slot has an owner"
            self._write(channel, slot.owner, slot.index, slot.generation, slot.memory)
        for place, memory in zip(plan.placements, memories, strict=True):
            for index, opening in enumerate(place.openings):
                member = place.waiting.owner.members[index]
                self._write(channel, member, opening.slot, opening.generation, memory[index])
        if not channel.push(plan.commands()):
            return False
        for pending in (self._closes, self._masks, self._releases):
            pending.clear()
        for slot in self._openings:
            self._started(slot, now)
        self._openings.clear()
        for run in plan.releases:
            self.holdings.drop(run)
        for place, memory in zip(plan.placements, memories, strict=True):
            self._place(place.waiting, place.slots, memory, len(place.openings), now)
        return True

    def _write(
        self, channel: DaemonChannel, owner: LiveGeneration, slot: int, generation: int, memory: SlotMemory
    ) -> None:
        block = slot_request(owner.request, owner.choice, generation, memory, self._model.layer_experts)
        channel.write_request(slot, block)
        for position, mask in owner.early_masks.items():
            channel.write_mask(slot, position, mask)

    def _place(
        self,
        waiting: Waiting[Group],
        places: Sequence[FreeSlot],
        memories: Sequence[SlotMemory],
        opened: int,
        now: float,
    ) -> None:
        group = waiting.owner
        self.queue.take(group)
        if memories[0].run:
            self.holdings.open(memories[0].run, group.scope, group.prompt, waiting.lead_tokens)
        for index, (member, place, memory) in enumerate(zip(group.members, places, memories, strict=True)):
            self.slots.reserve(place.slot, place.generation, member, memory)
            member.place = Place(place.slot, place.generation)
            if memory.run and not memory.writes:
                self.holdings.use(memory.run)
            if memory.source:
                self.holdings.use(memory.source)
            if index < opened:
                self._started(self.slots[place.slot], now)

    def _started(self, slot: Slot[LiveGeneration], now: float) -> None:
        assert slot.owner is not None, "a reserved slot has an owner"
        self.slots.start(slot)
        slot.owner.early_masks.clear()
        slot.owner.clock.placed = now

    def mask(self, channel: DaemonChannel | None, generation: LiveGeneration, position: int, mask: bytes) -> None:
        """Write a mask down and tell the engine, at once or with the opening."""
        slot = self._slot_of(generation)
        if slot is None or slot.state is SlotState.RESERVED or channel is None:
            generation.early_masks[position] = mask
            return
        channel.write_mask(slot.index, position, mask)
        self._masks.append(Mask(slot.index, slot.generation, position))

    def let_go(self, generation: LiveGeneration) -> None:
        """Nobody wants it any more: take it from the queue, give back what is reserved, or close its slot."""
        slot = self._slot_of(generation)
        if slot is None:
            self.queue.remove(generation)
        elif slot.state is SlotState.RESERVED:
            self._forget_opening(slot)
            self._free(slot)
        else:
            self.slots.close(slot)
            self._closes.append(Close(slot.index, slot.generation))

    def let_all_go(self) -> list[LiveGeneration]:
        """Close and empty everything. Returns who was served or waited."""
        gone = self.queue.clear()
        for slot in self.slots.among(SlotState.RESERVED, *_SERVED):
            assert slot.owner is not None, "a slot that is not free has an owner"
            gone.append(slot.owner)
            self.let_go(slot.owner)
        return gone

    # -------------------------------------------------------------------- up

    def published(self, slot: Slot[LiveGeneration]) -> None:
        """The slot's prompt is computed: the other choices may open, and so may others that begin alike."""
        run, lead = slot.memory.run, slot.owner
        assert lead is not None, "a slot that is not free has an owner"
        self.holdings.publish(run)
        if self.holdings[run].released:  # forgotten while it was computed
            self._releases.append(run)
        self._drop_covered(run)
        for other in self.slots.among(SlotState.RESERVED):
            if other.memory.run == run:
                assert other.owner is not None, "a reserved slot has an owner"
                other.owner.lead = lead
                self._openings.append(other)

    def opened(self, slot: Slot[LiveGeneration]) -> None:
        """The slot has its memory, and a copy of what it takes from another run."""
        source = self.slots.opened(slot)
        if source:
            self._leave(source)

    def waits(self, slot: Slot[LiveGeneration]) -> None:
        """The engine has no memory for the slot yet."""
        self.slots.wait(slot)
        self._make_room()

    def released(self, slot: Slot[LiveGeneration], *, whole: bool) -> None:
        """The engine has released the slot. whole: what it generated stays in its run."""
        # A close that was not pushed yet is pointless now, and its generation is over.
        self._closes = [close for close in self._closes if close.slot != slot.index]
        run, generation = slot.memory.run, slot.owner
        assert generation is not None, "a slot that is not free has an owner"
        if slot.memory.writes and not self.holdings[run].tokens:
            self._place_anew(run)
        elif slot.memory.writes and whole and self._model.output_is_prompt:
            output = array("i", generation.tokens[:-1])  # the last token never went in
            self.holdings.grow(run, output.tobytes())
        self._free(slot)
        self._make_room()

    def forget(self) -> None:
        """Nobody may take over what has been computed so far; who uses it goes on."""
        for holding in list(self.holdings):
            if not holding.users:
                self._drop(holding.run)
            elif not holding.released:
                holding.released = True
                if holding.tokens:
                    self._releases.append(holding.run)

    def lost(self) -> list[LiveGeneration]:
        """The engine is gone, with all that it held. Returns who was served."""
        for pending in (self._closes, self._masks, self._releases, self._openings):
            pending.clear()
        owners = self.slots.release_all()
        self.holdings.clear()
        return owners

    def _place_anew(self, run: int) -> None:
        """The choice that should have computed a prompt has ended before: the others go back to the queue."""
        others = [slot for slot in self.slots.among(SlotState.RESERVED) if slot.memory.run == run]
        members = []
        for slot in others:
            assert slot.owner is not None, "a reserved slot has an owner"
            members.append(slot.owner)
            slot.owner.place = None
            self._free(slot)
        if members:
            group = members[0].group
            assert group is not None, "it was queued"
            self.queue.put_back(Group(group.request, members, group.order, group.prompt, group.scope))

    def _free(self, slot: Slot[LiveGeneration]) -> None:
        memory = slot.memory
        self._more_room = True
        self.slots.release(slot)
        for run in (memory.run, memory.source):
            if run:
                self._leave(run)

    def _leave(self, run: int) -> None:
        self._more_room = True
        if self.holdings.leave(run):
            self._drop(run)
        elif not self.holdings[run].users:
            self._drop_covered(run)
            if self.holdings.is_covered(run):
                self._drop(run)

    def _drop_covered(self, run: int) -> None:
        """What another holding holds as well is not worth its memory."""
        for other in self.holdings.covered(run):
            self._drop(other)

    def _drop(self, run: int) -> None:
        if not self.holdings[run].released:
            self._releases.append(run)  # also where the engine may not hold it: a slot may fail after it published
        self.holdings.drop(run)

    def _make_room(self) -> None:
        """A slot waits for memory in pieces that are large enough."""
        if not any(slot.waiting for slot in self.slots.among(SlotState.OPENING)):
            return
        idle = self.holdings.idle()
        if idle:
            self._drop(idle[0].run)
        elif not self.slots.among(*_ENDING):
            for holding in self.holdings:
                if holding.tokens and not holding.released:
                    holding.released = True
                    self._releases.append(holding.run)

    def _forget_opening(self, slot: Slot[LiveGeneration]) -> None:
        if slot in self._openings:
            self._openings.remove(slot)

    def _slot_of(self, generation: LiveGeneration) -> Slot[LiveGeneration] | None:
        return None if generation.place is None else self.slots.find(*_place(generation))

    def check(self) -> None:
        """AssertionError if slots, holdings and what is between them do not fit together."""
        self.slots.check()
        self.holdings.check()
        users = {holding.run: 0 for holding in self.holdings}
        for slot in self.slots.among(SlotState.RESERVED, *_SERVED, SlotState.CLOSING):
            for run in (slot.memory.run, slot.memory.source):
                if run:
                    users[run] += 1
        for holding in self.holdings:
            assert holding.users == users[holding.run], f"run {holding.run} has {users[holding.run]} users"


def _place(generation: LiveGeneration) -> tuple[int, int]:
    assert generation.place is not None
    return generation.place.slot, generation.place.generation


def _waiting(group: Group) -> Waiting[Group]:
    request = group.request
    return Waiting(
        group,
        group.prompt,
        request.max_tokens,
        len(group.members),
        group.scope,
        uses_prefix=request.prompt_logprobs is None,
        masks=tuple(tuple(member.early_masks) for member in group.members),
    )


def _opening(slot: Slot[LiveGeneration]) -> Opening:
    assert slot.owner is not None, "a reserved slot has an owner"
    owner = slot.owner
    return Opening(slot.index, slot.generation, len(owner.request.prompt_ids), tuple(owner.early_masks))


def _memories(waiting: Waiting[Group], run: int, prefix: Prefix | None) -> list[SlotMemory]:
    """Of each choice."""
    if not run:
        return [SlotMemory(waiting.lead_tokens)] * waiting.choices
    lead = SlotMemory(run=run, writes=True)
    if prefix is not None:
        lead = lead._replace(prefix=prefix.tokens, source=prefix.run)
    other = SlotMemory(waiting.other_tokens, run=run, prefix=waiting.prompt_tokens - 1)
    return [lead, *[other] * (waiting.choices - 1)]
