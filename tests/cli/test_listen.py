"""colibrid.cli.listen."""

from __future__ import annotations

import contextlib
import socket
import stat
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from colibrid.cli.listen import AddressTakenError, bind, bind_path, host_of, open_sockets
from colibrid.config.settings import ServerSettings
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


def opened(stack: ExitStack, *entries: str, mode: Any = "0660", passed: Any = ()) -> tuple[socket.socket, ...]:
    return open_sockets(ServerSettings(listen=list(entries) or None, socket_mode=mode, port=0), passed, stack)


def test_several_addresses(tmp_path: Path) -> None:
    """A list of addresses opens them all: IPv4, a name, IPv6 where there is any, a path with its mode."""
    path = tmp_path / "api"
    entries = ["127.0.0.1:0", "localhost:0", f"unix:{path}", *(["[::1]:0"] if socket.has_ipv6 and has_v6() else [])]
    with ExitStack() as stack:
        sockets = opened(stack, *entries, mode="0666")
        assert [host_of(one) for one in sockets] == ["127.0.0.1", "127.0.0.1", None, "::1"][: len(entries)]
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


def has_v6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_passed_sockets_come_first() -> None:
    """Sockets of the service manager stand for host and port, and beside a list of addresses; all are closed."""
    passed = socket.create_server(("127.0.0.1", 0))
    with ExitStack() as stack:
        assert opened(stack, passed=[passed]) == (passed,)
    assert passed.fileno() == -1
    passed = socket.create_server(("127.0.0.1", 0))
    with ExitStack() as stack:
        assert len(opened(stack, "127.0.0.1:0", passed=[passed])) == 2


@pytest.mark.parametrize("entry", ["8080", "localhost", "::1:80", "127.0.0.1:99999", "http://x:1", "/run/x", "a:b"])
def test_wrong_addresses(entry: str) -> None:
    """What is no address is told with its setting; nothing stays open."""
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"server\.listen"):
        opened(stack, "127.0.0.1:0", entry)


def test_a_path_of_somebody_who_accepts_nobody(tmp_path: Path) -> None:
    """A daemon that stands still, its queue full, is told as one that listens: we do not wait for it."""
    path = str(tmp_path / "api")
    with socket.socket(socket.AF_UNIX) as listening, ExitStack() as stack:
        listening.bind(path)
        listening.listen(0)
        for _ in range(2):
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            with contextlib.suppress(BlockingIOError):
                client.connect(path)
        with pytest.raises(AddressTakenError), bind_path(path, "server.admin_socket"):
            pass
