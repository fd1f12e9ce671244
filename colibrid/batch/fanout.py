"""From the engine's events to the generations that wait for them.

Everything that has arrived is handed on first, then each generation is woken once, so that a consumer gets all of its
tokens in one list. What it means for slots and memory is the placer's. Lives on the scheduler's event loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec
import structlog

from colibrid.batch.measures import Gaps, Measures
from colibrid.batch.request import ExpertUsage, FinishReason, GenerateResult, Switch
from colibrid.batch.slots import Slot, SlotState
from colibrid.batch.translate import fault, token_record
from colibrid.engine import abi
from colibrid.engine.channel import Event

if TYPE_CHECKING:
    from colibrid.batch.generation import LiveGeneration
    from colibrid.batch.interfaces import EngineInfo
    from colibrid.batch.placer import Placer
    from colibrid.engine.channel import DaemonChannel, Fields
    from colibrid.engine.supervisor import EngineSession
    from colibrid.errors import RequestError

_TOKEN = int(abi.EventKind.TOKEN)
_NO_SLOT, _RESERVED, _CLOSING = int(abi.NO_SLOT), SlotState.RESERVED, SlotState.CLOSING  # names of an Enum take time
_SMOOTHING = 0.1  # weight of the newest request in the mean duration
_EARLY_S = 0.004  # a beat that is so near is taken together with a step of the engine: each waking of the loop costs


def _most(per_token: int | tuple[int, ...] | None) -> int | None:
    return max(per_token) if isinstance(per_token, tuple) else per_token


class Tally(msgspec.Struct):
    """What has happened to requests so far."""

    measures: Measures
    submitted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    pushes: int = 0
    mean_duration_s: float = 0.0  # of finished requests, from placement to end; the newest count most

    def fail(self, generation: LiveGeneration, error: RequestError) -> None:
        """Fail a generation unless it has ended."""
        if not generation.ended:
            self.failed += 1
            self.measures.endings["error"] += 1
            generation.fail(error)

    def finish(self, generation: LiveGeneration, result: GenerateResult) -> None:
        """End a generation normally."""
        self.finished += 1
        self.measures.finished(result)
        duration = (result.prefill_ms + result.decode_ms) / 1000
        self.mean_duration_s += (duration - self.mean_duration_s) * (_SMOOTHING if self.mean_duration_s else 1.0)
        generation.finish(result)

    def cancel(self) -> None:
        """A consumer wants no more of a generation."""
        self.cancelled += 1
        self.measures.endings["abort"] += 1


class FanOut:
    """See the module's docstring."""

    def __init__(self, placer: Placer, tally: Tally, info: EngineInfo) -> None:
        self._placer = placer
        self._tally = tally
        self._measures = tally.measures
        self._gaps = Gaps(tally.measures)
        self._info = info
        self._late: dict[LiveGeneration, None] = {}  # something has arrived for them, in order
        self._timer: asyncio.TimerHandle | None = None
        self._log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

    def take(self, session: EngineSession) -> None:
        """Hand on all events that have arrived."""
        channel, find, late = session.channel, self._placer.slots.find, self._late
        self._gaps.begin_turn(time.monotonic())
        for fields in channel.pop_fields():
            kind, index, number, _, _, _, _, _ = fields
            slot = find(index, number)
            if slot is None and index == _NO_SLOT:
                self._placer.forget()  # experts were replaced: what is held was computed by those before
                continue
            if slot is None or slot.state is _RESERVED:
                self._log.warning("stale_event", kind=kind, slot=index, generation=number)
                continue
            assert slot.owner is not None, "a slot that is found has an owner"
            late[slot.owner] = None
            if kind == _TOKEN:
                self._on_token(channel, slot, slot.owner, fields)
            else:
                self._on_event(channel, slot, slot.owner, Event._make(fields))
        self._gaps.end_turn()
        self._wake()

    def _wake(self) -> None:
        """Wake each of the late whose pace allows it, now or as soon as it does."""
        loop, late = asyncio.get_running_loop(), self._late
        now = loop.time() + _EARLY_S
        due = [one for one in late if one.due <= now or one.ended]
        for generation in due:
            del late[generation]
            generation.wake_at(now)
        if self._timer is not None and due:
            self._timer.cancel()
            self._timer = None
        if late and self._timer is None:
            self._timer = loop.call_at(min(one.due for one in late), self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        self._wake()

    def _on_token(
        self, channel: DaemonChannel, slot: Slot[LiveGeneration], generation: LiveGeneration, fields: Fields
    ) -> None:
        """Most events are of this kind."""
        _, _, _, record, position, token, flags, _ = fields
        if position == 0:
            self._on_prompt(channel, slot, generation)
            self._measures.first_token_s.add(generation.clock.waited)
        if slot.state is not _CLOSING:  # else it was cancelled, and only its slot is of interest
            self._gaps.token(generation)
            if generation.request.logprobs is None:
                generation.tokens.append(token)  # as add(), without the call
            else:
                generation.add(token, channel.raw_record(slot.index, record))
        if flags:
            self._on_end(channel, slot, generation, Event._make(fields))

    def _on_event(
        self, channel: DaemonChannel, slot: Slot[LiveGeneration], generation: LiveGeneration, event: Event
    ) -> None:
        match event.kind:
            case abi.EventKind.OPENED:
                self._placer.opened(slot)
            case abi.EventKind.WAITING:
                self._placer.waits(slot)
            case abi.EventKind.SWITCHED:
                generation.switches.append(Switch(event.record, event.position))
            case abi.EventKind.FINISHED:
                self._on_prompt(channel, slot, generation)
                self._on_end(channel, slot, generation, event)
            case abi.EventKind.CLOSED:
                self._count_experts(channel, slot, generation)
                self._placer.released(slot, whole=True)
            case abi.EventKind.FAILED:
                if slot.state is not _CLOSING:
                    self._tally.fail(generation, fault(event.status, generation.request))
                self._placer.released(slot, whole=False)
            case _:
                self._log.error("unknown_event", kind=event.kind)

    def _on_prompt(self, channel: DaemonChannel, slot: Slot[LiveGeneration], generation: LiveGeneration) -> None:
        """The prompt is complete."""
        generation.clock.first = asyncio.get_running_loop().time()
        wanted, lead = generation.request.prompt_logprobs, generation.lead
        if lead is None:
            self._measures.prompt(len(generation.request.prompt_ids), channel.usage(slot.index).cached_tokens)
        if lead is not None:
            generation.read_prompt = lambda: lead.prompt_records
        elif wanted is not None:
            ids = generation.request.prompt_ids
            read = channel.prompt_reader(slot.index, len(ids))
            generation.read_prompt = lambda: tuple(
                token_record(token, record, wanted) for token, record in zip(ids, read(), strict=True)
            )
        if slot.memory.writes:
            self._placer.published(slot)

    def _on_end(
        self, channel: DaemonChannel, slot: Slot[LiveGeneration], generation: LiveGeneration, event: Event
    ) -> None:
        self._count_experts(channel, slot, generation)
        if slot.state is not _CLOSING:
            stopped = bool(event.flags & abi.Finish.STOP)
            reason: FinishReason = "stop" if stopped else "length"
            stop_token = event.token if stopped else None
            self._tally.finish(generation, self.result(channel, slot.index, generation, reason, stop_token))
        self._placer.released(slot, whole=True)

    def _count_experts(self, channel: DaemonChannel, slot: Slot[LiveGeneration], generation: LiveGeneration) -> None:
        """The engine is done with the slot: its counts are final, unless it never began and they are another's."""
        if generation.clock.first is not None:
            self._measures.load.add(channel.expert_counts(slot.index))

    def result(
        self,
        channel: DaemonChannel,
        slot: int,
        generation: LiveGeneration,
        reason: FinishReason,
        stop_token: int | None,
    ) -> GenerateResult:
        """What is known of a generation whose prompt is complete: final when it has ended, else up to now."""
        request, clock = generation.request, generation.clock
        assert clock.placed is not None, "it was placed"
        assert clock.first is not None, "its prompt is complete"
        usage = channel.usage(slot)
        return GenerateResult(
            finish_reason=reason,
            stop_token=stop_token,
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=generation.received,
            cached_tokens=usage.cached_tokens if generation.lead is None else 0,
            experts=ExpertUsage(
                _most(request.experts.per_token) or self._info.experts_per_token,
                usage.assignments,
                usage.trimmed,
                usage.dropped,
                self._info.batch_dependent,
                usage.weights_generation,
                tuple(generation.switches),
            ),
            pooled=None if request.pooling is None else channel.pooled(slot),
            queue_ms=(clock.placed - clock.submitted) * 1000,
            prefill_ms=(clock.first - clock.placed) * 1000,
            decode_ms=(asyncio.get_running_loop().time() - clock.first) * 1000,
        )
