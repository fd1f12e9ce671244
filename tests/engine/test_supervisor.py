"""The supervisor keeps one engine running, and gives up when that is pointless. Real processes, real signals."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from descriptors import open_descriptors

from colibrid.config.settings import BatchSettings, EngineSettings, Settings
from colibrid.engine import abi, control
from colibrid.engine.channel import Command, SlotRequest
from colibrid.engine.spec import EngineSpec, make_spec
from colibrid.engine.supervisor import CRASH_LOOP_ENGINES, EngineSession, Supervisor
from colibrid.errors import ConfigError, EngineError, ModelError

if TYPE_CHECKING:
    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack

DEADLINE_S = 60.0


class Listener:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.session: EngineSession | None = None
        self.told: list[str] = []
        self.changed = asyncio.Event()

    def engine_ready(self, session: EngineSession) -> None:
        self.session = session
        self._note("ready")

    def engine_lost(self, reason: str) -> None:
        self.session = None
        self._note(f"lost: {reason}")

    def engine_gave_up(self, reason: str) -> None:
        self._note(f"gave up: {reason}")

    def _note(self, text: str) -> None:
        self.told.append(text)
        self.changed.set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.told) < count:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
def spec(bundled_pack: Pack) -> EngineSpec:
    settings = Settings(batch=BatchSettings(slots=2, prefill_tokens=64))
    spec = make_spec(settings, str(bundled_pack.path), bundled_pack.manifest)
    return msgspec.structs.replace(spec, max_seq_len=256)


Make = Callable[..., tuple[Supervisor, Listener]]


@pytest.fixture
async def make(library: Library, spec: EngineSpec, bundled_pack: Pack) -> AsyncIterator[Make]:
    made: list[Supervisor] = []

    def build(spec: EngineSpec = spec, **settings: float) -> tuple[Supervisor, Listener]:
        supervisor, listener = Supervisor(library, spec, bundled_pack.manifest, EngineSettings(**settings)), Listener()
        supervisor.attach(listener)
        made.append(supervisor)
        supervisor.start()
        return supervisor, listener

    yield build
    for supervisor in made:
        await supervisor.stop()


def pid_of(supervisor: Supervisor) -> int:
    pid = supervisor.engine_pid
    assert pid is not None
    return pid


async def complete_one_request(session: EngineSession, generation: int = 1) -> None:
    session.channel.write_request(0, SlotRequest(generation=generation, seed=0, prompt_ids=[5, 6], max_tokens=1))
    assert session.channel.push(
        [
            Command(abi.CommandKind.OPEN, 0, generation),
            Command(abi.CommandKind.PREFILL, 0, generation, 0, 2),
        ]
    )
    session.wake()
    end = time.monotonic() + DEADLINE_S
    while session.channel.stats()[1].requests_done == 0:
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


async def test_phases_from_start_to_stop(make: Make) -> None:
    """Starting, then ready with a memory bill and timings, then stopped; each told once."""
    supervisor, listener = make()
    assert supervisor.readiness.phase == "starting"
    assert not supervisor.readiness.ready
    await supervisor.wait_ready()
    assert supervisor.readiness.phase == "ready"
    assert supervisor.readiness.last_step_age_s is not None
    assert supervisor.memory is not None
    assert supervisor.timings is not None
    assert supervisor.timings.total_ms >= supervisor.timings.open_ms > 0
    await supervisor.stop()
    assert supervisor.readiness.phase == "stopped"
    assert supervisor.engine_pid is None
    assert await supervisor.wait_ended() is None
    assert listener.told == ["ready", "lost: the engine exited with 0"]


async def test_a_killed_engine_is_replaced(make: Make) -> None:
    """Death is noticed at once, named, and a new engine with a fresh channel takes over."""
    supervisor, listener = make()
    await supervisor.wait_ready()
    first = pid_of(supervisor)
    os.kill(first, signal.SIGKILL)
    await listener.wait_for(2)
    assert listener.told[1] == "lost: the engine was ended by SIGKILL"
    assert supervisor.readiness.phase == "restarting"
    assert supervisor.readiness.reason == "the engine was ended by SIGKILL"
    await supervisor.wait_ready()
    assert pid_of(supervisor) != first
    assert supervisor.readiness.restarts == 1
    assert listener.session is not None
    await complete_one_request(listener.session)


def workers_of(pid: int) -> list[int]:
    """The threads of an engine that compute beside its main one."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(thread.name) for thread in threads if (thread / "comm").read_text() == "clb-worker\n"]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time


