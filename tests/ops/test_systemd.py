"""colibrid.ops.systemd."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from colibrid.ops.systemd import Notifier, passed_sockets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """What systemd listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(5)
        yield listening


def test_messages_follow_the_protocol(manager: socket.socket) -> None:
    """READY, STOPPING, STATUS, EXTEND_TIMEOUT_USEC and WATCHDOG are sent as sd_notify(3) says."""
    notifier = Notifier(manager.getsockname())
    assert notifier.active
    notifier.ready("serving")
    notifier.status("line\nREADY=1")
    notifier.extend_timeout(1.5)
    notifier.watchdog()
    notifier.stopping("bye")
    notifier.close()
    notifier.watchdog()
    received = [manager.recv(4096).decode() for _ in range(5)]
    assert received == [
        "READY=1\nSTATUS=serving", "STATUS=line READY=1", "EXTEND_TIMEOUT_USEC=1500000", "WATCHDOG=1",
        "STOPPING=1\nSTATUS=bye",
    ]  # fmt: skip


def test_abstract_addresses_work() -> None:
    """An address that starts with @ is in the abstract namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0colibrid-test-{os.getpid()}")
        listening.settimeout(5)
        notifier = Notifier(f"@colibrid-test-{os.getpid()}")
        notifier.watchdog()
        notifier.close()
        assert listening.recv(100) == b"WATCHDOG=1"


@pytest.mark.parametrize("address", [None, "", "relative", "/no/such/socket"])
def test_no_manager_is_no_error(address: str | None) -> None:
    """Without a manager, or with one that is gone, every call does nothing."""
    notifier = Notifier(address)
    assert not notifier.active
    notifier.ready("x")


def test_a_full_manager_never_blocks(manager: socket.socket) -> None:
    """Messages are dropped when the manager does not read."""
    notifier = Notifier(manager.getsockname())
    for _ in range(10_000):
        notifier.watchdog()
    notifier.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, None), ({"WATCHDOG_USEC": "3000000"}, 3.0), ({"WATCHDOG_USEC": "x"}, None), ({"WATCHDOG_USEC": "0"}, None),
     ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
     ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0)],
)  # fmt: skip
def test_watchdog_interval(environ: dict[str, str], expected: float | None) -> None:
    """The watchdog counts only when it is meant for this process."""
    assert Notifier.from_environment(environ).watchdog_s == expected


@pytest.mark.parametrize(
    "environ", [{}, {"LISTEN_FDS": "1"}, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}, {"LISTEN_PID": str(os.getpid())}]
)
def test_no_passed_sockets(environ: dict[str, str]) -> None:
    """Without sockets, or with those of another process, there are none."""
    assert passed_sockets(environ) == []


def passed_in_child(descriptor: int) -> str:
    """What a process that gets `descriptor` as its number 3 makes of it."""
    program = (
        "import os, sys; os.environ['LISTEN_PID'] = str(os.getpid()); os.environ['LISTEN_FDS'] = '1'\n"
        "os.dup2(int(sys.argv[1]), 3)\n"
        "from colibrid.ops.systemd import passed_sockets\n"
        "one = passed_sockets()[0]\n"
        "print(one.getsockname(), one.getblocking(), os.get_inheritable(3))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(descriptor)],
        pass_fds=[descriptor],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_passed_sockets(tmp_path: Path) -> None:
    """A listening socket is taken over, does not block and is not inherited; another descriptor is told."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert passed_in_child(listening.fileno()).strip() == f"{listening.getsockname()} False False"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        assert "ConfigError: the service manager passed descriptor 3" in passed_in_child(other.fileno())
    with (tmp_path / "file").open("w") as file:
        assert "ConfigError: the service manager passed descriptor 3" in passed_in_child(file.fileno())
