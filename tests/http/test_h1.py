"""HTTP/1.1 as bytes on a socket: the 33 cases of uNetworking's h1spec, then smuggling, chunks, pipelines, heads, crumbs.

h1spec asks an echo server at `/`; here the plain requests go to /livez and the bodies to /tokenize, and the host is ours.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.http.conftest import Server

LINE = b"GET /livez HTTP/1.1\r\n"
HOST = b"Host: localhost\r\n"
BODY = b'{"prompt": "Hi"}'
POST = b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
WAIT_S = 0.15  # for what should not come
PATIENCE_S = 60.0  # for what should

FRAGMENTS = {
    "method": b"G",
    "URL 1": b"GET ",
    "URL 2": b"GET /livez",
    "URL 3": b"GET /livez ",
    "HTTP version": b"GET /livez HTTP",
    "request line": b"GET /livez HTTP/1.1",
    "request line newline 1": b"GET /livez HTTP/1.1\r",
    "request line newline 2": LINE,
    "field name": LINE + b"Hos",
    "field value 1": LINE + b"Host:",
    "field value 2": LINE + b"Host: ",
    "field value 3": LINE + b"Host: localhost",
    "field value 4": LINE + b"Host: localhost\r",
    "request": LINE + HOST,
    "request termination": LINE + HOST + b"\r",
}
GOOD = (200, 299)
BAD = (400, 499)
WHOLE = {
    "without HTTP version": (b"GET /livez \r\n\r\n", (400, 599)),
    "Expect header": (LINE + HOST + b"Expect: 100-continue\r\n\r\n", (100, 299)),
    "valid GET": (LINE + HOST + b"\r\n", GOOD),
    "valid GET with edge cases": (LINE + b"hoSt:\tlocalhost\r\nempty:\r\n\r\n", GOOD),
    "invalid header characters": (LINE + HOST + b"X-Invalid[]: test\r\n\r\n", BAD),
    "missing Host": (LINE + b"Content-Length: 5\r\n\r\n", BAD),
    "multiple Host headers": (LINE + HOST + b"Host: 127.0.0.1\r\n\r\n", BAD),
    "overflowing negative Content-Length": (LINE + HOST + b"Content-Length: -123456789123456789123456789\r\n\r\n", BAD),
    "negative Content-Length": (LINE + HOST + b"Content-Length: -1234\r\n\r\n", BAD),
    "non-numeric Content-Length": (LINE + HOST + b"Content-Length: abc\r\n\r\n", BAD),
    "empty header value": (LINE + HOST + b"X-Empty-Header: \r\n\r\n", GOOD),
    "invalid control character": (LINE + HOST + b"X-Bad-Control-Char: test\x07\r\n\r\n", BAD),
    "invalid HTTP version": (b"GET /livez HTTP/9.9\r\n" + HOST + b"\r\n", (400, 599)),
    "invalid prefix": (b"Extra line" + LINE + HOST + b"\r\n", (400, 599)),
    "invalid line ending": (LINE + HOST + b"\rSome-Header: Test\r\n\r\n", BAD),
    "valid POST with body": (POST + b"Content-Length: 16\r\n\r\n" + BODY, GOOD),
    "chunked": (CHUNKED + b"10\r\n" + BODY + b"\r\n0\r\n\r\n", GOOD),
    "Transfer-Encoding and Content-Length in varying case": (
        POST + b"content-LengtH: 5\r\nTransFer-Encoding: chunked\r\n\r\n10\r\n" + BODY + b"\r\n0\r\n\r\n",
        BAD,
    ),
}
# What a proxy and a server may read in two ways: each is refused, or read as the standard says, and the connection ends.
SMUGGLED = b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n"
SMUGGLING = {
    "both lengths": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": POST + b"Content-Length: 16\r\nContent-Length: 0\r\n\r\n" + BODY + SMUGGLED,
    "list of lengths": POST + b"Content-Length: 16, 0\r\n\r\n" + BODY + SMUGGLED,
    "signed length": POST + b"Content-Length: +16\r\n\r\n" + BODY + SMUGGLED,
    "length with underscore": POST + b"Content-Length: 1_6\r\n\r\n" + BODY + SMUGGLED,
    "hexadecimal length": POST + b"Content-Length: 0x10\r\n\r\n" + BODY + SMUGGLED,
    "length in other digits": POST + "Content-Length: ١٦\r\n\r\n".encode() + BODY + SMUGGLED,
    "unknown encoding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "encoding twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "encoding not last": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "space before colon": POST + b"Transfer-Encoding : chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "folded header": POST + b"X: y\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "bare line feeds": b"POST /tokenize HTTP/1.1\nHost: localhost\nContent-Length: 0\n\n" + SMUGGLED,
    "null in a header": POST + b"X: a\x00b\r\nContent-Length: 0\r\n\r\n" + SMUGGLED,
    "carriage return in a header": POST + b"X: a\rTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n" + SMUGGLED,
}
CHUNKS = {
    "negative": b"-10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "prefixed": b"0x10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "with space": b" 10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "overflowing": b"10000000000000010\r\n" + BODY + b"\r\n0\r\n\r\n",
    "no number": b"zz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "empty": b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "too short for its data": b"f\r\n" + BODY + b"\r\n0\r\n\r\n",
    "without the line behind its data": b"10\r\n" + BODY + b"0\r\n\r\n",
}


async def answers(server: Server, data: bytes, count: int | None = None) -> tuple[bytes, bool]:
    """What comes back for `data`, and whether the server has closed, which is waited for unless there is a `count` of
    whole answers after which nothing more should come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(data)
    found, closed = b"", False
    try:
        while not closed:
            async with asyncio.timeout(PATIENCE_S if count is None or whole(found) < count else WAIT_S):
                part = await reader.read(65536)
            found, closed = found + part, not part
    except (TimeoutError, ConnectionResetError) as error:
        closed = isinstance(error, ConnectionResetError)
    writer.close()
    return found, closed


