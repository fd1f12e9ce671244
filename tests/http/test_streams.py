"""Streams under bad luck: clients that leave, engines that die, silence, readers that stop reading."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import structlog

from colibrid.errors import EngineFaultError
from colibrid.http.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = [568] * 400
REQUEST = {"prompt": "Hi", "max_tokens": 400, "stream": True}


async def until(condition: Callable[[], bool]) -> None:
    """Waits until `condition` holds; the test's own time limit is the bound."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition is of the other side
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_client_that_leaves_frees_its_slot(make_server: Callable[..., Any], path: str, stream: bool) -> None:
    """When the client closes the connection, its generations are cancelled, and the log says 499."""
    server = await make_server(LONG)
    server.service.pause_s = 0.02
    body = REQUEST | {"stream": stream, "messages": [{"role": "user", "content": "Hi"}]}
    if path == "/v1/completions":
        body["prompt"] = ["Hi", "Ho"]
    with structlog.testing.capture_logs() as logs:
        request = asyncio.create_task(server.post(path, body))
        await until(lambda: server.service.live)
        generations = set(server.service.live)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await until(lambda: not server.service.live)
        await until(lambda: any(line["event"] == "request" for line in logs))
    assert all(generation.cancelled for generation in generations)
    assert [(line["path"], line["status"]) for line in logs if line["event"] == "request"] == [(path, 499)]


async def test_engine_death_is_an_error_event(make_server: Callable[..., Any]) -> None:
    """A fault in mid-stream arrives as an error event with the four keys; no [DONE]; the connection closes."""
    server = await make_server(LONG)
    server.service.failure = EngineFaultError("the engine died", code="engine_died")
    server.service.fail_after = 3
    answer = await server.post("/v1/completions", REQUEST)
    *chunks, last = answer.events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "TheTheThe"
    assert last == {
        "error": {"message": "the engine died", "type": "server_error", "param": None, "code": "engine_died"}
    }
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


async def test_one_failing_choice_ends_the_others(make_server: Callable[..., Any]) -> None:
    """When one of several choices fails, all are cancelled and the client hears of it."""
    server = await make_server(LONG)
    server.service.failure = EngineFaultError("the engine died")
    server.service.fail_after = 3
    answer = await server.post("/v1/completions", REQUEST | {"prompt": ["a", "b", "c"], "stream": False})
    assert answer.status == 500
    assert not [generation for generation in server.service.live if not generation.cancelled]


async def test_mistakes_of_ours_end_a_stream_without_details(make_server: Callable[..., Any]) -> None:
    """An unexpected exception in mid-stream is an error event that tells nothing of the inside."""
    server = await make_server(LONG)
    server.service.failure = ValueError("/secret/path")
    server.service.fail_after = 3
    answer = await server.post("/v1/completions", REQUEST)
    assert answer.events[-1]["error"]["code"] == "internal_error"
    assert b"secret" not in answer.raw


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_silence_is_broken_by_pings(make_server: Callable[..., Any], path: str) -> None:
    """While nothing arrives, comments keep the connection alive; clients do not see them as events."""
    server = await make_server([568], server={"sse_ping_s": 0.02})
    server.service.pause_s = 1.0
    answer = await server.post(path, REQUEST | {"messages": [{"role": "user", "content": "Hi"}]})
    assert answer.raw.count(b": ping\n\n") >= 2
    assert b'"The"' in answer.raw
    assert answer.events[-1] == "[DONE]"


