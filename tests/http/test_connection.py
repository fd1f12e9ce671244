"""Connections: bytes that are no HTTP, heads that never end, answers that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from colibrid.http.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.http.conftest import Server


async def exchange(server: Server, data: bytes) -> tuple[bytes, dict[str, str], bytes]:
    """Status line, headers and body of the answer to `data`, whose sender then waits for the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(data)
    async with asyncio.timeout(60):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, *lines = head.split(b"\r\n")
    return status, dict(line.decode().split(": ", 1) for line in lines), body


@pytest.mark.parametrize(
    "data",
    [
        b"secret nonsense\r\n\r\n",
        b"\x16\x03\x01secret\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"secret" * 2000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"X: secret\r\n" * 200 + b"\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nsecret",
        b"GET /livez HTTP/1.1\r\n\r\n",
    ],
)
async def test_bytes_that_are_no_http(server: Server, data: bytes) -> None:
    """They get the error contract, in our name, with nothing of what was sent; then the connection closes."""
    status, headers, body = await exchange(server, data)
    error = json.loads(body)["error"]
    assert status.split()[1] == b"400"
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
    assert (headers["Server"], headers["Content-Type"]) == ("colibrid", "application/json")
    assert b"secret" not in body


@pytest.mark.parametrize("value", [b"cake", b"100-contin\xc3e", b"\xff"])
async def test_unknown_expectations(server: Server, value: bytes) -> None:
    """`Expect` with another value than 100-continue, be it no text at all, is refused within the error contract."""
    head = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nExpect: " + value + b"\r\n\r\n"
    with structlog.testing.capture_logs() as logs:
        status, headers, body = await exchange(server, head)
    assert not [line for line in logs if line["log_level"] == "error"]
    assert status.split()[1] == b"417"
    assert "100-continue" in json.loads(body)["error"]["message"]
    assert headers["Server"] == "colibrid"


@pytest.mark.parametrize("earlier", [b"", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_heads_have_a_deadline(
    make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, earlier: bytes
) -> None:
    """A head that comes in small pieces does not hold its connection for ever, on a fresh one or a used one."""
    monkeypatch.setattr("colibrid.http.connection.HEAD_TIMEOUT_S", 1.0)
    server = await make_server()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(earlier + b"GET /livez HTTP/1.1\r\n")

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.05)
            writer.write(b"X: y\r\n")

    dripping, answered = asyncio.create_task(drip()), b""
    with contextlib.suppress(ConnectionResetError):  # what is written to a closed connection resets it
        async with asyncio.timeout(60):
            while part := await reader.read(1024):
                answered += part
    dripping.cancel()
    writer.close()
    assert answered.count(b"200 OK") == (1 if earlier else 0)


async def test_an_answer_that_nobody_reads(make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes nothing of a large answer is cut off: its connection is gone when it reads at last."""
    monkeypatch.setattr("colibrid.http.runner.WRITE_TIMEOUT_S", 0.5)
    server = await make_server()
    body = json.dumps({"prompt": [5] * 2000, "max_tokens": 1, "prompt_logprobs": 20}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        await loop.sock_sendall(client, head.encode() + b"\r\n\r\n" + body)
        found = await loop.sock_recv(client, 1024)
        expected = int(found.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        async with asyncio.timeout(60):
            while held_for(client):  # noqa: ASYNC110 - the kernel decides
                await asyncio.sleep(0.1)
        got = 0
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(60):
                while piece := await loop.sock_recv(client, 1 << 16):
                    got += len(piece)
        assert got < expected


def held_for(client: socket.socket) -> bool:
    """Whether the server still has its end of the connection."""
    handlers = [one for one in gc.get_objects() if isinstance(one, Connection) and one.transport is not None]
    return any(one.transport.get_extra_info("peername") == client.getsockname() for one in handlers)


async def test_a_head_in_pieces_is_answered(make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that come byte by byte, but in time, are answered; a slow answer and an idle connection are no slow head."""
    monkeypatch.setattr("colibrid.http.connection.HEAD_TIMEOUT_S", 2.0)
    server = await make_server()
    server.service.pause_s = 0.1
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    body = b'{"prompt": "Hi"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in range(2):
        for byte in head + b"Content-Length: %d\r\n\r\n" % len(body):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        writer.write(body)
        async with asyncio.timeout(60):
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert answer.startswith(b"HTTP/1.1 200")
            await reader.readexactly(length)
        await asyncio.sleep(2.2)
    writer.close()


@pytest.mark.parametrize(
    ("limits", "status", "reason"),
    [({"connections": 2}, 503, "2 connections"), ({"connections_per_address": 2}, 429, "from your address")],
)
async def test_connections_are_bounded(
    make_server: Callable[..., Any], limits: dict[str, int], status: int, reason: str
) -> None:
    """One connection too many gets an answer with Retry-After and is closed; when another closes there is room again."""
    server = await make_server(limits=limits)
    port = int(server.url.rsplit(":", 1)[1])
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    found, headers, body = await exchange(server, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert found.split()[1] == str(status).encode()
    assert (headers["Retry-After"], headers["Connection"]) == ("1", "close")
    assert reason in json.loads(body)["error"]["message"]
    held[0][1].close()
    for _ in range(3000):
        async with server.session.get(server.url + "/livez", headers={"Connection": "close"}) as response:
            if response.status == 200:
                break
        await asyncio.sleep(0.02)
    assert response.status == 200
    held[1][1].close()
