"""The life of the daemon: starting, serving, draining, stopped; signals move it forward, never back.

SIGTERM and SIGINT begin draining, the second one stops now. What SIGHUP does is
said by whoever watches signals.
"""

from __future__ import annotations

import asyncio
import signal
from enum import IntEnum
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable


class Stage(IntEnum):
    STARTING = 0
    SERVING = 1
    DRAINING = 2
    STOPPED = 3


class Lifecycle:
    """Owner of the stage. Lives on one event loop; `drain` and `now` may be awaited by any task."""

    def __init__(self) -> None:
        self._stage = Stage.STARTING
        self.drain = asyncio.Event()  # set when draining begins
        self.now = asyncio.Event()  # set when there is no more time for running requests
        self._log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

    @property
    def stage(self) -> Stage:
        return self._stage

    def serving(self) -> None:
        """The engine is ready. No effect once draining has begun."""
        if self._stage is Stage.STARTING:
            self._stage = Stage.SERVING

    def stop(self, reason: str) -> None:
        """First call: drain. Second: now."""
        if self._stage < Stage.DRAINING:
            self._stage = Stage.DRAINING
            self._log.info("draining", reason=reason)
            self.drain.set()
        elif not self.now.is_set():
            self._log.warning("stopping_now", reason=reason)
            self.now.set()

    def stopped(self) -> None:
        assert self._stage is Stage.DRAINING, "only a draining daemon may stop"
        self._stage = Stage.STOPPED

    def watch_signals(self, loop: asyncio.AbstractEventLoop, hangup: Callable[[], None]) -> Callable[[], None]:
        """Takes SIGTERM, SIGINT and, for `hangup`, SIGHUP; the result gives them back."""
        taken = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in taken[:2]:
            loop.add_signal_handler(number, self.stop, number.name)
        loop.add_signal_handler(signal.SIGHUP, hangup)

        def give_back() -> None:
            for number in taken:
                loop.remove_signal_handler(number)

        return give_back
