"""A real `colibrid serve` as a child process, for tests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

from outside import log_events

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

DEADLINE_S = 60.0  # ten times and more of what it takes on an idle machine


class DaemonProcess:
    """Use as a context manager; what is left at its end is killed."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        """`launcher`: words of a command that runs the daemon in its own place."""
        self.stdout_path = folder / f"stdout-{time.monotonic_ns()}"
        self.stderr_path = self.stdout_path.with_name(self.stdout_path.name.replace("stdout", "stderr"))
        plain = {name: value for name, value in os.environ.items() if not name.startswith("COLIBRID_")}
        with self.stdout_path.open("wb") as out, self.stderr_path.open("wb") as err:
            self.process = subprocess.Popen(
                [*launcher, sys.executable, "-m", "colibrid.cli", "serve", "--port", "0", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**plain, "XDG_CACHE_HOME": str(folder / "cache"), **(environment or {})},
            )
        self._port: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text(errors="replace")  # half a character, while it writes

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    @property
    def events(self) -> list[dict[str, Any]]:
        """What it has logged."""
        return log_events(self.stderr_path)

    def wait_event(self, name: str) -> dict[str, Any]:
        """The first event of this name."""
        return wait_for(lambda: next((event for event in self.events if event["event"] == name), None), self)

    def wait_ready(self) -> Self:
        wait_for(lambda: "ready in" in self.stdout, self)
        return self

    @property
    def port(self) -> int:
        if self._port is None:
            url = self.wait_event("serving")["url"]
            self._port = int(url.rpartition(":")[2])
        return self._port

    def request(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and decoded JSON of one request."""
        with self.open(method, path, body, headers) as response:
            return response.status, json.loads(response.read())

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        raw: bytes | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """One request on its own connection, its answer unread; `raw` in place of a body to be encoded."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            data = raw if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            yield connection.getresponse()
        finally:
            connection.close()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(DEADLINE_S)


def wait_for(probe: Any, daemon: DaemonProcess | None = None) -> Any:
    """The first true result of `probe`; fails when it takes too long or the daemon ends."""
    end = time.monotonic() + DEADLINE_S
    while True:
        found = probe()
        if found:
            return found
        if daemon is not None and daemon.process.poll() is not None:
            found = probe()
            assert found, f"the daemon ended with {daemon.process.returncode}: {daemon.stderr}"
            return found
        assert time.monotonic() < end, f"timed out: {daemon.stderr if daemon else ''}"
        time.sleep(0.02)
