"""The engine process, spoken to over its control socket."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from descriptors import open_descriptors

from colibrid.config.settings import BatchSettings, Settings
from colibrid.engine import control
from colibrid.engine.process import PACKAGE_ROOT, EngineProcess
from colibrid.engine.spec import EngineSpec, channel_shape, device_name, make_spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack

DEADLINE_S = 60.0


@pytest.fixture
def spec(bundled_pack: Pack) -> EngineSpec:
    return make_spec(Settings(batch=BatchSettings(slots=2)), str(bundled_pack.path), bundled_pack.manifest)


@pytest.fixture
def process(library: Library, spec: EngineSpec, bundled_pack: Pack) -> Iterator[EngineProcess]:
    process = EngineProcess(library, spec, channel_shape(spec, bundled_pack.manifest))
    process.sock.setblocking(True)
    process.sock.settimeout(DEADLINE_S)
    yield process
    process.release()


def next_message(process: EngineProcess) -> control.Message | None:
    received = control.receive(process.sock)
    return None if received is None else received[0]


def wait_planned(process: EngineProcess) -> control.Log:
    """The bill, which comes before anything is loaded."""
    assert next_message(process) == control.Opening()
    message = next_message(process)
    assert isinstance(message, control.Log)
    assert message.event == "memory_plan"
    return message


def wait_ready(process: EngineProcess) -> control.Ready:
    wait_planned(process)
    message = next_message(process)
    assert isinstance(message, control.Ready), message
    return message


def wait_exit(process: EngineProcess) -> int:
    end = time.monotonic() + DEADLINE_S
    while (code := process.poll()) is None:
        assert time.monotonic() < end, "the worker does not end"
        time.sleep(0.01)
    return code


def test_ready_brings_the_memory_bill(process: EngineProcess, spec: EngineSpec) -> None:
    """A worker says what it will take, takes that, and says so; Stop ends it with 0."""
    planned = wait_planned(process).fields
    ready = next_message(process)
    assert isinstance(ready, control.Ready), ready
    parts = ready.memory.parts()
    assert planned == {name.replace(" ", "_"): size for name, size in parts} | {"total": ready.memory.total}
    assert ready.memory.kv_tokens >= spec.max_seq_len
    assert ready.device == device_name(spec)
    control.send(process.sock, control.Stop())
    assert wait_exit(process) == 0


def test_check_is_answered_by_going_on(process: EngineProcess) -> None:
    """A healthy engine verifies its invariants and keeps running."""
    wait_ready(process)
    control.send(process.sock, control.Check())
    time.sleep(0.1)
    assert process.poll() is None


def test_a_reduced_kv_tier_is_logged(library: Library, spec: EngineSpec, bundled_pack: Pack) -> None:
    """When KV memory does not hold all slots at full length, the daemon's log says how much it holds."""
    small = msgspec.structs.replace(spec, tier_kv=msgspec.structs.replace(spec.tier_kv, bytes=1 << 20))
    process = EngineProcess(library, small, channel_shape(spec, bundled_pack.manifest))
    process.sock.setblocking(True)
    try:
        wait_planned(process)
        message = next_message(process)
        assert isinstance(message, control.Log)
        assert message.event == "kv_memory_limited"
        assert 0 < int(message.fields["kv_tokens"]) < spec.slots * spec.max_seq_len
        assert isinstance(next_message(process), control.Ready)
    finally:
        process.release()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_for_the_daemon_do_not_end_the_engine(number: signal.Signals, process: EngineProcess) -> None:
    """Ctrl-C, SIGTERM and the terminal's end reach the whole group, but only the daemon acts on them, from the start."""
    os.kill(process.pid, number)
    wait_ready(process)
    os.kill(process.pid, number)
    time.sleep(0.1)
    assert process.poll() is None


def test_the_worker_ends_with_its_socket(process: EngineProcess) -> None:
    """When the daemon's end of the socket is gone, the worker does not stay behind."""
    wait_ready(process)
    process.sock.close()
    assert wait_exit(process) == 70


def test_a_garbled_frame_ends_the_worker(process: EngineProcess) -> None:
    """A worker that does not understand its daemon exits instead of guessing."""
    wait_ready(process)
    process.sock.send(b"garbage")
    assert wait_exit(process) == 70


