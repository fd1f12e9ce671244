"""colibrid.http.refusal, in front of a server whose queue is full."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import TYPE_CHECKING

import pytest
import structlog

from colibrid.errors import OverloadedError
from colibrid.http.context import RequestContext

if TYPE_CHECKING:
    from tests.http.conftest import Server

FULL = OverloadedError("the queue is full", code="server_is_overloaded", retry_after_s=2.2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said is kept for no longer than a test can wait."""
    monkeypatch.setattr("colibrid.http.refusal._KEPT_S", 0.05)


async def test_refusals_are_as_any_answer(server: Server) -> None:
    """Status, headers, id and body are those of the error contract; the connection serves on."""
    server.service.refusal = FULL
    for asked in ("mine-1", "a b"):
        answer = await server.post("/v1/completions", {"prompt": "Hi"}, **{"x-request-id": asked})
        assert (answer.status, answer.error["code"], answer.error["type"]) == (
            503,
            "server_is_overloaded",
            "server_error",
        )
        assert answer.headers["Retry-After"] == "3"
        assert answer.headers["retry-after-ms"] == "2200"
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.headers["Server"] == "colibrid"
        assert (answer.headers["x-request-id"] == asked) == (asked == "mine-1")
    assert not server.service.seen
    assert (await server.get("/v1/models")).status == 200


async def test_both_ways_say_the_same(server: Server) -> None:
    """A request that expects 100-continue, or ends its connection, takes the longer way to the same answer."""
    server.service.refusal = FULL
    quick = await server.post("/v1/chat/completions", {"messages": []})
    slow = await server.post("/v1/chat/completions", {"messages": []}, Connection="close")
    assert quick.json == slow.json
    names = {"Retry-After", "retry-after-ms", "Content-Type", "Server", "Content-Length"}
    assert {name: quick.headers[name] for name in names} == {name: slow.headers[name] for name in names}
    assert "openai-processing-ms" not in quick.headers
    assert "openai-processing-ms" in slow.headers


async def test_room_is_seen_again(server: Server) -> None:
    """When there is room requests are served again, at the latest when what was said is forgotten."""
    server.service.refusal = FULL
    assert (await server.post("/v1/completions", {"prompt": "Hi"})).status == 503
    server.service.refusal = None
    await asyncio.sleep(0.06)
    assert (await server.post("/v1/completions", {"prompt": "Hi"})).status == 200


async def test_only_requests_for_slots_are_refused(server: Server) -> None:
    """Other routes, other methods and other reasons go their usual way."""
    server.service.refusal = FULL
    assert (await server.post("/tokenize", {"prompt": "Hi"})).status == 200
    assert (await server.get("/v1/completions")).status == 405
    server.service.refusal = OverloadedError("loading", code="model_loading", retry_after_s=1)
    await asyncio.sleep(0.06)
    answer = await server.post("/v1/completions", {"prompt": "Hi"})
    assert (answer.error["code"], "openai-processing-ms" in answer.headers) == ("model_loading", True)


async def test_the_log_has_their_number(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals are counted in a line now and then instead of a line each."""
    server.service.refusal = FULL
    monkeypatch.setattr("colibrid.http.refusal._LOG_S", 3600.0)
    with structlog.testing.capture_logs() as logs:
        for _ in range(10):
            await server.post("/v1/completions", {"prompt": "Hi"})
        monkeypatch.setattr("colibrid.http.refusal._LOG_S", 0.0)  # as if the time was over
        await server.post("/v1/completions", {"prompt": "Hi"})
    assert {line["event"] for line in logs} == {"overloaded"}
    assert len(logs) <= 2
    assert sum(line["refused"] for line in logs) == logs[-1]["total"] == 11
    assert server.state.served.refusals["overloaded"] == 11
    assert server.state.served.answers["/v1/completions", "5xx"] == 11


async def test_the_longer_way_leaves_no_garbage(server: Server) -> None:
    """A refused request is freed at once: a busy daemon has no time to look for circles."""
    server.service.refusal = FULL
    gc.collect()
    gc.disable()
    try:
        answer = await server.post(
            "/v1/completions", {"prompt": "Hi"}, Connection="close", **{"x-request-id": "no-garbage"}
        )
        assert (answer.status, "openai-processing-ms" in answer.headers) == (503, True)
        async with asyncio.timeout(60):  # until the server has closed the connection
            while any(isinstance(one, RequestContext) and one.id == "no-garbage" for one in gc.get_objects()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        gc.enable()


async def test_pipelined_refusals(server: Server) -> None:
    """Requests that are sent at once are refused in order, bodies read past."""
    server.service.refusal = FULL
    body = b'{"prompt": "Hi"}'
    one = (
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        % len(body)
    )
    data = b"".join(one + b"x-request-id: n%d\r\n\r\n" % number + body for number in range(5))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(data)
    for number in range(5):
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
            assert json.loads(await reader.readexactly(length))["error"]["code"] == "server_is_overloaded"
        assert b"x-request-id: n%d\r\n" % number in head
    writer.close()
