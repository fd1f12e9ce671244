"""`colibrid serve` with several engines: what operators and clients see of them, and of the death of one."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from daemon_process import DaemonProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.model.pack import Pack

LONG = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "Once", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def daemon(bundled_pack: Pack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(
        tmp_path_factory.mktemp("two"), str(bundled_pack.path), "--set", "engine.replicas=2", "--device", "cpu"
    ) as started:
        started.wait_ready()
        wait_for(lambda: health(started)["engines_ready"] == 2, started)
        yield started


def health(daemon: DaemonProcess) -> dict[str, object]:
    body: dict[str, object] = daemon.request("GET", "/health")[1]
    return body


def test_one_death_of_two(daemon: DaemonProcess) -> None:
    """The stream of the dead engine ends with an error, /readyz stays 200, /health tells which; then both serve."""
    assert "  engines  2, each with" in daemon.stdout
    pids = {event["engine"]: event["pid"] for event in daemon.events if event["event"] == "engine_ready"}
    with daemon.open("POST", "/v1/completions", LONG) as response:
        response.readline()
        engines = health(daemon)["engines"]
        assert isinstance(engines, list)
        victim = next(engine["index"] for engine in engines if engine["running"])
        os.kill(pids[victim], signal.SIGKILL)
        assert daemon.request("GET", "/readyz")[0] == 200
        assert daemon.request("POST", "/v1/completions", SHORT)[0] == 200
        rest = response.read().decode()
    assert '"error"' in rest
    assert "[DONE]" not in rest
    wait_for(lambda: health(daemon)["engines_ready"] == 2, daemon)
    assert [engine["restarts"] for engine in health(daemon)["engines"]] == [int(i == victim) for i in range(2)]  # type: ignore[attr-defined]
    assert health(daemon)["restarts"] == 1
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0


def test_an_engine_that_keeps_dying_is_told_at_the_end(daemon: DaemonProcess) -> None:
    """One engine that is given up leaves the other serving until SIGTERM; the exit code says that not all was well."""
    killed = set[int]()
    while not any(event["event"] == "engine_gave_up" for event in daemon.events):
        for event in daemon.events:
            if event["event"] == "engine_started" and event["engine"] == 0 and event["pid"] not in killed:
                killed.add(event["pid"])
                os.kill(event["pid"], signal.SIGKILL)
        assert daemon.request("GET", "/readyz")[0] == 200
    assert daemon.request("POST", "/v1/completions", SHORT)[0] == 200
    assert [engine["phase"] for engine in health(daemon)["engines"]] == ["failed", "ready"]  # type: ignore[attr-defined]
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 1
    assert "5 engines died" in daemon.stderr
