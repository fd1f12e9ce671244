"""colibrid.cli.listen."""

from __future__ import annotations

import socket

import pytest

from colibrid.cli.listen import AddressTakenError, bind
from colibrid.errors import ConfigError


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
