"""All engines of the daemon as one: started and stopped together, each watched and restarted by its own supervisor.

The daemon is ready when the first engine is, and fails when the last one has been given up. An engine that was given up
while others serve stays down until the daemon is started again; the daemon's exit code then says so.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from colibrid.engine.state import Readiness, overall
from colibrid.engine.supervisor import STOP_GRACE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.config.settings import EngineSettings
    from colibrid.engine.state import MemoryPlan, StartTimings
    from colibrid.engine.supervisor import Supervisor
    from colibrid.errors import ColibridError


class Fleet:
    """See the module's docstring. Owns the supervisors; lives on their event loop."""

    def __init__(self, supervisors: Sequence[Supervisor]) -> None:
        assert supervisors, "a daemon has an engine"
        self.supervisors = tuple(supervisors)

    @property
    def readiness(self) -> Readiness:
        """Of all engines together."""
        return overall([one.readiness for one in self.supervisors])

    @property
    def failure(self) -> ColibridError | None:
        """Why an engine was given up, also if others serve; for the operator (may name files)."""
        return next((one.failure for one in self.supervisors if one.failure is not None), None)

    @property
    def memory(self) -> tuple[MemoryPlan, ...]:
        """The bills of the engines that are ready now."""
        return tuple(one.memory for one in self.supervisors if one.memory is not None)

    @property
    def timings(self) -> StartTimings | None:
        """Of the engine that became ready first; None before."""
        known = [one.timings for one in self.supervisors if one.timings is not None]
        return min(known, key=lambda one: one.total_ms, default=None)

    def follow(self, settings: EngineSettings) -> None:
        """Watch all engines by these bounds from now on."""
        for one in self.supervisors:
            one.follow(settings)

    def start(self) -> None:
        """Spawn all engines. Must be called on the event loop."""
        for one in self.supervisors:
            one.start()

    async def wait_ready(self) -> None:
        """Return when an engine is ready. Raises the reason if all gave up, EngineError if they were stopped."""
        waiting = {asyncio.create_task(one.wait_ready()) for one in self.supervisors}
        try:
            while True:
                done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if not rest or any(task.exception() is None for task in done):
                    break
                waiting = rest
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        failures = [task.exception() for task in done]
        if None not in failures and failures[0] is not None:
            raise failures[0]

    async def wait_ended(self) -> ColibridError | None:
        """Return when no engine will come any more: the first reason if any gave up, None after stop()."""
        await asyncio.gather(*(one.wait_ended() for one in self.supervisors))
        return self.failure

    def check(self) -> None:
        """Have every engine verify its invariants at its next step boundary."""
        for one in self.supervisors:
            one.check()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End all engines; as Supervisor.stop."""
        await asyncio.gather(*(one.stop(grace_s) for one in self.supervisors))
