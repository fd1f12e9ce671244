"""Tells the service manager that the daemon lives: a turning loop and an engine that is well or being cured."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.config.settings import EngineSettings
    from colibrid.engine.fleet import Fleet
    from colibrid.engine.state import Readiness
    from colibrid.ops.systemd import Notifier

_MAX_INTERVAL_S = 1.0
_CURE_S = 5.0  # killing a stalled engine and starting another


async def heartbeat(notifier: Notifier, fleet: Fleet, settings: Callable[[], EngineSettings]) -> None:
    """Runs until cancelled; `settings` gives those in force. A blocked loop cannot get here, so the manager's watchdog then fires."""
    if not notifier.active:
        return
    interval = min(_MAX_INTERVAL_S, (notifier.watchdog_s or _MAX_INTERVAL_S) / 3)
    while True:
        readiness, stall_s = fleet.readiness, settings().stall_timeout_s
        if engine_is_well(readiness, stall_s + _CURE_S):
            notifier.watchdog()
        if readiness.phase in ("starting", "loading", "restarting"):
            percent = "" if readiness.percent is None else f" {readiness.percent} %"
            notifier.status(f"engine {readiness.phase}{percent}")
            notifier.extend_timeout(interval + stall_s + _CURE_S)
        await asyncio.sleep(interval)


def engine_is_well(readiness: Readiness, bound_s: float) -> bool:
    """True while steps are fresh, or while the supervisor cures the engine within its own bounds."""
    if readiness.phase == "ready":
        return readiness.last_step_age_s is None or readiness.last_step_age_s <= bound_s
    return readiness.phase in ("starting", "loading", "restarting")
