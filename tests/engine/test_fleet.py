"""All engines of a daemon as one: ready with the first, failed with the last. Real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import msgspec
import pytest

from colibrid.config.settings import BatchSettings, EngineSettings, Settings
from colibrid.engine.fleet import Fleet
from colibrid.engine.replicas import make_specs
from colibrid.engine.state import Readiness, overall
from colibrid.engine.supervisor import CRASH_LOOP_ENGINES, Supervisor
from colibrid.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from colibrid.engine.library import Library
    from colibrid.engine.spec import EngineSpec
    from colibrid.model.pack import Pack

DEADLINE_S = 60.0
Make = Callable[..., Fleet]


@pytest.fixture
async def make(library: Library, bundled_pack: Pack) -> AsyncIterator[Make]:
    made: list[Fleet] = []

    def build(change: Callable[[EngineSpec], EngineSpec] = lambda spec: spec) -> Fleet:
        settings = Settings(batch=BatchSettings(slots=2), engine=EngineSettings(device="cpu", replicas=2))
        specs = make_specs(settings, str(bundled_pack.path), bundled_pack.manifest)
        small = [change(msgspec.structs.replace(spec, max_seq_len=256)) for spec in specs]
        fleet = Fleet([Supervisor(library, spec, bundled_pack.manifest, settings.engine) for spec in small])
        made.append(fleet)
        fleet.start()
        return fleet

    yield build
    for fleet in made:
        await fleet.stop()


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def pid_of(supervisor: Supervisor) -> int:
    assert supervisor.engine_pid is not None
    return supervisor.engine_pid


async def test_ready_with_the_first_engine_and_each_on_its_cpus(make: Make) -> None:
    """Every engine is a process of its own with a bill of its own, on the CPUs that it was given."""
    fleet = make()
    await fleet.wait_ready()
    await until(lambda: len(fleet.memory) == 2)
    pids = [pid_of(one) for one in fleet.supervisors]
    assert len(set(pids)) == 2
    assert fleet.timings is not None
    given = [one.spec.cpu_set for one in fleet.supervisors]
    for pid, cpus in zip(pids, given, strict=True):
        assert os.sched_getaffinity(pid) == (set(cpus) or os.sched_getaffinity(0))
    fleet.check()
    await fleet.stop()
    assert fleet.readiness.phase == "stopped"
    assert await fleet.wait_ended() is None


async def test_the_death_of_one_engine_leaves_the_service_ready(make: Make) -> None:
    """While one restarts the other serves, and the restart is counted."""
    fleet = make()
    await fleet.wait_ready()
    await until(lambda: all(one.readiness.ready for one in fleet.supervisors))
    os.kill(pid_of(fleet.supervisors[0]), signal.SIGKILL)
    await until(lambda: fleet.readiness.restarts == 1)
    assert fleet.readiness.ready
    await until(lambda: all(one.readiness.ready for one in fleet.supervisors))


async def test_an_engine_given_up_is_a_failure_that_does_not_end_the_service(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fleet stays ready with the other one, and remembers why the first is gone."""
    monkeypatch.setattr("colibrid.engine.supervisor.CRASH_LOOP_SECONDS", 3600.0)  # however slow their starts
    fleet = make()
    first, second = fleet.supervisors
    await until(lambda: second.readiness.ready)
    for _ in range(CRASH_LOOP_ENGINES):
        await first.wait_ready()
        restarts = first.readiness.restarts
        os.kill(pid_of(first), signal.SIGKILL)
        await until(lambda before=restarts: first.readiness.restarts > before or first.failure is not None)
    assert fleet.readiness.ready
    assert isinstance(fleet.failure, EngineError)
    assert "keep dying" in str(fleet.readiness.reason)
    ended = asyncio.create_task(fleet.wait_ended())
    await asyncio.sleep(0.05)
    assert not ended.done()
    await fleet.stop()
    assert await ended is fleet.failure


async def test_settings_that_no_engine_accepts_are_told(make: Make) -> None:
    """When all give up, whoever waits gets the reason."""
    fleet = make(lambda spec: msgspec.structs.replace(spec, tier_kv=msgspec.structs.replace(spec.tier_kv, bytes=1)))
    with pytest.raises(ConfigError):
        await fleet.wait_ready()
    assert isinstance(await fleet.wait_ended(), ConfigError)


def test_what_several_engines_are_together() -> None:
    """As ready as the best, as old as the slowest that is; restarts add up, and a reason is not hidden."""
    ready = Readiness(phase="ready", last_step_age_s=0.5)
    slow = Readiness(phase="ready", last_step_age_s=4.0, restarts=2)
    lost = Readiness(phase="restarting", reason="killed", restarts=1)
    loading = Readiness(phase="loading", percent=40)
    failed = Readiness(phase="failed", reason="crashes")
    assert overall([ready]) == ready
    assert overall([lost, ready, slow]) == Readiness(phase="ready", reason="killed", last_step_age_s=4.0, restarts=3)
    assert overall([lost, loading]).percent == 40
    assert overall([failed, lost]).phase == "restarting"
    assert overall([failed, failed]) == failed
