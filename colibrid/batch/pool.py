"""Several engines as one service: which of them takes a request, and who takes over what waits.

    submit ─▶ choose ─▶ lane 0: scheduler ─▶ engine 0
                  └───▶ lane 1: scheduler ─▶ engine 1     what waits at one lane goes to another that has free slots,
                                                          or to any that serves when its own engine is lost

A request goes to the lane whose engine holds the longest beginning of its prompt, unless that lane is much busier than
the least loaded one; without such a beginning, to the least loaded. Every engine gives the same tokens: which one
computes a request can be told from its timing only.

Lives on the schedulers' event loop, and implements interfaces.GenerationService.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from colibrid.batch.holdings import HELD_TOKENS
from colibrid.batch.lane import Lane
from colibrid.batch.reports import Traffic
from colibrid.batch.scheduler import SchedulerCounts
from colibrid.engine.state import overall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from colibrid.batch.generation import LiveGeneration
    from colibrid.batch.interfaces import EngineInfo
    from colibrid.batch.reports import EngineReport, SlotReport
    from colibrid.batch.request import GenerateRequest
    from colibrid.batch.scheduler import Engine, Scheduler
    from colibrid.engine.state import EngineStatus, Readiness
    from colibrid.engine.swaps import ExpertSwaps

MUCH = 4  # a lane is much busier when it has more than 1 / MUCH of its slots to do beyond the least loaded one


class EnginePool:
    """See the module's docstring."""

    def __init__(
        self,
        engines: Sequence[Engine],
        scheduler_of: Callable[[Engine, int], Scheduler],
        swaps: ExpertSwaps | None = None,
    ) -> None:
        """scheduler_of: makes the scheduler of an engine, which has that number."""
        self.swaps = swaps  # of the engines' experts
        self.traffic = Traffic()  # of the model; set by whoever knows it
        if swaps is not None:
            swaps.when_changed(self._weights_changed)
        assert engines, "a service has an engine"
        self.lanes: tuple[Lane, ...] = ()
        self.lanes = tuple(Lane(engine, index, self, scheduler_of) for index, engine in enumerate(engines))

    # ------------------------------------------------------------ for others

    @property
    def info(self) -> EngineInfo:
        """What requests are checked against: of the first engine that is ready, else of the first."""
        return next((lane for lane in self.lanes if lane.readiness.ready), self.lanes[0]).scheduler.info

    @property
    def readiness(self) -> Readiness:
        """Ready if one engine is."""
        return overall([lane.readiness for lane in self.lanes])

    @property
    def engines(self) -> tuple[EngineStatus, ...]:
        """Each engine by itself."""
        return tuple(lane.status() for lane in self.lanes)

    @property
    def reports(self) -> tuple[EngineReport, ...]:
        """Each engine with what was counted."""
        return tuple(lane.report(self.traffic) for lane in self.lanes)

    @property
    def slot_reports(self) -> tuple[tuple[SlotReport, ...], ...]:
        """The slots of each engine."""
        return tuple(lane.scheduler.slot_reports for lane in self.lanes)

    @property
    def expert_swaps(self) -> int:
        """Experts that were replaced since the start."""
        return 0 if self.swaps is None else self.swaps.weights_generation

    @property
    def draining(self) -> bool:
        """True from drain() or stop() on: new requests are refused."""
        return self.lanes[0].scheduler.draining

    @property
    def idle(self) -> bool:
        """True iff nothing runs, waits or is held anywhere."""
        return all(lane.scheduler.idle for lane in self.lanes)

    @property
    def counts(self) -> SchedulerCounts:
        """Of all engines together."""
        counts = [lane.scheduler.counts for lane in self.lanes]
        names = SchedulerCounts.__struct_fields__
        return SchedulerCounts(**{name: sum(getattr(one, name) for one in counts) for name in names})

    @contextmanager
    def held(self) -> Iterator[None]:
        """See GenerationService.held."""
        with ExitStack() as stack:
            for lane in self.lanes:
                stack.enter_context(lane.scheduler.held())
            yield

    def submit(self, request: GenerateRequest, *, begun: bool = False) -> LiveGeneration:
        """As Scheduler.submit, on the lane of its choice."""
        return self._choose([request]).submit(request, begun=begun)

    def submit_all(self, requests: Sequence[GenerateRequest]) -> tuple[LiveGeneration, ...]:
        """As Scheduler.submit_all: on one lane; the others help when they have nothing to do."""
        return self._choose(requests).submit_all(requests)

    def check_room(self) -> None:
        """See GenerationService.check_room: of the lane that would take a request."""
        self._choose(()).check_room()

    async def drain(self, timeout_s: float) -> bool:
        """As Scheduler.drain, of all."""
        return all(await asyncio.gather(*(lane.scheduler.drain(timeout_s) for lane in self.lanes)))

    def stop(self) -> None:
        """As Scheduler.stop, of all."""
        for lane in self.lanes:
            lane.scheduler.stop()

    def _weights_changed(self, weights: str) -> None:
        for lane in self.lanes:
            lane.scheduler.weights_changed(weights)

    # ---------------------------------------------------------------- choice

    def _choose(self, requests: Sequence[GenerateRequest]) -> Scheduler:
        """The lane for these requests; where none can take them, one that says why."""
        if len(self.lanes) == 1:
            return self.lanes[0].scheduler
        ready = [lane for lane in self.lanes if lane.readiness.ready]
        able = [lane for lane in ready if all(map(lane.fits, requests))] or ready or list(self.lanes)
        least = min(able, key=lambda lane: lane.load)
        full = least.load >= least.slots
        near = [lane for lane in able if lane.load <= least.load + max(1, lane.slots // MUCH)]
        near = [lane for lane in near if full or lane.load < lane.slots]
        if len(near) == 1 or not requests:
            return least.scheduler
        held = {lane.index: lane.held_tokens(requests[0]) for lane in near}
        holder = max(near, key=lambda lane: held[lane.index])
        return (holder if held[holder.index] - held[least.index] >= HELD_TOKENS else least).scheduler

    # ------------------------------------------------------------- take over

    def lane_changed(self, lane: Lane) -> None:
        """A lane with free slots takes work; of one where something waits, as for memory, those take it that do nothing."""
        self.take_work(lane)
        if lane.first_waiting() is not None:
            for other in self.lanes:
                if other is not lane and other.load == 0:
                    self.take_work(other)

    def take_work(self, lane: Lane) -> None:
        """Give a lane with free slots what has waited longest where most waits."""
        others = [one for one in self.lanes if one is not lane]
        spare = lane.spare if others and not self.draining else 0
        while spare > 0:
            giver = max(others, key=lambda one: one.queued)
            group = giver.first_waiting()
            if group is None or len(group.members) > spare or not lane.fits(group.request):
                return
            giver.give(group, lane)
            spare -= len(group.members)

    def hand_over(self, lane: Lane) -> None:
        """Share out what waits for an engine that is gone over those that serve."""
        if self.draining:
            return
        while (group := lane.first_waiting()) is not None:
            others = [one for one in self.lanes if one.readiness.ready and one is not lane and one.fits(group.request)]
            if not others:
                return
            lane.give(group, min(others, key=lambda one: one.load))
