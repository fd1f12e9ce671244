"""A `colibrid serve` of its own for the scripts in this folder: started, looked at from outside, stopped.

    with Served(["--device", "cuda", "MODEL"]) as daemon:
        daemon.url, daemon.ready_ms, daemon.cpu_seconds(), daemon.resident_kib(), daemon.device_free()
    daemon.totals             what the engine counted, once the daemon has ended
    daemon.drained            what the daemon held then

It must end with exit code 0, and no log line may be above `warning`.
"""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from outside import log_events, private_kib

START_S = 300.0
STOP_S = 60.0


class ServedError(Exception):
    """The daemon did not start, did not end well, or logged an error."""


class Served:
    """Use as a context manager. What it prints is kept in a temporary folder until then."""

    def __init__(self, arguments: list[str], *, device: str = "cpu") -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._out = Path(self._folder.name) / "stdout"
        self._log = Path(self._folder.name) / "stderr"
        self._gpu = _Gpu() if device == "cuda" else None
        self.totals: dict[str, Any] = {}
        self.drained: dict[str, Any] = {}
        command = [sys.executable, "-m", "colibrid.cli", "serve", "--port", "0", "--device", device]
        began = time.perf_counter()
        with self._out.open("wb") as out, self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--set", "logging.format=json", *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=log
            )
        serving = self._wait("serving")
        self.ready_ms = (time.perf_counter() - began) * 1e3
        self.url = str(serving["url"])
        self._free_when_ready = self.device_free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._stop()
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
            self._folder.cleanup()

    @property
    def banner(self) -> str:
        """What it printed."""
        return self._out.read_text(encoding="utf-8")

    def events(self) -> list[dict[str, Any]]:
        """What it has logged."""
        return log_events(self._log)

    def device_free(self) -> int:
        """Free bytes of the GPU, whoever holds the others; 0 on the CPU."""
        return 0 if self._gpu is None else self._gpu.free()

    def device_used(self) -> int:
        """Bytes of the GPU that are not free; 0 on the CPU."""
        return 0 if self._gpu is None else self._gpu.total() - self._gpu.free()

    def device_drift(self) -> int:
        """Bytes of the GPU that are gone since the daemon was ready."""
        return self._free_when_ready - self.device_free()

    def cpu_seconds(self) -> float:
        """Processor time of the daemon without its engine: the event loop's, and its helpers'."""
        return cpu_seconds(self.process.pid)

    def private_kib(self) -> tuple[int, int]:
        """Memory that the daemon has written and shares with none, and its engine; clean pages of files are not counted."""
        (engine,) = (event["pid"] for event in self.events() if event["event"] == "engine_ready")
        return private_kib(self.process.pid), private_kib(engine)

    def descriptors(self) -> int:
        """That the daemon has open."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def resident_kib(self) -> int:
        """Memory of daemon and engine."""
        pids = [self.process.pid, *_children(self.process.pid)]
        return sum(_resident_kib(pid) for pid in pids)

    def _wait(self, name: str) -> dict[str, Any]:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            found = next((event for event in self.events() if event["event"] == name), None)
            if found is not None:
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.005)
        self.process.kill()
        self.process.wait()
        said = self._log.read_text()[-3000:]
        self._folder.cleanup()
        raise ServedError(f"the daemon did not start:\n{said}")

    def _stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_S)
        events = self.events()
        self.totals = next((event for event in events if event["event"] == "engine_totals"), {})
        self.drained = next((event for event in events if event["event"] == "drained"), {})
        loud = [event for event in events if event.get("level") in ("error", "critical")]
        if code != 0 or loud or not self.totals:
            raise ServedError(f"the daemon ended with {code}, errors: {loud[:3]}")


class _Gpu:
    """GPU 0 as this process sees it, with a context of its own."""

    def __init__(self) -> None:
        self._driver = importlib.import_module("cuda.bindings.driver")
        self._driver.cuInit(0)
        _, self._context = self._driver.cuDevicePrimaryCtxRetain(0)

    def free(self) -> int:
        self._driver.cuCtxSetCurrent(self._context)
        _, free, _ = self._driver.cuMemGetInfo()
        return int(free)

    def total(self) -> int:
        self._driver.cuCtxSetCurrent(self._context)
        _, _, total = self._driver.cuMemGetInfo()
        return int(total)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, by its own clock: nanoseconds, where /proc counts hundredths of a second."""
    return time.clock_gettime_ns(~pid << 3 | 2) / 1e9  # as clock_getcpuclockid(3) names it


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in status if line.startswith("VmRSS:")), 0)
