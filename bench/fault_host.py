"""Rows of the faults table about the host: full disks, blocked pipes, few descriptors, a clock that jumps."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fault_kit import LONG, PATIENCE_S, FaultError, Figure, Victim, count, require, took, wait_for
from served import cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

DAY_S = 86400
SOURCE = Path(__file__).with_name("fault_clock.c")
REQUESTS = 20


def serves(daemon: Victim, requests: int = REQUESTS) -> None:
    """Answers stay the same, and a stream is whole."""
    expected = daemon.text()
    for _ in range(requests):
        require(daemon.text() == expected, "another answer than before")
    with daemon.open("POST", "/v1/completions", LONG | {"max_tokens": 50}) as stream:
        require(stream.read().rstrip().endswith(b"data: [DONE]"), "a stream was cut off")


def ends_well(daemon: Victim) -> None:
    daemon.signal(signal.SIGTERM)
    require(daemon.wait() == 0, f"exit code {daemon.wait()}")


def free_port() -> int:
    """A port for a daemon whose log cannot be read."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _blind(folder: Path, stdout: int, stderr: int, *arguments: str) -> Victim:
    """A daemon that says nothing to us."""
    port = free_port()
    daemon = Victim(folder, ["--port", str(port), *arguments], stdout=stdout, stderr=stderr)
    daemon.port = port

    def up() -> bool:
        try:
            return daemon.ready()
        except OSError:
            return False

    wait_for(up, "/readyz 200", daemon)
    return daemon


def disk_full(folder: Path, _size: int) -> Iterator[Figure]:
    """Stdout and stderr on a full disk; a cache folder that cannot take a conversion; a cache that is read-only."""
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with _blind(folder, full, full) as daemon:
            serves(daemon)
            ends_well(daemon)
    finally:
        os.close(full)
    yield count("requests served while every line of the log fails", REQUESTS + 1, None)
    small = 1 << 20  # bytes that any file may get

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, small))

    fresh = {"XDG_CACHE_HOME": str(folder / "fresh")}
    with Victim(folder, environment=fresh, prepare=limit) as daemon:
        code, said = daemon.wait(), daemon.stderr_path.read_text()
        require(code == 78, f"a conversion without room: exit code {code}: {said[-500:]}")
        require("model.cache_dir" in said and "Traceback" not in said, f"the error is {said[-500:]}")
    left = [path for path in (folder / "fresh").rglob("*") if path.is_file() and path.name == "colibri.json"]
    yield count("half packs left behind", len(left))


def read_only(folder: Path, _size: int) -> Iterator[Figure]:
    """Nothing can be written anywhere: a converted model is served from the cache all the same."""
    with Victim(folder) as daemon:  # converts
        daemon.wait_ready()
        ends_well(daemon)
    pack = next((folder / "cache").rglob("colibri.json")).parent
    nowhere = {"XDG_CACHE_HOME": "/proc/sys", "TMPDIR": "/proc/sys", "HOME": "/proc/sys"}
    with Victim(folder, [str(pack)], environment=nowhere) as daemon:
        daemon.wait_ready()
        serves(daemon)
        ends_well(daemon)
    yield count("requests served without a place to write to", REQUESTS + 1, None)
    with Victim(folder, environment=nowhere) as daemon:
        code, said = daemon.wait(), daemon.stderr_path.read_text()
        require(code == 78 and "model.cache_dir" in said, f"exit code {code}: {said[-500:]}")


def blocked_stdout(folder: Path, _size: int) -> Iterator[Figure]:
    """Stdout and stderr are pipes that are full and that nobody reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    try:
        with _blind(folder, writing, writing) as daemon:
            serves(daemon)
            ends_well(daemon)
    finally:
        os.close(reading)
        os.close(writing)
    yield count("requests served while nobody reads", REQUESTS + 1, None)


def few_descriptors(folder: Path, _size: int) -> Iterator[Figure]:
    """256 descriptors and 400 connections: those that are served go on; others are taken as soon as there is room."""
    most = 256

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    with Victim(folder, prepare=limit) as daemon:
        daemon.wait_ready()
        expected = daemon.text()
        with daemon.open("POST", "/v1/completions", LONG | {"max_tokens": 400}) as stream:
            stream.readline()
            crowd = [socket.create_connection(("127.0.0.1", daemon.port), PATIENCE_S) for _ in range(400)]
            time.sleep(0.5)
            held = daemon.descriptors()
            require(stream.read().rstrip().endswith(b"data: [DONE]"), "the stream of before was cut off")
        busy = min(_busy(daemon) for _ in range(3))  # the first may see the end of what was before
        for connection in crowd:
            connection.close()
        began = time.perf_counter()
        require(daemon.text() == expected, "another answer than before")
        yield took("served again after the crowd left", [time.perf_counter() - began], 2.0)
        yield count("descriptors", held, most)
        yield count("processor time while no connection can be taken", round(busy, 2), 0.8, "s a second")
        (pid,) = daemon.engine_pids()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: daemon.logged("engine_died") and daemon.ready(), "a new engine", daemon)
        require(daemon.text() == expected, "another answer than before")
        ends_well(daemon)


def _busy(daemon: Victim) -> float:
    """Processor time of a second."""
    before = cpu_seconds(daemon.process.pid)
    time.sleep(1.0)
    return cpu_seconds(daemon.process.pid) - before


def clock_jumps(folder: Path, jumps: int) -> Iterator[Figure]:
    """The wall clock goes a day forwards and back, in streams and in between: nothing that counts time follows it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise FaultError("no C compiler for bench/fault_clock.c")
    library, shift = folder / "fault_clock.so", folder / "shift"
    subprocess.run([compiler, "-O1", "-fPIC", "-shared", "-o", str(library), str(SOURCE)], check=True)
    shift.write_text("0")
    environment = {"LD_PRELOAD": str(library), "FAULT_CLOCK": str(shift)}
    settings = ["--set", "engine.stall_timeout_s=4", "--set", "server.sse_ping_s=60"]
    with Victim(folder, settings, environment=environment) as daemon:
        expected = daemon.wait_ready().text()
        first = daemon.logged("serving")[0]["time"]
        for number in range(jumps):
            with daemon.open("POST", "/v1/completions", LONG | {"max_tokens": 120, "timeout_s": 30}) as stream:
                stream.readline()
                shift.write_text(str((DAY_S, -DAY_S)[number % 2]))
                require(stream.read().rstrip().endswith(b"data: [DONE]"), "a stream did not survive the jump")
            require(daemon.text() == expected, "another answer than before")
            require(daemon.ready(), "/readyz is not 200 after a jump")
        time.sleep(5.0)  # more than the stall timeout
        require(daemon.ready() and not daemon.logged("engine_died"), "an engine was blamed for the clock")
        days = {event["time"][:10] for event in daemon.logged("request")}
        require(len(days) > 1 and first[:10] not in days - {first[:10]}, f"the clock did not jump: {days}")
        yield count("jumps of a day", jumps, None)
        ends_well(daemon)