def test_the_worker_dies_with_a_killed_daemon(bundled_pack: Pack) -> None:
    """A daemon that is killed leaves no engine behind."""
    script = (
        "import sys, time\n"
        "from colibrid.config.settings import Settings, BatchSettings\n"
        "from colibrid.engine.library import Library\n"
        "from colibrid.engine.process import EngineProcess\n"
        "from colibrid.engine.spec import channel_shape, make_spec\n"
        "from colibrid.model.pack import open_pack\n"
        "from pathlib import Path\n"
        "pack = open_pack(Path(sys.argv[1]))\n"
        "spec = make_spec(Settings(batch=BatchSettings(slots=2)), sys.argv[1], pack.manifest)\n"
        "process = EngineProcess(Library(), spec, channel_shape(spec, pack.manifest))\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    arguments = [sys.executable, "-c", script, str(bundled_pack.path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=PACKAGE_ROOT) as daemon:
        assert daemon.stdout is not None
        engine = os.pidfd_open(int(daemon.stdout.readline()))
        time.sleep(0.5)  # both before and after the worker asked for its death signal are fine
        daemon.kill()
    end = time.monotonic() + DEADLINE_S
    while not _has_ended(engine):
        assert time.monotonic() < end, "the engine outlives its daemon"
        time.sleep(0.01)
    os.close(engine)


def _has_ended(pidfd: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    return "State:\tZ" in _status_of(pidfd)


def _status_of(pidfd: int) -> str:
    text = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    pid = next(line.split()[1] for line in text.splitlines() if line.startswith("Pid:"))
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return "State:\tZ"


def damage(pack: Path) -> None:
    path = pack / "expert_0_0.bin"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (damage, "expert_0_0.bin"),
        (lambda pack: os.truncate(pack / "dense.bin", 4096), "dense.bin"),
        (lambda pack: (pack / "dense.bin").unlink(), "dense.bin"),
        (lambda pack: (pack / "colibri.json").write_text("{"), "JSON"),
    ],
)
def test_a_broken_pack_exits_with_78(
    change: object, pattern: str, library: Library, spec: EngineSpec, bundled_pack: Pack, tmp_path: Path
) -> None:
    """A damaged, short or missing file is named in the last frame, and the exit code says that a restart is useless."""
    broken = shutil.copytree(bundled_pack.path, tmp_path / "broken.colibri")
    assert callable(change)
    change(broken)
    process = EngineProcess(
        library,
        msgspec.structs.replace(spec, pack_dir=str(broken)),
        channel_shape(spec, bundled_pack.manifest),
    )
    process.sock.setblocking(True)
    try:
        assert next_message(process) == control.Opening()
        failed = next_message(process)
        if isinstance(failed, control.Log):  # colibri.json was in order, so there was a bill
            failed = next_message(process)
        assert isinstance(failed, control.Failed)
        assert failed.kind == "model"
        assert pattern in failed.message
        assert wait_exit(process) == 78
    finally:
        process.release()


def test_wrong_arguments_are_refused() -> None:
    """The worker is not for people: without a control descriptor it says so and exits with 78."""
    done = subprocess.run(
        [sys.executable, "-m", "colibrid.engine.worker"], capture_output=True, text=True, cwd=PACKAGE_ROOT, check=False
    )
    assert done.returncode == 78
    assert "started by colibrid" in done.stderr


def test_imports_stay_light() -> None:
    """Nothing slow is imported on the way to the first token."""
    script = "import colibrid.engine.worker, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE_ROOT, check=True)
    heavy = {"numpy", "aiohttp", "asyncio", "structlog", "safetensors", "tokenizers", "click", "yaml", "cuda", "uvloop"}
    assert heavy.isdisjoint(done.stdout.split())


def test_release_leaves_nothing(library: Library, spec: EngineSpec, bundled_pack: Pack) -> None:
    """Spawning and releasing leaves no descriptor and no process, even in mid-load."""
    before = open_descriptors()
    for _ in range(3):
        process = EngineProcess(library, spec, channel_shape(spec, bundled_pack.manifest))
        process.release()
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
    assert open_descriptors() == before
