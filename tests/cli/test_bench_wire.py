"""The load generator's HTTP: responses from pieces, and connections that break."""

from __future__ import annotations

import asyncio

import pytest

from colibrid.cli.bench_wire import (
    Connection,
    EventParser,
    ResponseParser,
    StaleError,
    WireError,
    request_bytes,
)

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nT: 1\r\n\r\n"


@pytest.mark.parametrize("data", [LENGTH, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_body_is_the_same_in_any_pieces(data: bytes, size: int) -> None:
    """Framing never reaches the body, wherever the network cuts."""
    parser = ResponseParser()
    body = b""
    for start in range(0, len(data), size):
        assert not parser.done
        body += parser.feed(data[start : start + size])
    assert (parser.done, parser.reusable, parser.status, body) == (True, True, 200, b"hello")


def test_headers_have_lower_case_names() -> None:
    """Names compare without case; values are stripped."""
    parser = ResponseParser()
    parser.feed(LENGTH)
    assert parser.headers == {"content-length": "5", "x-a": "b"}


def test_a_body_without_length_ends_with_the_connection() -> None:
    """Such a response is whole when the server closes, and the connection is used up."""
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\nabc") == b"abc"
    assert not parser.done
    parser.end()
    assert parser.done
    assert not parser.reusable


def test_an_announced_close_is_respected() -> None:
    """Connection: close means that no other request follows."""
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    assert parser.done
    assert not parser.reusable


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc",
        b"x" * 70_000,
    ],
)
def test_what_is_not_http_is_an_error(data: bytes) -> None:
    """Nonsense raises instead of being counted as an answer."""
    with pytest.raises(WireError):
        ResponseParser().feed(data)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200", LENGTH[:-1], CHUNKED[:-2]])
def test_an_end_in_the_middle_is_an_error(data: bytes) -> None:
    """A connection that ends early fails its request."""
    parser = ResponseParser()
    parser.feed(data)
    with pytest.raises(WireError, match="middle of a response"):
        parser.end()


def test_events_come_whole_and_comments_do_not() -> None:
    """An event is given when its line is complete; pings are left out."""
    events = EventParser()
    assert list(events.feed(b'data: {"a"')) == []
    assert list(events.feed(b": 1}\n\n: ping\n\ndata: [DONE]\r\n\r\n")) == [b'{"a": 1}', b"[DONE]"]


def test_a_request_has_its_length_and_headers() -> None:
    """One head, then the body."""
    data = request_bytes("POST", "/x", "h:1", b"body", {"A": "b"})
    assert data == b"POST /x HTTP/1.1\r\nHost: h:1\r\nContent-Length: 4\r\nA: b\r\n\r\nbody"


async def _serve(answers: list[bytes], *, close_after: int) -> tuple[asyncio.Server, int]:
    """A server that answers every request with the next bytes, and closes after so many."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(close_after):
            try:
                await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            writer.write(answers.pop(0))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


GET = request_bytes("GET", "/", "h", b"", {})


async def test_a_connection_carries_several_requests() -> None:
    """It stays usable between complete responses, and the sink sees each body."""
    server, port = await _serve([LENGTH, CHUNKED], close_after=2)
    async with server:
        connection = await Connection.open("127.0.0.1", port)
        bodies = []
        for _ in range(2):
            body = bytearray()
            response = await connection.ask(GET, lambda data, _now, body=body: body.extend(data))
            assert response.status == 200
            assert connection.usable
            bodies.append(bytes(body))
        assert bodies == [b"hello", b"hello"]
        connection.close()


async def test_a_kept_connection_that_the_server_closed_is_stale() -> None:
    """That is no failed request: the caller sends it again."""
    server, port = await _serve([LENGTH], close_after=1)
    async with server:
        connection = await Connection.open("127.0.0.1", port)
        await connection.ask(GET, lambda _data, _now: None)
        with pytest.raises(StaleError):
            await connection.ask(GET, lambda _data, _now: None)


async def test_a_cut_answer_fails_its_request() -> None:
    """The first request of a connection is never stale."""
    server, port = await _serve([LENGTH[:-2]], close_after=1)
    async with server:
        connection = await Connection.open("127.0.0.1", port)
        with pytest.raises(WireError, match="middle of a response"):
            await connection.ask(GET, lambda _data, _now: None)
        assert not connection.usable


@pytest.mark.parametrize(
    "data",
    [
        "HTTP/1.1 ²00 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: ²\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nContent-Length: {'9' * 5000}\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabcdefgh",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + "1" * 70_000,
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + "T" * 70_000,
    ],
)
def test_numbers_that_no_server_means_are_an_error(data: str) -> None:
    """Digits of other scripts, sizes below nothing and lines without an end neither raise something else nor hang."""
    with pytest.raises(WireError):
        ResponseParser().feed(data.encode("latin-1"))
