"""colibrid.cli.admin_client."""

from __future__ import annotations

import signal
import socket
import threading
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner
from daemon_process import DaemonProcess

from colibrid.cli.admin_client import AdminClient, AdminError, admin_client, admin_options
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@click.command
@admin_options
def ask(config_file: str | None, sets: tuple[str, ...], admin_socket: str | None) -> None:
    click.echo(admin_client(config_file, sets, admin_socket)._path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "admin.sock"


@pytest.fixture
def scripted(path: Path) -> Iterator[list[bytes]]:
    """A server that answers each connection with the next of these bytes."""
    answers: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            while True:
                try:
                    client, _ = listening.accept()
                except OSError:
                    return
                with client:
                    asked = b""
                    while not asked.endswith((b"\r\n\r\n", b"{}")) or (b"POST" in asked and b"{}" not in asked):
                        asked += client.recv(1 << 16)
                    client.sendall(answers.pop(0))

        thread = threading.Thread(target=serve)
        thread.start()
        yield answers
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def test_answers_are_decoded(path: Path, scripted: list[bytes]) -> None:
    """A good answer is its JSON; an error is its message."""
    scripted += [
        answer(200, b'{"a": 1}'),
        answer(400, b'{"error": {"message": "layer is 9", "type": "x", "param": null, "code": null}}'),
    ]
    assert AdminClient(str(path)).get("/admin") == {"a": 1}
    with pytest.raises(AdminError, match="layer is 9"):
        AdminClient(str(path)).post("/admin", {})


@pytest.mark.parametrize("raw", [answer(200, b"<html>"), answer(500, b"[]"), answer(404, b"{}")])
def test_answers_of_others(path: Path, scripted: list[bytes], raw: bytes) -> None:
    """What is no answer of ours is an error that says so."""
    scripted.append(raw)
    with pytest.raises(AdminError, match="no admin socket of colibrid"):
        AdminClient(str(path)).get("/admin")


def test_broken_answers(path: Path, scripted: list[bytes]) -> None:
    """A daemon that goes away while it answers is one clear error."""
    scripted.append(b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\n{}")
    with pytest.raises(AdminError, match="did not answer"):
        AdminClient(str(path)).get("/admin")


def test_nobody_listens(path: Path) -> None:
    """Without a daemon, or with the file of one that was killed, the message names the setting."""
    for _ in range(2):
        with pytest.raises(AdminError, match=r"start one with server\.admin_socket"):
            AdminClient(str(path)).get("/admin")
        with socket.socket(socket.AF_UNIX) as left:
            if not path.exists():
                left.bind(str(path))


def test_the_socket_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option wins over --set, that over the file; without any the message says what to set."""
    monkeypatch.delenv("COLIBRID_SERVER__ADMIN_SOCKET", raising=False)
    config = tmp_path / "c.yaml"
    config.write_text("server: {admin_socket: /a}\n")
    run = CliRunner().invoke
    assert run(ask, ["--config", str(config)]).output == "/a\n"
    assert run(ask, ["--config", str(config), "--set", "server.admin_socket=/b"]).output == "/b\n"
    assert run(ask, ["--config", str(config), "--admin-socket", "/c"]).output == "/c\n"
    missing = run(ask, []).exception
    assert isinstance(missing, ConfigError)
    assert "server.admin_socket is not set" in str(missing)


def test_a_daemon_answers_and_cleans_up(tmp_path: Path, path: Path) -> None:
    """`serve` with server.admin_socket answers there, for its own user only, and removes the socket when it ends."""
    with DaemonProcess(tmp_path, "--set", f"server.admin_socket={path}") as daemon:
        daemon.wait_ready()
        assert path.stat().st_mode & 0o777 == 0o600
        routes = AdminClient(str(path)).get("/admin")["routes"]
        assert {"method": "GET", "path": "/admin", "summary": "These routes"} in routes
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert not path.exists()
