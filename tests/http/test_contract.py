"""colibrid.http.contract: the one line of each request, as it is written."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from colibrid.config.settings import LoggingSettings
from colibrid.errors import EngineFaultError
from colibrid.http.auth import KeyRing
from colibrid.http.credentials import read_keys
from colibrid.ops.logging import MAX_LINE_BYTES, configure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.http.conftest import Server

SECRET = "a-key-that-nobody-may-read"


class Log:
    """What was written since it was last looked at."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def lines(self) -> list[bytes]:
        try:
            return os.read(self._descriptor, 1 << 20).splitlines()
        except BlockingIOError:
            return []

    def request(self) -> dict[str, Any]:
        """The only line of a request."""
        (found,) = [one for one in map(json.loads, self.lines()) if one["event"] == "request"]
        return dict(found)


@pytest.fixture
def log() -> Iterator[Log]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    configure(LoggingSettings(format="json"), descriptor=write)
    yield Log(read)
    configure(LoggingSettings())
    os.close(read)
    os.close(write)


async def test_a_completion(make_server: Callable[..., Any], log: Log) -> None:
    """Says who asked for what and what became of it, and nothing of prompt, answer and key."""
    ring = KeyRing(read_keys(f"alice sha256:{hashlib.sha256(SECRET.encode()).hexdigest()}", "test"))
    server: Server = await make_server(ring=ring)
    server.service.cached_tokens = 1
    body = {"prompt": "Tell me of Norway", "max_tokens": 4, "n": 2, "unknown_field": 1}
    answer = await server.post("/v1/completions", body, **{"x-request-id": "mine", "Authorization": f"Bearer {SECRET}"})
    assert answer.status == 200
    (line,) = log.lines()
    for hidden in (SECRET, "Norway", answer.json["choices"][0]["text"].strip()):
        assert hidden.encode() not in line
    found = json.loads(line)
    usage = answer.json["usage"]
    assert found.pop("time")
    assert found.pop("ms") > 0
    assert found == {
        "level": "info",
        "event": "request",
        "request_id": "mine",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "model": "hummingbird-13m",
        "choices": 2,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": 8,
        "cached_tokens": 1,
        "client": "127.0.0.1",
        "finish_reasons": {"length": 2},
        "queue_ms": 1.0,
        "ttft_ms": 3.0,
        "experts": {"per_token": 2, "assignments": 96, "trimmed": 0, "dropped": 0},
        "ignored": ["unknown_field"],
        "key": "alice",
    }


async def test_an_answer_that_fails_on_its_way(server: Server, log: Log) -> None:
    """Has the error's code, and the tokens until then."""
    server.service.failure, server.service.fail_after = EngineFaultError("x"), 2
    await server.post("/v1/completions", {"prompt": "Hi", "stream": True})
    lines = [json.loads(line) for line in log.lines()]
    (found,) = [line for line in lines if line["event"] == "request"]
    assert (found["status"], found["error"]) == (200, "server_error")
    assert found["completion_tokens"] >= 1
    assert server.state.served.refusals["failed"] == 1


async def test_whatever_clients_send_is_one_whole_line(server: Server, log: Log) -> None:
    """Long paths, control characters, separators and many unknown fields stay on one line, with its id."""
    odd = "%0A%7B%22event%22%3A%22forged%22%7D%1B%5B31m%E2%80%A8" + "x" * 3000
    await server.get("/" + odd, **{"x-request-id": "odd-1"})
    (line,) = log.lines()
    assert len(line) < MAX_LINE_BYTES
    found = json.loads(line)
    assert (found["request_id"], found["status"], found["event"]) == ("odd-1", 404, "request")
    assert "\u2028" not in line.decode()
    body = {"prompt": "Hi", "max_tokens": 1} | {f"{'é' * 300}{number}\n": 1 for number in range(50)}
    await server.post("/v1/completions", body, **{"x-request-id": "odd-2"})
    found = log.request()
    assert (found["request_id"], found["status"], len(found["ignored"])) == ("odd-2", 200, 20)


async def test_scrapes_are_quiet(server: Server, log: Log) -> None:
    """What is asked every few seconds leaves no line."""
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        assert (await server.get(path)).status == 200
    assert log.lines() == []