async def test_a_fault_in_a_worker_thread_is_one_of_the_engine(make: Make, spec: EngineSpec) -> None:
    """Whichever thread faults, the whole engine dies of it, and a new one takes over."""
    supervisor, listener = make(msgspec.structs.replace(spec, threads=3, cpus=()))
    await supervisor.wait_ready()
    assert supervisor.readiness.restarts == 0
    end = time.monotonic() + DEADLINE_S
    while len(workers := workers_of(pid_of(supervisor))) < 2:  # threads name themselves when they first run
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    ctypes.CDLL(None).tgkill(pid_of(supervisor), workers[-1], signal.SIGSEGV)
    await listener.wait_for(2)
    assert listener.told[1] == "lost: the engine was ended by SIGSEGV"
    await supervisor.wait_ready()
    assert listener.session is not None
    await complete_one_request(listener.session)
    await supervisor.stop()
    assert listener.told[-1] == "lost: the engine exited with 0"


async def test_an_idle_engine_sleeps(make: Make, spec: EngineSpec) -> None:
    """After a request all threads of the engine sleep: it takes next to no CPU time."""
    supervisor, listener = make(msgspec.structs.replace(spec, threads=3, cpus=()))
    await supervisor.wait_ready()
    assert listener.session is not None
    await complete_one_request(listener.session)
    spent = []  # the least counts: what the request has left to be done is no idling
    for _ in range(4):
        before = cpu_seconds(pid_of(supervisor))
        await asyncio.sleep(1.0)
        spent.append(cpu_seconds(pid_of(supervisor)) - before)
    assert min(spent) < 0.05


async def test_a_stopped_engine_is_killed_and_replaced(make: Make) -> None:
    """An engine whose progress counter stands still for the timeout is a dead one."""
    supervisor, listener = make(stall_timeout_s=2.0)
    await supervisor.wait_ready()
    os.kill(pid_of(supervisor), signal.SIGSTOP)
    await listener.wait_for(2)
    assert "no progress for engine.stall_timeout_s 2.0" in listener.told[1]
    await supervisor.wait_ready()
    assert supervisor.readiness.restarts == 1


async def test_changed_bounds_count_at_once(make: Make) -> None:
    """A shorter timeout that a reload brings ends an engine that the one before would have left alone."""
    supervisor, listener = make(stall_timeout_s=3600.0)
    await supervisor.wait_ready()
    supervisor.follow(EngineSettings(stall_timeout_s=2.0))
    os.kill(pid_of(supervisor), signal.SIGSTOP)
    await listener.wait_for(2)
    assert "no progress for engine.stall_timeout_s 2.0" in listener.told[1]


async def test_an_idle_engine_is_left_alone(make: Make) -> None:
    """An idle engine moves its counter once a second, so a timeout of some seconds does not end it."""
    supervisor, _ = make(stall_timeout_s=4.0)
    await supervisor.wait_ready()
    first = supervisor.engine_pid
    await asyncio.sleep(6.0)
    assert supervisor.engine_pid == first
    assert supervisor.readiness.phase == "ready"


async def test_a_daemon_that_was_stopped_does_not_blame_its_engine(make: Make) -> None:
    """Time in which this process did not run is not held against an engine, not even one that stands still."""
    supervisor, listener = make(stall_timeout_s=60.0)
    await supervisor.wait_ready()
    first = pid_of(supervisor)
    os.kill(first, signal.SIGSTOP)
    last = supervisor._last_tick = supervisor._last_tick - 100.0
    async with asyncio.timeout(DEADLINE_S):
        while supervisor._last_tick == last:  # noqa: ASYNC110 - a timer sets it
            await asyncio.sleep(0.05)
    assert supervisor._progress_age < 2.0
    assert listener.told == ["ready"]
    os.kill(first, signal.SIGCONT)


async def test_loading_has_a_bound_of_its_own(make: Make) -> None:
    """An engine that does not become ready in time is killed, and the reason names the setting."""
    supervisor, _ = make(load_timeout_s=1.0)
    os.kill(pid_of(supervisor), signal.SIGSTOP)
    end = time.monotonic() + DEADLINE_S
    while supervisor.readiness.restarts == 0:
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
    assert "engine.load_timeout_s 1.0" in str(supervisor.readiness.reason)


