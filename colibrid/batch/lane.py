"""One engine of several with its scheduler: how busy it is, what it holds, and how what waits there moves elsewhere.

Stands between supervisor and scheduler, so that the pool hears of a ready, lost or given-up engine as well.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Protocol

import msgspec

from colibrid.batch.plan import reserved_tokens
from colibrid.batch.reports import EngineReport
from colibrid.engine.state import EngineStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.batch.queue import Group
    from colibrid.batch.reports import Traffic
    from colibrid.batch.request import GenerateRequest
    from colibrid.batch.scheduler import Engine, Scheduler
    from colibrid.engine.state import Readiness
    from colibrid.engine.supervisor import EngineListener, EngineSession


class LaneOwner(Protocol):
    """The pool, as a lane sees it."""

    def take_work(self, lane: Lane) -> None:
        """The lane could serve more than waits there."""
        ...

    def lane_changed(self, lane: Lane) -> None:
        """It may have free slots now, or something has to wait there."""
        ...

    def hand_over(self, lane: Lane) -> None:
        """The lane's engine is gone."""
        ...


class Lane:
    """See the module's docstring. To its scheduler it is the engine."""

    def __init__(
        self, engine: Engine, index: int, owner: LaneOwner, scheduler_of: Callable[[Engine, int], Scheduler]
    ) -> None:
        self.index = index
        self._engine = engine
        self._owner = owner
        self._listener: EngineListener | None = None
        self.scheduler = scheduler_of(self, index)
        self.scheduler.when_changed(lambda: owner.lane_changed(self))

    # ------------------------------------------------ supervisor to scheduler

    @property
    def readiness(self) -> Readiness:
        """The engine's."""
        return self._engine.readiness

    def attach(self, listener: EngineListener) -> None:
        """Called by the scheduler while it is made."""
        self._listener = listener
        self._engine.attach(self)

    def engine_ready(self, session: EngineSession) -> None:
        """Called by the supervisor."""
        self._told.engine_ready(session)
        self._owner.take_work(self)

    def engine_lost(self, reason: str) -> None:
        """Called by the supervisor: what ran there fails, what waits need not wait for the next engine."""
        self._told.engine_lost(reason)
        self._owner.hand_over(self)

    def engine_gave_up(self, reason: str) -> None:
        """Called by the supervisor: what still waits here fails."""
        self._owner.hand_over(self)
        self._told.engine_gave_up(reason)

    @property
    def _told(self) -> EngineListener:
        assert self._listener is not None, "a scheduler attaches itself when it is made"
        return self._listener

    # ------------------------------------------------------------- how it is

    @property
    def queued(self) -> int:
        """Choices that wait."""
        return self.scheduler.placer.queue.choices

    @property
    def load(self) -> int:
        """Choices that run or wait."""
        return self.scheduler.placer.slots.busy + self.queued

    @property
    def slots(self) -> int:
        """Choices that can run at once."""
        return len(self.scheduler.placer.slots)

    @property
    def spare(self) -> int:
        """Choices that could run now and are not there; 0 while some wait, for memory or their turn."""
        return self.slots - self.load if self.readiness.ready and not self.queued else 0

    def fits(self, request: GenerateRequest) -> bool:
        """Can this engine's KV memory ever hold the request?"""
        memory = self.scheduler.info.memory
        needed = reserved_tokens(len(request.prompt_ids), request.max_tokens, request.n)
        return memory is not None and needed <= memory.kv_tokens

    def held_tokens(self, request: GenerateRequest) -> int:
        """How much of the prompt's beginning this engine need not compute."""
        scope = self.scheduler.scope(request)
        if scope is None or request.prompt_logprobs is not None:
            return 0
        found = self.scheduler.placer.holdings.match(scope, array("i", request.prompt_ids).tobytes())
        return 0 if found is None else found.tokens

    def held_bytes(self, page_bytes: int) -> int:
        """What the engine's KV memory has given to runs that outlive their requests; in whole pages."""
        memory = self.scheduler.info.memory
        if memory is None:
            return 0
        sizes = [holding.capacity * memory.kv_bytes_per_token for holding in self.scheduler.placer.holdings]
        return sum(-(-size // page_bytes) * page_bytes for size in sizes)

    def status(self) -> EngineStatus:
        """For /health."""
        info = self.scheduler.info
        return EngineStatus(
            index=self.index,
            device=info.device,
            slots=self.slots,
            running=self.scheduler.placer.slots.busy,
            queued=self.queued,
            memory=info.memory,
            **msgspec.structs.asdict(self.readiness),
        )

    def report(self, traffic: Traffic) -> EngineReport:
        """For metrics."""
        scheduler = self.scheduler
        return EngineReport(
            status=self.status(), measures=scheduler.measures, counters=scheduler.engine_counters, traffic=traffic
        )

    # -------------------------------------------------------------- hand over

    def first_waiting(self) -> Group | None:
        """Whose turn is next."""
        return next(iter(self.scheduler.placer.queue), None)

    def give(self, group: Group, taker: Lane) -> None:
        """What waits here goes on waiting there, in the place that its arrival gives it."""
        self.scheduler.release(group)
        taker.scheduler.adopt(group)
