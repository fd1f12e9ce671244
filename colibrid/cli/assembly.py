"""Puts the parts of an engine together: pack, supervisor, scheduler. Used by serve and complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibrid.batch.service import make_service
from colibrid.model.pack import Pack, open_pack

if TYPE_CHECKING:
    from colibrid.batch.scheduler import Scheduler
    from colibrid.config.settings import Settings
    from colibrid.engine.library import Library
    from colibrid.engine.supervisor import Supervisor
    from colibrid.model.cache import Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """One engine's parts, not started yet. Made on the event loop that they will live on."""

    pack: Pack
    supervisor: Supervisor
    scheduler: Scheduler


def assemble(settings: Settings, resolved: Resolved, library: Library) -> Assembly:
    """Reads the pack's description and makes the parts. ModelError or ConfigError says what does not fit."""
    pack = open_pack(resolved.path, check_files=settings.model.weights == "files")
    supervisor, scheduler = make_service(library, settings, str(resolved.path), pack.manifest)
    return Assembly(pack=pack, supervisor=supervisor, scheduler=scheduler)
