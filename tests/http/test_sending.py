"""Whole answers to clients that take their time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

BODY = json.dumps({"prompt": "Hi", "max_tokens": 1000, "logprobs": 20}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


async def test_large_answers_are_whole(make_server: Callable[..., Any]) -> None:
    """An answer of many slices has its length, its headers, and is valid JSON; the connection serves on."""
    server = await make_server([568] * 2000)
    server.service.batch = 100
    for _ in range(2):
        answer = await server.post("/v1/completions", json.loads(BODY))
        assert int(answer.headers["Content-Length"]) == len(answer.raw) > 256 << 10
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.headers["x-request-id"].startswith("req-")
        assert answer.headers["Server-Timing"].startswith("queue;dur=")
        assert len(answer.json["choices"][0]["logprobs"]["tokens"]) == 1000


async def test_reader_of_a_whole_answer_that_stops_is_cut_off(
    make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that takes nothing of a large answer is cut off, and others are served."""
    monkeypatch.setattr("colibrid.http.connection.WRITE_TIMEOUT_S", 0.2)
    server = await make_server([568] * 20_000)
    server.service.batch = 1000
    request = json.dumps({"prompt": [[5]] * 8, "max_tokens": 2000, "logprobs": 20}).encode()
    with (
        structlog.testing.capture_logs() as logs,
        contextlib.closing(socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))) as client,
    ):
        client.sendall(HEAD % len(request) + request)
        async with asyncio.timeout(60):
            while not any(line["event"] == "request" for line in logs):  # noqa: ASYNC110 - the condition is of the other side
                await asyncio.sleep(0.01)
        assert [(line["event"], line.get("status")) for line in logs] == [("slow_reader_cut", None), ("request", 499)]
        assert (await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1})).status == 200


async def test_answers_are_put_together_whatever_they_hold(make_server: Callable[..., Any]) -> None:
    """Names and texts that look like the place of the choices stay what they are; two choices stand in order."""
    tricky = '"choices":[]'
    server = await make_server(tricky)
    server.service.info = msgspec.structs.replace(server.service.info, model_id=tricky)
    body = (await server.post("/v1/completions", {"prompt": [tricky, "Hi"], "echo": True, "max_tokens": 50})).json
    assert body["model"] == tricky
    assert [choice["text"] for choice in body["choices"]] == [tricky * 2, "Hi" + tricky]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert (await server.post("/generate", {"prompt": "Hi", "max_new_tokens": 50})).json["text"] == tricky
