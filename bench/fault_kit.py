"""What the rows of bench/faults.py are made of: a daemon to hurt, and figures with their limits.

with Victim(folder, ["--max-batch-size", "4"]) as daemon:
daemon.wait_ready()
os.kill(daemon.engine_pids()[0], signal.SIGKILL)
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
from outside import log_events

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator, Mapping, Sequence

PATIENCE_S = 60.0
LONG = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 0}
SHORT = {"prompt": "The capital of Norway", "max_tokens": 8, "temperature": 0}


class FaultError(Exception):
    """A row does not hold: something that must be true is not."""


def require(condition: object, what: str) -> None:
    """Not `assert`: rows hold under python -O, too."""
    if not condition:
        raise FaultError(what)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured number of a row. A limit is the most that it may be."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    kind: Literal["time", "exact"] = "exact"  # times may take longer on a busy machine

    def holds(self, slack: float) -> bool:
        """Within its limit; times within `slack` times theirs."""
        return self.limit is None or self.value <= self.limit * (slack if self.kind == "time" else 1.0)


def took(name: str, seconds: Sequence[float], limit_s: float | None) -> Figure:
    """The longest of some durations, in milliseconds."""
    limit = None if limit_s is None else limit_s * 1e3
    return Figure(name=name, value=round(max(seconds) * 1e3, 1), unit="ms", limit=limit, kind="time")


def count(name: str, value: float, limit: float | None = 0, unit: str = "") -> Figure:
    """Something that must not be more, whatever the machine."""
    return Figure(name=name, value=value, unit=unit, limit=limit)


class Victim:
    """A `colibrid serve` of its own; what is left of it at the end is killed. Looked at from outside only."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "colibrid.cli"),
        prepare: Callable[[], None] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        """prepare: run in the child before it is the daemon. stdout, stderr: descriptors in place of files of ours."""
        self.stdout_path = folder / f"stdout-{time.monotonic_ns()}"
        self.stderr_path = self.stdout_path.with_name(self.stdout_path.name.replace("stdout", "stderr"))
        plain = {name: value for name, value in os.environ.items() if not name.startswith("COLIBRID_")}
        plain.setdefault("XDG_CACHE_HOME", str(folder / "cache"))
        with self.stdout_path.open("wb") as out, self.stderr_path.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *program, "serve", "--port", "0", "--device", "cpu", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err if stderr is None else stderr,
                env={**plain, **(environment or {})},
                preexec_fn=prepare,  # noqa: PLW1509 - no other thread of ours holds a lock that it takes
            )
        self._port: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    # ------------------------------------------------------------- what it says

    @property
    def events(self) -> list[dict[str, Any]]:
        """What it has logged."""
        return log_events(self.stderr_path)

    def logged(self, name: str) -> list[dict[str, Any]]:
        """All events of this name."""
        return [event for event in self.events if event["event"] == name]

    def wait_event(self, name: str, number: int = 1) -> dict[str, Any]:
        """The event of this name, the first or a later one."""
        wait_for(lambda: len(self.logged(name)) >= number, f"log event {name}", self)
        return self.logged(name)[number - 1]

    def wait_ready(self) -> Self:
        self.wait_event("serving")
        return self

    @property
    def port(self) -> int:
        if self._port is None:
            self._port = int(str(self.wait_event("serving")["url"]).rpartition(":")[2])
        return self._port

    @port.setter
    def port(self, port: int) -> None:
        self._port = port

    # -------------------------------------------------------------- what it does

    @contextlib.contextmanager
    def open(self, method: str, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
        """One request on its own connection, its answer unread."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and decoded JSON of one request."""
        with self.open(method, path, body) as response:
            return response.status, json.loads(response.read())

    def text(self) -> str:
        """The answer to a question that is always the same."""
        status, answer = self.ask("POST", "/v1/completions", SHORT)
        require(status == 200, f"a request of a ready daemon is {status}: {answer}")
        return str(answer["choices"][0]["text"])

    def ready(self) -> bool:
        return self.ask("GET", "/readyz")[0] == 200

    def health(self) -> Any:
        return self.ask("GET", "/health")[1]

    def wait_idle(self) -> float:
        """Seconds until nothing runs and nothing waits."""
        began = time.perf_counter()
        wait_for(lambda: not any(e["running"] + e["queued"] for e in self.health()["engines"]), "idle", self)
        return time.perf_counter() - began

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(PATIENCE_S)

    # -------------------------------------------------------------- what it holds

    def engine_pids(self) -> list[int]:
        """Its engine processes, in the order in which they were started."""
        found = [event["pid"] for event in self.logged("engine_started")]
        return [pid for pid in found if Path(f"/proc/{pid}").exists()]

    def descriptors(self) -> int:
        """The fewest of some samples: connections that clients have just closed are no leak."""
        samples = []
        for _ in range(20):
            samples.append(len(list(Path(f"/proc/{self.process.pid}/fd").iterdir())))
            time.sleep(0.02)
        return min(samples)

    def children(self) -> int:
        return len(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split())


def shared_memory_files() -> set[str]:
    """What lies in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}  # noqa: S108 (looked at only)


def wait_for(probe: Callable[[], Any], what: str, daemon: Victim | None = None, patience_s: float = PATIENCE_S) -> Any:
    """The first true result of `probe`."""
    end = time.monotonic() + patience_s
    while True:
        found = probe()
        if found:
            return found
        if daemon is not None and daemon.process.poll() is not None and not probe():
            said = daemon.stderr_path.read_text()[-2000:]
            raise FaultError(f"the daemon ended with {daemon.process.returncode} before: {what}\n{said}")
        if time.monotonic() > end:
            raise FaultError(f"not within {patience_s:g} s: {what}")
        time.sleep(0.002)


class Poller:
    """Asks one path again and again from a thread, and keeps when its answers changed."""

    def __init__(self, daemon: Victim, path: str) -> None:
        self.changes: list[tuple[float, int]] = []  # (time of the answer, status)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(daemon.port, path))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self, port: int, path: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        while not self._stop.is_set():
            try:
                connection.request("GET", path)
                response = connection.getresponse()
                response.read()
                status = response.status
            except OSError:
                connection.close()
                status = 0
            if not self.changes or self.changes[-1][1] != status:
                self.changes.append((time.perf_counter(), status))
            time.sleep(0.001)
        connection.close()

    def first(self, status: int, after: float) -> float | None:
        """Seconds from `after` until this status was seen first; None: not yet."""
        return next((seen - after for seen, found in self.changes if found == status and seen >= after), None)
