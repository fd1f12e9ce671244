"""Processor time of the daemon per streamed token, against a bare aiohttp server that sends the same events.

    python bench/stream_cost.py [--streams 32] [--tokens 1000] [--rounds 5] [--json FILE] [MODEL]

Starts a daemon on the CPU engine and, in a process of its own, the barest server that streams: an aiohttp handler on
uvloop that writes one event, made beforehand and as long as ours, whenever a timer that beats as often as the engine
steps says so. Both are asked for the same number of streams of the same number of tokens, in turns; the clients run in this
process and count for neither. What is compared is user and system time of the two server processes; the engine, which is
a process of its own, is left out. The median of the rounds' ratios is the result. Exit code 1: a stream broke.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import uvloop
from aiohttp import web
from served import Served

from colibrid.cli.bench_wire import Connection, EventParser, request_bytes

HEADERS = {"Content-Type": "application/json"}
START_S = 30.0
TICK = os.sysconf("SC_CLK_TCK")


class Beat:
    """Wakes all who wait, every so many seconds, while somebody does."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_later(self._step_s, self._strike)
        await self._next

    def _strike(self) -> None:
        beat, self._next = self._next, None
        assert beat is not None, "somebody waits"
        beat.set_result(None)


async def bare(listening: socket.socket, event_bytes: int) -> None:
    """The bare server: POST / with the number of tokens and the length of a step, answered by so many events."""
    event = b'data: {"text":"' + b"x" * (event_bytes - 19) + b'"}\n\n'
    beats: dict[float, Beat] = {}

    async def stream(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        beat = beats.setdefault(asked["step_s"], Beat(asked["step_s"]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(asked["tokens"]):
            await beat.wait()
            await response.write(event)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/", stream)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    await asyncio.Event().wait()


class Bare:
    """The bare server as a process."""

    def __init__(self, event_bytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            os.set_inheritable(listening.fileno(), True)
            command = [sys.executable, __file__, "--bare", str(listening.fileno()), str(event_bytes)]
            self.process = subprocess.Popen(command, close_fds=False)
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        self.process.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


async def run_streams(url: str, path: str, bodies: list[dict[str, Any]]) -> tuple[float, int, int]:
    """Seconds, events and bytes of events of streams that run at once. RuntimeError for one that is not whole."""
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    events = size = 0

    async def one(body: dict[str, Any]) -> None:
        nonlocal events, size
        parser, last = EventParser(), b""

        def sink(data: bytes, _now: float) -> None:
            nonlocal events, size, last
            for event in parser.feed(data):
                events, size, last = events + 1, size + len(event) + 8, event

        connection = await Connection.open(place.hostname or "", place.port or 0)
        request = request_bytes("POST", path, place.netloc, json.dumps(body).encode(), HEADERS)
        answer = await connection.ask(request, sink)
        connection.close()
        if answer.status != 200 or last != b"[DONE]":
            raise RuntimeError(f"a stream of {url}{path} ended with status {answer.status} and {last[:200]!r}")

    began = time.perf_counter()
    await asyncio.gather(*map(one, bodies))
    return time.perf_counter() - began, events, size


def round_of(daemon: Served, other: Bare | None, streams: int, tokens: int) -> tuple[dict[str, float], Bare]:
    """One turn of each server."""
    bodies = [
        {"prompt": f"{number}", "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": number}
        for number in range(streams)
    ]
    before = daemon.cpu_seconds()
    wall, events, size = asyncio.run(run_streams(daemon.url, "/v1/completions", bodies))
    ours = daemon.cpu_seconds() - before
    step_s = wall / tokens
    if other is None:
        other = Bare(size // events)
        wait_for(other)
    before = other.cpu_seconds()
    asked = [{"tokens": tokens, "step_s": step_s}] * streams
    other_wall, _, _ = asyncio.run(run_streams(other.url, "/", asked))
    theirs = other.cpu_seconds() - before
    total = streams * tokens
    return {
        "ours_us": ours / total * 1e6,
        "bare_us": theirs / total * 1e6,
        "ratio": ours / theirs,
        "events_per_token": events / total,
        "wall_s": wall,
        "bare_wall_s": other_wall,
    }, other


def wait_for(server: Bare) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            asyncio.run(run_streams(server.url, "/", [{"tokens": 1, "step_s": 0.001}]))
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--bare", nargs=2, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        uvloop.run(bare(socket.socket(fileno=given.bare[0]), given.bare[1]))
        return 0
    arguments = ["--max-batch-size", str(given.streams), *([given.model] if given.model else [])]
    rounds: list[dict[str, float]] = []
    other: Bare | None = None
    print(f"{'':8} daemon us/token  bare us/token  ratio  events/token")
    try:
        with Served(arguments) as daemon:
            round_of(daemon, None, given.streams, 50)[1].__exit__()  # warm-up
            for number in range(given.rounds):
                found, other = round_of(daemon, other, given.streams, given.tokens)
                rounds.append(found)
                print(
                    f"round {number + 1}  {found['ours_us']:15.1f}  {found['bare_us']:13.1f}  {found['ratio']:5.2f}"
                    f"  {found['events_per_token']:12.3f}",
                    flush=True,
                )
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if other is not None:
            other.__exit__()
    ratio = statistics.median(one["ratio"] for one in rounds)
    print(f"median ratio {ratio:.2f}: {given.streams} streams of {given.tokens} tokens")
    if given.json:
        given.json.write_text(json.dumps({"ratio": ratio, "streams": given.streams, "rounds": rounds}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
