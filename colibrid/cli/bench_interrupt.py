"""Ctrl-C and SIGTERM while something is measured: the first ends the load and keeps what finished, the second everything."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from colibrid.errors import ColibridError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import FrameType

_TAKEN = (signal.SIGINT, signal.SIGTERM)


class NothingMeasuredError(ColibridError):
    """The first signal came before the load began."""


class Interruption:
    """Takes both signals as a context manager of the main thread; elsewhere they are not its to take."""

    def __init__(self) -> None:
        self.at: float | None = None  # of time.perf_counter, when the first came
        self._before: dict[signal.Signals, Any] = {}
        self._tell: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in _TAKEN}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def run(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether all of the work was done; else it was cancelled at the signal, or not begun."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        self._tell = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            if self.at is not None:
                task.cancel()  # before its first step
            await asyncio.wait([task])
        finally:
            self._tell = None
            task.cancel()  # where whoever waits here is cancelled
        if task.cancelled():
            return False
        task.result()
        return True

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.at is not None:  # at once, as if nobody had taken it
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.at = time.perf_counter()
        if self._tell is not None:
            self._tell()
