"""What the admin routes share beyond the public ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

if TYPE_CHECKING:
    from colibrid.engine.swaps import ExpertSwaps
    from colibrid.ops.reload import SettingsReloader


class Drainer(Protocol):
    """Lets running requests end and refuses new ones."""

    async def drain(self, timeout_s: float) -> bool:
        """False: the time was up, and the rest has been failed."""
        ...

    def exit(self) -> None:
        """End the daemon as SIGTERM does: it drains, then exits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminState:
    """Parts of the daemon that its operator may look at and change."""

    swaps: ExpertSwaps
    reloader: SettingsReloader
    drainer: Drainer


ADMIN = web.AppKey("admin", AdminState)
