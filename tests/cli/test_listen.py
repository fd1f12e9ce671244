"""colibrid.cli.listen."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from colibrid.cli.listen import AddressTakenError, bind, bind_path
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_port_zero_takes_a_free_one() -> None:
    """The socket listens on a port of the system's choice and does not block."""
    with bind("127.0.0.1", 0) as listening:
        assert listening.getsockname()[1] > 0
        assert not listening.getblocking()
        with socket.create_connection(listening.getsockname(), timeout=5):
            pass


def test_port_in_use() -> None:
    """A taken port is its own error, which names the address."""
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressTakenError, match=f"127.0.0.1:{port} is in use"):
            bind("127.0.0.1", port)


def test_port_can_be_taken_again_at_once() -> None:
    """A restart does not wait for old connections."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        first.setblocking(True)
        first.accept()[0].close()
        client.close()
    bind("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["no such name", "192.0.2.1", "a" * 300])
def test_addresses_of_others(host: str) -> None:
    """Names that do not resolve and addresses of other machines are configuration errors."""
    with pytest.raises(ConfigError, match=r"server\.host"):
        bind(host, 0)


def connected(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


def test_a_path_is_private_and_goes_away(tmp_path: Path) -> None:
    """A socket with a path may be opened by its user only, and its file is gone at the end."""
    path = tmp_path / "admin.sock"
    with bind_path(str(path), "server.admin_socket"):
        assert path.stat().st_mode & 0o777 == 0o600
        assert connected(path)
    assert not path.exists()


def test_a_stale_path_is_replaced(tmp_path: Path) -> None:
    """What a killed daemon has left behind does not keep the next one from starting."""
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.exists()
    with bind_path(str(path), "server.admin_socket"):
        assert connected(path)


def test_a_path_in_use(tmp_path: Path) -> None:
    """A daemon that lives keeps its socket."""
    path = tmp_path / "admin.sock"
    with bind_path(str(path), "server.admin_socket"):
        with pytest.raises(AddressTakenError, match=r"server\.admin_socket .* is in use"):
            bind_path(str(path), "server.admin_socket").__enter__()
        assert connected(path)


def test_only_the_own_file_is_removed(tmp_path: Path) -> None:
    """A file that has taken the socket's place meanwhile stays."""
    path = tmp_path / "admin.sock"
    with bind_path(str(path), "server.admin_socket"):
        path.unlink()
        path.write_text("another")
    assert path.read_text() == "another"


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    """A file in the way, a folder that is not there and a path that is too long are errors that name the setting."""
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "none" / "admin.sock", tmp_path / ("x" * 108)):
        with pytest.raises(ConfigError, match=r"^server\.admin_socket"):
            bind_path(str(path), "server.admin_socket").__enter__()
    assert (tmp_path / "file").read_text() == "mine"