async def test_reader_that_stops_is_cut_off(make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes nothing is cut off, its generation cancelled, and little is buffered for it."""
    monkeypatch.setattr("colibrid.http.connection.WRITE_TIMEOUT_S", 0.2)
    server = await make_server([568] * 100_000)
    server.service.batch = 500
    server.service.info = msgspec.structs.replace(server.service.info, max_seq_len=1 << 20)
    client = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    body = b'{"prompt": "Hi", "max_tokens": 100000, "stream": true, "logprobs": 20}'
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    await until(lambda: server.service.seen)
    generation = next(iter(server.service.live))
    await until(lambda: generation.ended)
    assert generation.cancelled
    client.close()


async def test_leaving_before_the_answer_begins_is_no_fault(make_server: Callable[..., Any]) -> None:
    """A client that has gone when its stream would begin is logged as 499, not as a mistake of ours."""
    server = await make_server(LONG)
    server.service.pause_s = 0.01
    body = b'{"prompt": "Hi", "max_tokens": 400, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with structlog.testing.capture_logs() as logs:
        for _ in range(20):
            client = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            client.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            client.close()
        await until(lambda: len([line for line in logs if line["event"] == "request"]) == 20)
    assert {(line["event"], line.get("status")) for line in logs} == {("request", 499)}
    assert not server.service.live


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_slow_readers_do_not_hold_their_slots(make_server: Callable[..., Any], path: str) -> None:
    """While a reader takes nothing its text is taken from the engine to the end; the daemon holds little, and all arrives."""
    server = await make_server([568] * 6_000)
    server.service.info = msgspec.structs.replace(server.service.info, max_seq_len=1 << 20)
    body = json.dumps(
        {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6_000, "stream": True}
    )
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    if path == "/v1/completions":
        body = body.replace('"messages"', '"metadata"')
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    await loop.sock_sendall(client, (head + body).encode())
    await until(lambda: server.service.generations)
    (generation,) = server.service.generations
    await until(lambda: generation.ended)
    assert generation.result is not None
    read = bytearray()
    async with asyncio.timeout(60):
        while b"[DONE]" not in read[-40:]:
            read += await loop.sock_recv(client, 65536)
    client.close()
    assert read.count(b"The") == 6_000
    assert read.count(b"data: ") < 2_000  # what waited went out in few events


async def test_many_slow_readers_are_cut_off_and_others_served(
    make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of log-probabilities at a crawl are cut off, with little held for each; a quick one beside them is served."""
    monkeypatch.setattr("colibrid.http.connection.WRITE_TIMEOUT_S", 3.0)  # all are there before one is cut off
    server = await make_server([568] * 20_000)
    server.service.info = msgspec.structs.replace(server.service.info, max_seq_len=1 << 20)
    body = b'{"prompt": "Hi", "max_tokens": 20000, "stream": true, "logprobs": 20}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    loop = asyncio.get_running_loop()
    clients = []
    with structlog.testing.capture_logs() as logs:
        for _ in range(20):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            await loop.sock_sendall(client, head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            clients.append(client)
        await until(lambda: len(server.service.generations) == 20)
        held = [transport_of(client).get_write_buffer_size() for client in clients]
        assert max(held) < 64 << 10
        assert (await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1})).status == 200
        await until(lambda: not server.service.live)
    assert [line["event"] for line in logs].count("slow_reader_cut") == 20
    assert all(generation.cancelled for generation in server.service.generations[:20])
    for client in clients:
        client.close()


def transport_of(client: socket.socket) -> Any:
    """The daemon's end of the connection."""
    handlers = [one for one in gc.get_objects() if isinstance(one, Connection) and one.transport is not None]
    (found,) = [one.transport for one in handlers if one.transport.get_extra_info("peername") == client.getsockname()]
    return found


async def test_crowds_of_streams_are_sent_in_fewer_events(make_server: Callable[..., Any]) -> None:
    """With few streams each token is taken as it comes; with many, at the pace of the setting; the text is the same."""
    server = await make_server(LONG[:20])
    server.service.pause_s = 0.02
    body = REQUEST | {"max_tokens": 20}
    await server.post("/v1/completions", body)
    assert server.service.generations[0].paces == []
    answers = await asyncio.gather(*(server.post("/v1/completions", body) for _ in range(12)))
    assert {"".join(event["choices"][0]["text"] for event in one.events[:-1]) for one in answers} == {"The" * 20}
    assert any(0.016 in one.paces for one in server.service.generations[1:])
    await server.post("/v1/completions", body | {"stream": False})
    assert server.service.last is server.service.generations[-1].request
    assert server.service.generations[-1].paces == [0.1]
    await server.post("/v1/completions", body | {"stream": False, "stop": ["x"]})
    assert server.service.generations[-1].paces == []


@pytest.mark.parametrize("queued", [0, 1])
async def test_slots_that_others_wait_for_are_freed_soon(
    make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, queued: int
) -> None:
    """A reader so far behind that its slot waits is cut soon while others wait for slots, else at its usual time."""
    monkeypatch.setattr("colibrid.http.answer.CROWDED_WRITE_S", 0.2)
    monkeypatch.setattr("colibrid.http.connection.WRITE_TIMEOUT_S", 1.5)
    server = await make_server([568] * 20_000)
    (engine,) = server.service.engines
    monkeypatch.setattr(type(server.service), "engines", (msgspec.structs.replace(engine, queued=queued),))
    server.service.info = msgspec.structs.replace(server.service.info, max_seq_len=1 << 20)
    body = b'{"prompt": "Hi", "max_tokens": 20000, "stream": true, "logprobs": 20}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as client, structlog.testing.capture_logs() as logs:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        client.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        await until(lambda: server.service.generations)
        await until(lambda: not server.service.live)
    cuts = [line["seconds"] for line in logs if line["event"] == "slow_reader_cut"]
    assert cuts == [1.5 if queued == 0 else 3.0]
