"""Hostile requests against a whole daemon: the right status, no harm to neighbours, no growth, nothing in the log."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from daemon_process import DaemonProcess
from hostile import HOSTILE, MALFORMED
from outside import private_kib

if TYPE_CHECKING:
    from collections.abc import Iterator

ALL = {name: case for name, case in (HOSTILE | MALFORMED).items() if case[2] >= 400}  # the others only take long
CANARY = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 1.0, "seed": 11, "logprobs": 2}
GROWTH_KIB = 64 << 10  # of the daemon after a first pass: less than the bodies of one pass together


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("hostile")) as process:
        yield process.wait_ready()


def send(daemon: DaemonProcess, path: str, raw: bytes) -> tuple[int, Any]:
    with daemon.open("POST", path, raw=raw) as response:
        return response.status, json.loads(response.read())


def ask_canary(daemon: DaemonProcess) -> Any:
    status, answer = daemon.request("POST", "/v1/completions", CANARY)
    assert status == 200, answer
    return answer["choices"]


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_values(daemon: DaemonProcess, name: str) -> None:
    """A value out of bounds is refused with the contract's error, which says what to do."""
    path, raw, status = MALFORMED[name]
    found, answer = send(daemon, path, raw)
    assert found == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert ";" in error["message"] or "." in error["message"][:-1]  # what is wrong, then what to do


def test_neighbours_are_undisturbed(daemon: DaemonProcess) -> None:
    """While all of them come in, twice, a canary gets the same answer to the last bit, and the daemon does not grow."""
    expected, seen, stop = ask_canary(daemon), [], threading.Event()

    def ask_on() -> None:
        while not stop.is_set():
            seen.append(ask_canary(daemon))

    one_pass(daemon)  # caches fill, pools reach their size
    before = private_kib(daemon.process.pid)
    canary = threading.Thread(target=ask_on)
    canary.start()
    try:
        for _ in range(2):
            one_pass(daemon)
    finally:
        stop.set()
        canary.join()
    assert len(seen) > 1
    assert all(found == expected for found in seen)
    assert private_kib(daemon.process.pid) - before < GROWTH_KIB
    assert not [event for event in daemon.events if event["level"] == "error"]


def one_pass(daemon: DaemonProcess) -> None:
    for name, (path, raw, status) in ALL.items():
        found, answer = send(daemon, path, raw)
        assert found == status, (name, str(answer)[:500])