async def test_a_crash_loop_ends(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that keep dying before they complete a request are given up, with a reason."""
    monkeypatch.setattr("colibrid.engine.supervisor.CRASH_LOOP_SECONDS", 3600.0)  # however slow their starts
    supervisor, listener = make()
    for _ in range(CRASH_LOOP_ENGINES):
        await supervisor.wait_ready()
        os.kill(pid_of(supervisor), signal.SIGKILL)
        await listener.wait_for(len(listener.told) + 1)
        await asyncio.sleep(0)
    error = await asyncio.wait_for(supervisor.wait_ended(), DEADLINE_S)
    assert isinstance(error, EngineError)
    assert "5 engines died" in str(error)
    assert supervisor.readiness.phase == "failed"
    assert listener.told[-1] == "gave up: engines keep dying before they complete a request"
    with pytest.raises(EngineError):
        await supervisor.wait_ready()


async def test_kills_after_completed_requests_leak_nothing(make: Make) -> None:
    """Many deaths of useful engines neither end the service nor leave a descriptor or a child."""
    supervisor, listener = make()
    before = 0
    for cycle in range(CRASH_LOOP_ENGINES + 2):
        await supervisor.wait_ready()
        if cycle == 1:
            before = open_descriptors()
        assert listener.session is not None
        await complete_one_request(listener.session)
        told = len(listener.told)
        os.kill(pid_of(supervisor), signal.SIGKILL)
        await listener.wait_for(told + 1)
    await supervisor.wait_ready()
    assert open_descriptors() == before
    assert supervisor.readiness.restarts == CRASH_LOOP_ENGINES + 2


async def test_a_broken_model_is_final(make: Make, spec: EngineSpec, bundled_pack: Pack, tmp_path: Path) -> None:
    """A damaged pack is not tried again; the operator's error names the file, the client's does not."""
    broken = shutil.copytree(bundled_pack.path, tmp_path / "broken.colibri")
    (broken / "dense.bin").unlink()
    supervisor, listener = make(msgspec.structs.replace(spec, pack_dir=str(broken)))
    with pytest.raises(ModelError, match=r"dense\.bin"):
        await supervisor.wait_ready()
    assert supervisor.readiness.phase == "failed"
    assert supervisor.readiness.restarts == 0
    assert "dense.bin" not in str(supervisor.readiness.reason)
    assert listener.told == ["gave up: the engine refuses its settings or its model"]


async def test_settings_that_c_refuses_are_final(make: Make, spec: EngineSpec) -> None:
    """A KV tier without room for one page is a configuration error, not a crash."""
    tier = msgspec.structs.replace(spec.tier_kv, bytes=1)
    supervisor, _ = make(msgspec.structs.replace(spec, tier_kv=tier))
    with pytest.raises(ConfigError):
        await supervisor.wait_ready()


async def test_a_pack_for_another_device_is_final(make: Make, spec: EngineSpec) -> None:
    """The worker does not read a CPU's pack for a GPU; starting again would not help."""
    supervisor, _ = make(msgspec.structs.replace(spec, device="cuda"))
    with pytest.raises(ModelError, match="for the cpu backend, not for cuda"):
        await supervisor.wait_ready()


async def test_a_process_that_cannot_be_spawned_counts_as_a_crash(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """When no process can be started at all, the supervisor gives up instead of trying for ever."""
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    before = open_descriptors()
    supervisor, _ = make()
    with pytest.raises(EngineError, match="cannot be started"):
        await asyncio.wait_for(supervisor.wait_ready(), DEADLINE_S)
    assert open_descriptors() == before
    assert "nonexistent" not in str(supervisor.readiness.reason)


async def test_stop_while_loading(make: Make) -> None:
    """Stop works before the engine is ready, and whoever waits for it is told."""
    supervisor, listener = make()
    waiting = asyncio.create_task(supervisor.wait_ready())
    await asyncio.sleep(0)
    await supervisor.stop()
    with pytest.raises(EngineError, match="stopped before it was ready"):
        await waiting
    assert listener.told == []


async def test_stop_kills_an_engine_that_does_not_listen(make: Make) -> None:
    """After the grace the engine is killed, so that stop always ends."""
    supervisor, _ = make()
    await supervisor.wait_ready()
    os.kill(pid_of(supervisor), signal.SIGSTOP)
    await asyncio.wait_for(supervisor.stop(grace_s=0.2), DEADLINE_S)
    assert supervisor.readiness.phase == "stopped"


async def test_questions_end_with_the_engine(make: Make) -> None:
    """A question that a dead or stopped engine has not answered is an error, and none is kept."""
    supervisor, _ = make()
    await supervisor.wait_ready()
    answer = await supervisor.ask(control.Cancel(id=7))
    assert answer == control.Staged(id=7)
    os.kill(pid_of(supervisor), signal.SIGSTOP)
    asking = asyncio.create_task(supervisor.ask(control.Cancel(id=8)))
    await asyncio.sleep(0)
    os.kill(pid_of(supervisor), signal.SIGKILL)
    with pytest.raises(EngineError, match="SIGKILL"):
        async with asyncio.timeout(DEADLINE_S):
            await asking
    await supervisor.stop()
    with pytest.raises(EngineError, match="no engine"):
        await supervisor.ask(control.Cancel(id=9))
    assert supervisor._questions == {}


async def test_a_new_engine_is_prepared_before_anybody_hears_of_it(make: Make) -> None:
    """Its users see it when the preparation is over; one that cannot be prepared is replaced."""
    supervisor, listener = make()
    seen: list[str] = []

    async def prepare(engine: Supervisor) -> None:
        seen.append(engine.readiness.phase)
        assert listener.told == []
        if len(seen) == 1:
            raise EngineError("it lacks an expert")

    supervisor.prepare_with(prepare)
    await supervisor.wait_ready()
    assert listener.told == ["ready"]
    assert len(seen) == 2
    assert "ready" not in seen
    assert supervisor.readiness.restarts == 1
