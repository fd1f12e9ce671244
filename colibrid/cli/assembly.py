"""Puts the parts of a service together: pack, engines, schedulers. Used by serve and complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibrid.batch.reports import Traffic
from colibrid.batch.service import make_service
from colibrid.model.footprint import footprint
from colibrid.model.pack import Pack, open_pack

if TYPE_CHECKING:
    from colibrid.batch.pool import EnginePool
    from colibrid.config.settings import Settings
    from colibrid.engine.fleet import Fleet
    from colibrid.engine.library import Library
    from colibrid.model.cache import Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """One model's parts, not started yet. Made on the event loop that they will live on."""

    pack: Pack
    fleet: Fleet
    pool: EnginePool


def assemble(settings: Settings, resolved: Resolved, library: Library) -> Assembly:
    """Reads the pack's description and makes the parts. ModelError or ConfigError says what does not fit."""
    pack = open_pack(resolved.path, check_files=settings.model.weights == "files")
    fleet, pool = make_service(library, settings, str(resolved.path), pack.manifest)
    figures = footprint(pack.manifest)
    pool.traffic = Traffic(step=figures.dense_read, expert=figures.mean_expert)
    return Assembly(pack=pack, fleet=fleet, pool=pool)
