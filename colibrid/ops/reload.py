"""Changed settings while serving: read, checked by all who use them, then taken over by all in one turn of the loop.

    reload() ─▶ load (thread) ─▶ every subscriber prepares (thread) ─▶ every commit (event loop)
                   │ bad file          │ bad key file …
                   ▼                   ▼
              ConfigError: nothing has changed

A subscriber is a function that gets the settings to be served with, checks what only it can check and makes what takes
time, and returns what puts it in place; ConfigError refuses the whole. It runs in a thread, so it changes nothing by
itself; what it returns runs on the event loop and cannot fail.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import structlog

from colibrid.config.live import Change, compare, with_live
from colibrid.errors import ColibridError

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.config.settings import Settings

    Commit = Callable[[], None]
    Prepare = Callable[[Settings], Commit]


_LOGGED_ERRORS = 8  # a log line has room for so many of so many characters
_ERROR_CHARACTERS = 400


class SettingsReloader:
    """Owner of the settings in force. Lives on one event loop."""

    def __init__(self, loaded: Settings, load: Callable[[], Settings], *, serving: Settings | None = None) -> None:
        """`load` reads and checks the same sources anew, in a thread; `loaded` is what it gave at the start, `serving`
        the same with what has been found out since (engine.device).
        """
        self._loaded = loaded
        self._settings = serving if serving is not None else loaded
        self._load = load
        self._prepares: list[Prepare] = []
        self._turn = asyncio.Lock()
        self._wanted = asyncio.Event()
        self._log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

    @property
    def settings(self) -> Settings:
        """In force now."""
        return self._settings

    def subscribe(self, prepare: Prepare) -> None:
        """From the next reload on `prepare` takes part, after those that came before it."""
        self._prepares.append(prepare)

    async def reload(self) -> Change:
        """Take over the live keys, and log it; the result names what changed, and what waits for a restart.

        ColibridError says what is wrong, and nothing has changed.
        """
        async with self._turn:
            try:
                settings, change, commits = await asyncio.to_thread(self._prepared)
            except ColibridError as error:
                lines = [line[:_ERROR_CHARACTERS] for line in str(error).splitlines()]
                hint = "the old settings stay in force; `colibrid config check` tells all mistakes"
                self._log.error("reload_refused", errors=lines[:_LOGGED_ERRORS], count=len(lines), hint=hint)
                raise
            for commit in commits:
                commit()
            self._settings = settings
        if change.restart:
            self._log.warning("reload_needs_restart", keys=change.restart)
        self._log.info("reloaded", changed=change.live)
        return change

    def request(self) -> None:
        """SIGHUP: `run` will reload. Signals that come while it does so make it reload once more."""
        self._wanted.set()

    async def run(self) -> None:
        """Reloads when asked to, until cancelled; what is refused has been logged."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            with contextlib.suppress(ColibridError):
                await self.reload()

    def _prepared(self) -> tuple[Settings, Change, list[Commit]]:
        wanted = self._load()
        settings = with_live(self._settings, wanted)
        change = Change(live=compare(self._settings, settings).live, restart=compare(self._loaded, wanted).restart)
        return settings, change, [prepare(settings) for prepare in self._prepares]
