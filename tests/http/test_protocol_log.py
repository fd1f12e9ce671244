"""What the log says of connections."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import structlog

from colibrid.http.protocol_log import ProtocolLogger

if TYPE_CHECKING:
    from tests.http.conftest import Server


async def test_bytes_of_clients_are_not_logged(server: Server) -> None:
    """A request that is no HTTP is 400, and the log holds none of its bytes, which may be a key."""
    with structlog.testing.capture_logs() as logs:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        writer.write(b"GET / HTTP/1.1\r\nAuthorization: Bearer " + b"secret" * 2000 + b"\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
    assert [(line["event"], line["log_level"]) for line in logs] == [("bad_http", "debug")]
    assert "secret" not in str(logs)


def test_mistakes_of_ours_are_errors() -> None:
    """Anything but bad HTTP is an error with its exception."""
    error = ValueError("ours")
    with structlog.testing.capture_logs() as logs:
        ProtocolLogger().exception("Error handling request", exc_info=error)
    assert (logs[0]["event"], logs[0]["log_level"], logs[0]["exc_info"]) == ("connection_broken", "error", error)


def _leave() -> None:
    raise ConnectionResetError("Cannot write to closing transport")


@pytest.mark.parametrize("given", [True, "error"])
def test_a_client_that_leaves_is_no_error(given: object) -> None:
    """Whoever closes while `100 Continue` is written gets a line when debugging, whichever way the exception comes."""
    with structlog.testing.capture_logs() as logs:
        try:
            _leave()
        except ConnectionResetError as error:
            ProtocolLogger().exception("Error handling request", exc_info=True if given is True else error)
    assert [(line["event"], line["log_level"]) for line in logs] == [("client_gone", "debug")]