def whole(found: bytes) -> int:
    """How many answers are there to their end."""
    count = 0
    while b"\r\n\r\n" in found:
        head, _, found = found.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        size = 0 if length is None else int(length[1])
        if len(found) < size:
            break
        count, found = count + 1, found[size:]
    return count


def statuses(found: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", found)]


def test_all_cases_are_here() -> None:
    """h1spec has 33 cases."""
    assert len(FRAGMENTS) + len(WHOLE) == 33


@pytest.mark.parametrize("data", FRAGMENTS.values(), ids=FRAGMENTS)
async def test_fragments_wait(server: Server, data: bytes) -> None:
    """A head that is not complete gets no answer, and the connection stays open."""
    assert await answers(server, data, 0) == (b"", False)


@pytest.mark.parametrize(("data", "expected"), WHOLE.values(), ids=WHOLE)
async def test_whole_requests(server: Server, data: bytes, expected: tuple[int, int]) -> None:
    """A request is answered with a status as h1spec expects it, a body with its tokens."""
    found, _ = await answers(server, data, 1)
    assert expected[0] <= statuses(found)[0] <= expected[1], found
    if BODY in data and expected == GOOD:
        assert json.loads(found.split(b"\r\n\r\n", 1)[1])["count"] == 1


@pytest.mark.parametrize("data", SMUGGLING.values(), ids=SMUGGLING)
async def test_no_request_inside_another(server: Server, data: bytes) -> None:
    """Where the length of a body is in doubt the request is 400, what follows is not read, and the connection ends."""
    found, closed = await answers(server, data)
    assert statuses(found) == [400], found
    assert b'"invalid_http"' in found
    assert closed
    assert not server.service.seen


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
async def test_sizes_of_chunks(server: Server, chunk: bytes) -> None:
    """A chunk whose size is no plain hexadecimal number, or a lie, ends the request with 400 and the connection."""
    found, closed = await answers(server, CHUNKED + chunk + SMUGGLED)
    assert statuses(found) == [400], found
    assert closed


async def test_chunks_as_they_should_be(server: Server) -> None:
    """Extensions, leading zeros, capital digits and trailers are allowed, and change nothing."""
    body = b'{"prompt": "' + b"x" * 20 + b'"}'
    assert len(body) == 0x22
    data = CHUNKED + b"0010;name=value\r\n" + body[:16] + b"\r\n12\r\n" + body[16:] + b"\r\n0\r\nX-Trailer: y\r\n\r\n"
    found, closed = await answers(server, data + LINE + HOST + b"\r\n", 2)
    assert statuses(found) == [200, 200]
    assert not closed


async def test_pipelines_are_answered_in_order(server: Server) -> None:
    """Requests that are sent at once are answered one after another, however many, and the connection serves on."""
    names = [f"id-{number}" for number in range(200)]
    data = b"".join(LINE + HOST + f"x-request-id: {name}\r\n\r\n".encode() for name in names)
    found, closed = await answers(server, data, len(names))
    ids = [line.split(b": ")[1].decode() for line in found.split(b"\r\n") if line.lower().startswith(b"x-request-id")]
    assert ids == names
    assert not closed


async def test_a_pipeline_ends_at_its_first_mistake(server: Server) -> None:
    """What stands behind a request that is no HTTP is not answered; what came with it may go unanswered, too."""
    good = LINE + HOST + b"\r\n"
    found, closed = await answers(server, good + b"NONSENSE\r\n\r\n" + good)
    assert statuses(found) in ([200, 400], [400])
    assert closed


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
        LINE + HOST + b"X: " + b"y" * 9000 + b"\r\n\r\n",
        LINE + HOST + b"x" * 9000 + b": y\r\n\r\n",
        LINE + HOST + b"X: y\r\n" * 200 + b"\r\n",
        LINE + HOST + b"".join(b"X-%d: %b\r\n" % (number, b"y" * 8000) for number in range(130)) + b"\r\n",
    ],
    ids=["URL", "value", "name", "number", "all"],
)
async def test_giant_heads(server: Server, head: bytes) -> None:
    """A head beyond the limits is 400, and the connection ends."""
    found, closed = await answers(server, head)
    assert statuses(found) == [400]
    assert closed


async def test_bodies_in_crumbs(server: Server) -> None:
    """A body that comes byte by byte, plain or in chunks of one, is read; one that stops half-way is 408 in the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    for pieces in (
        [POST + b"Content-Length: 16\r\n\r\n", *(bytes([byte]) for byte in BODY)],
        [CHUNKED, *(b"1\r\n%c\r\n" % byte for byte in BODY), b"0\r\n\r\n"],
    ):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.001)
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    writer.close()


async def test_half_a_body_is_408(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that drips is refused when its time is up, however steadily it does."""
    monkeypatch.setattr("colibrid.http.body.BODY_TIMEOUT_S", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(POST + b"Content-Length: 1000\r\n\r\n")

    async def drip() -> None:
        for _ in range(100):
            writer.write(b" ")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    dripping.cancel()
    writer.close()


async def test_old_and_odd_methods(server: Server) -> None:
    """CONNECT, TRACE and upgrades open nothing: they get an error, and no tunnel."""
    for method in (b"CONNECT localhost:80", b"TRACE /livez", b"PRI *"):
        found, _ = await answers(server, method + b" HTTP/1.1\r\n" + HOST + b"\r\n", 1)
        assert statuses(found)[0] in {400, 404, 405}, found
    upgrade = LINE + HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n"
    found, _ = await answers(server, upgrade, 1)
    assert statuses(found)[0] == 200
