"""Requests wait for a slot no longer than limits.queue_timeout_s: whoever waits in vain should hear of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.batch.generation import LiveGeneration
    from colibrid.batch.queue import Queue


class QueueDeadline:
    """Owner of one timer for a whole queue. Lives on the scheduler's event loop."""

    def __init__(self, queue: Queue, timeout_s: float | None, fail: Callable[[LiveGeneration], None]) -> None:
        """`fail` is called for each choice that has waited for so long, and takes it from the queue. None: no limit."""
        self._queue = queue
        self._timeout_s = timeout_s
        self._fail = fail
        self._timer: asyncio.TimerHandle | None = None

    def set_timeout(self, timeout_s: float | None) -> None:
        """Another limit from now on, also for what waits already."""
        if timeout_s != self._timeout_s:
            self._timeout_s = timeout_s
            self.cancel()
            self._watch_all()

    def watch(self, submitted: float) -> None:
        """Something waits that was submitted at that time of the loop's clock."""
        if self._timeout_s is None:
            return
        due = submitted + self._timeout_s
        if self._timer is None or due < self._timer.when():
            self.cancel()
            self._timer = asyncio.get_running_loop().call_at(due, self._over)

    def cancel(self) -> None:
        """Nothing is watched any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _over(self) -> None:
        assert self._timeout_s is not None, "without a limit there is no timer"
        self._timer = None
        latest = asyncio.get_running_loop().time() - self._timeout_s
        late = [one for group in self._queue for one in group.members if one.clock.submitted <= latest]
        for generation in late:
            self._fail(generation)
        self._watch_all()

    def _watch_all(self) -> None:
        submitted = [group.members[0].clock.submitted for group in self._queue]
        if submitted:
            self.watch(min(submitted))
