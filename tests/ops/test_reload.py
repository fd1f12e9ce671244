"""colibrid.ops.reload."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
import structlog

from colibrid.config.settings import Settings
from colibrid.errors import ConfigError
from colibrid.ops.reload import SettingsReloader

if TYPE_CHECKING:
    from collections.abc import Callable


def _settings(**sections: object) -> Settings:
    return msgspec.convert(sections, Settings)


FIRST = _settings(limits={"queue": 1}, engine={"device": "cpu"})


async def test_live_keys_are_taken_over_by_all() -> None:
    """Subscribers prepare off the loop in their order, commits follow on the loop, other keys are named and wait."""
    wanted = _settings(limits={"queue": 2}, batch={"slots": 5}, engine={"device": "cpu"})
    reloader = SettingsReloader(FIRST, lambda: wanted)
    seen: list[tuple[str, bool, int]] = []

    def subscriber(name: str) -> Callable[[Settings], Callable[[], None]]:
        def prepare(settings: Settings) -> Callable[[], None]:
            assert settings.batch.slots == FIRST.batch.slots
            seen.append((f"prepare {name}", on_loop(), settings.limits.queue))
            return lambda: seen.append((f"commit {name}", on_loop(), settings.limits.queue))

        return prepare

    def on_loop() -> bool:
        return threading.current_thread() is threading.main_thread()

    reloader.subscribe(subscriber("a"))
    reloader.subscribe(subscriber("b"))
    change = await reloader.reload()
    assert seen == [("prepare a", False, 2), ("prepare b", False, 2), ("commit a", True, 2), ("commit b", True, 2)]
    assert (change.live, change.restart) == (("limits.queue",), ("batch.slots",))
    assert (reloader.settings.limits.queue, reloader.settings.batch.slots) == (2, FIRST.batch.slots)
    change = await reloader.reload()
    assert (change.live, change.restart) == ((), ("batch.slots",))


async def test_one_refusal_changes_nothing() -> None:
    """When the last subscriber refuses, none commits and the old settings stay."""
    reloader = SettingsReloader(FIRST, lambda: _settings(limits={"queue": 2}))
    committed: list[bool] = []

    def refuse(_settings: Settings) -> Callable[[], None]:
        raise ConfigError("keys: no such file")

    reloader.subscribe(lambda _: lambda: committed.append(True))
    reloader.subscribe(refuse)
    with pytest.raises(ConfigError, match="no such file"):
        await reloader.reload()
    assert committed == []
    assert reloader.settings is FIRST


async def test_what_was_found_out_is_kept() -> None:
    """A value settled at the start (engine.device) is no change, though the sources say auto."""
    loaded = _settings()
    serving = _settings(engine={"device": "cpu"})
    reloader = SettingsReloader(loaded, lambda: _settings(limits={"queue": 9}), serving=serving)
    change = await reloader.reload()
    assert change.restart == ()
    assert (reloader.settings.engine.device, reloader.settings.limits.queue) == ("cpu", 9)


async def test_signals_during_a_reload_make_one_more() -> None:
    """Many requests while one reload is under way lead to exactly one more; errors are logged and do not end it."""
    loads: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def load() -> Settings:
        loads.append(len(loads))
        begun.set()
        assert go_on.wait(60)
        if len(loads) == 1:
            raise ConfigError("one\ntwo")
        return FIRST

    reloader = SettingsReloader(FIRST, load)
    with structlog.testing.capture_logs() as logs:
        task = asyncio.create_task(reloader.run())
        reloader.request()
        await asyncio.to_thread(begun.wait, 60)
        for _ in range(50):
            reloader.request()
        go_on.set()
        while len(logs) < 2:  # noqa: ASYNC110 - logs have no event
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert [entry["event"] for entry in logs] == ["reload_refused", "reloaded"]
    assert (logs[0]["errors"], logs[0]["count"]) == (["one", "two"], 2)
    assert len(loads) == 2
