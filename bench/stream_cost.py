"""Processor time of the daemon per streamed token, against a bare aiohttp server that sends the same events.

    python bench/stream_cost.py [--streams 32] [--tokens 1000] [--rounds 9] [--set KEY=VALUE] [--json FILE] [MODEL]

Starts a daemon on the CPU engine and, in a process of its own, the barest server that streams: an aiohttp handler on
uvloop that writes one event, made beforehand and as long as ours, whenever a timer that beats as often as the engine
steps says so. Both are asked for the same number of streams of the same number of tokens, in turns; the clients run in
this process and count for neither. What is compared is user and system time of the two server processes, by their own
clocks, which count nanoseconds; the engine, which is a process of its own, is left out.

Both servers get the same machine: one CPU, on which nothing else runs, and the same neighbour. A thread takes longer for
the same work while the other half of its core computes; so the engine, on another CPU beside the clients, computes the same
sequences during the bare server's turns, for answers that are not streamed. The result is the median of the rounds'
ratios. Exit code 1: a stream broke.
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
from served import Served, cpu_seconds

from colibrid.cli.bench_wire import Connection, EventParser, request_bytes

HEADERS = {"Content-Type": "application/json"}
START_S = 30.0
WARM_TOKENS = 200


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
        end = time.monotonic() + START_S
        while True:
            try:
                asyncio.run(run_streams(self.url, "/", [{"tokens": 1, "step_s": 0.001}]))
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
            else:
                return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        self.process.wait()


class Streamed:
    """What the clients of one turn have seen."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.events = 0
        self.bytes = 0  # of events


async def ask(url: str, path: str, body: dict[str, Any], seen: Streamed) -> None:
    """One request. RuntimeError if its answer is not whole."""
    place = urlsplit(url)
    parser, last = EventParser(), b""

    def sink(data: bytes, _now: float) -> None:
        nonlocal last
        for event in parser.feed(data):
            seen.events, seen.bytes, last = seen.events + 1, seen.bytes + len(event) + 8, event

    connection = await Connection.open(place.hostname or "", place.port or 0)
    request = request_bytes("POST", path, place.netloc, json.dumps(body).encode(), HEADERS)
    answer = await connection.ask(request, sink)
    connection.close()
    if answer.status != 200 or (body.get("stream", True) and last != b"[DONE]"):
        raise RuntimeError(f"a request to {url}{path} ended with status {answer.status} and {last[:200]!r}")


async def run_streams(url: str, path: str, bodies: list[dict[str, Any]]) -> Streamed:
    """All of them at once."""
    seen, began = Streamed(), time.perf_counter()
    await asyncio.gather(*(ask(url, path, body, seen) for body in bodies))
    seen.wall_s = time.perf_counter() - began
    return seen


class Contest:
    """Daemon and bare server, turn by turn."""

    def __init__(self, daemon: Served, streams: int) -> None:
        self._daemon = daemon
        self._streams = streams
        self._step_s = 0.0  # of the daemon's last turn

    def ours(self, tokens: int) -> tuple[float, Streamed]:
        """Processor seconds of the daemon for its streams."""
        before = self._daemon.cpu_seconds()
        seen = asyncio.run(run_streams(self._daemon.url, "/v1/completions", self._bodies(tokens, stream=True)))
        self._step_s = seen.wall_s / tokens
        return self._daemon.cpu_seconds() - before, seen

    def theirs(self, other: Bare, tokens: int) -> tuple[float, Streamed]:
        """The same of the bare server, while the engine computes as before."""
        before = other.cpu_seconds()
        seen, spent = asyncio.run(self._beside(other, tokens))
        return spent - before, seen

    async def _beside(self, other: Bare, tokens: int) -> tuple[Streamed, float]:
        quiet = self._bodies(tokens, stream=False)
        neighbour = asyncio.ensure_future(run_streams(self._daemon.url, "/v1/completions", quiet))
        seen = await run_streams(other.url, "/", [{"tokens": tokens, "step_s": self._step_s}] * self._streams)
        spent = other.cpu_seconds()
        await neighbour
        return seen, spent

    def _bodies(self, tokens: int, *, stream: bool) -> list[dict[str, Any]]:
        return [
            {"prompt": f"{number}", "max_tokens": tokens, "ignore_eos": True, "stream": stream, "seed": number}
            for number in range(self._streams)
        ]

    def round(self, other: Bare, tokens: int) -> dict[str, float]:
        """One turn of each."""
        ours, mine = self.ours(tokens)
        theirs, its = self.theirs(other, tokens)
        total = self._streams * tokens
        return {
            "ours_us": ours / total * 1e6,
            "bare_us": theirs / total * 1e6,
            "ratio": ours / theirs,
            "events_per_token": mine.events / total,
            "step_ms": mine.wall_s / tokens * 1e3,
            "bare_step_ms": its.wall_s / tokens * 1e3,
        }


def pin(pid: int, cpus: list[int]) -> None:
    """All threads that a process has."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cpus)


def measure(given: argparse.Namespace) -> list[dict[str, float]]:
    """All rounds."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise RuntimeError("one CPU is too few: the engine computes on one, the servers run on another")
    *others, servers = cpus
    sets = [f'engine.cpu_sets=["{others[0]}"]', "engine.threads=1", *given.set]
    arguments = ["--max-batch-size", str(given.streams), *([given.model] if given.model else [])]
    arguments += [part for one in sets for part in ("--set", one)]
    rounds: list[dict[str, float]] = []
    print(f"{'':8} daemon us/token  bare us/token  ratio  events/token  step ms")
    with Served(arguments) as daemon:
        pin(daemon.process.pid, [servers])
        contest = Contest(daemon, given.streams)
        _, seen = contest.ours(WARM_TOKENS)
        with Bare(seen.bytes // seen.events) as other:
            pin(other.process.pid, [servers])
            pin(os.getpid(), others)
            contest.round(other, WARM_TOKENS)
            for number in range(given.rounds):
                found = contest.round(other, given.tokens)
                rounds.append(found)
                print(
                    f"round {number + 1:<2} {found['ours_us']:15.1f}  {found['bare_us']:13.1f}  {found['ratio']:5.2f}"
                    f"  {found['events_per_token']:12.3f}  {found['step_ms']:7.2f}",
                    flush=True,
                )
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the daemon")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--bare", nargs=2, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        uvloop.run(bare(socket.socket(fileno=given.bare[0]), given.bare[1]))
        return 0
    try:
        rounds = measure(given)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    ratio = statistics.median(one["ratio"] for one in rounds)
    low, high = min(one["ratio"] for one in rounds), max(one["ratio"] for one in rounds)
    print(f"median ratio {ratio:.2f} ({low:.2f} to {high:.2f}): {given.streams} streams of {given.tokens} tokens")
    if given.json:
        given.json.write_text(json.dumps({"ratio": ratio, "streams": given.streams, "rounds": rounds}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
