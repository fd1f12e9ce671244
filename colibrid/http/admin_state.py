"""What the admin routes share beyond the public ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from colibrid.engine.swaps import ExpertSwaps
    from colibrid.ops.reload import SettingsReloader


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminState:
    """Parts of the daemon that its operator may look at and change."""

    swaps: ExpertSwaps
    reloader: SettingsReloader


ADMIN = web.AppKey("admin", AdminState)
