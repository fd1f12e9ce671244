"""How Python's garbage collector behaves in a daemon.

A full collection looks at every object and stops the event loop meanwhile: 0.2 s with the log-probabilities of a few
thousand tokens in memory. Nearly all our garbage is freed by reference counts. What is left are small cycles around
connections: collections of young objects find most of them, and a full one the rest: when nobody waits for an answer,
or when there is so little to look at that nobody notices, since a busy daemon may never be idle.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_YOUNG = 2000  # objects more than before: the youngest are looked at
_MIDDLE = 10  # such collections: the next generation too
_FULL = 100  # of those: everything, so after two million objects that stay
_IDLE_S = 30.0
_FEW = 50_000  # objects that have lasted: some five milliseconds


def calm_collector() -> None:
    """Full collections become rare, and leave out what exists now. Call once, when everything is loaded."""
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _FULL)


async def collect_when_idle(idle: Callable[[], bool], interval_s: float = _IDLE_S) -> None:
    """A full collection every `interval_s`, unless it would take long and somebody is served. Runs until cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        if idle() or len(gc.get_objects(generation=2)) <= _FEW:
            gc.collect()
