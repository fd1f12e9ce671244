"""Thousands of mixed requests over HTTP against the bundled model, and what must not change meanwhile.

    python bench/soak.py --device cuda                     20,000 requests, 48 connections, on GPU 0
    python bench/soak.py --device cpu --requests 500       the same on the CPU

Starts a daemon of its own. Requests are completions and chats, of text and of token ids, streamed and not, of many
lengths, greedy and sampled with seeds, some with log-probabilities, stop strings or penalties; a tenth of the streams is
cut off by the client. Each of 400 different bodies is sent many times, in ever other company: its text must always be
the same. Exits 1 unless: every answer is whole and as it was before, the engine made no allocation after ready, the
device's free memory is what it was when the daemon was ready, and the daemon ends with 0 and without an error logged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop
from served import Served, ServedError

from colibrid.cli.bench_stats import spread
from colibrid.cli.bench_wire import Connection, EventParser, WireError, request_bytes

BODIES = 400  # different ones
VOCABULARY = 4000
CUT_SHARE = 0.1  # of streams
TIMEOUT_S = 60.0
SHOWN = 5
WORDS = [
    "What",
    "is",
    "the",
    "capital",
    "of",
    "Norway",
    "Sweden",
    "France",
    "plus",
    "minus",
    "gold",
    "iron",
    "7",
    "12",
    "and",
]


@dataclass(slots=True)
class Seen:
    """What one process saw."""

    sent: int = 0
    answered: int = 0
    cut: int = 0
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)  # body -> text


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """Path and body of kind `number`, always the same, without `stream`."""
    draw = random.Random(number)  # noqa: S311 (repeatable requests, not secrets)
    body: dict[str, Any] = {"max_tokens": draw.randint(1, 24), "temperature": draw.choice([0, 0, 0.7, 1.3])}
    if body["temperature"]:
        body["seed"] = draw.randrange(1 << 30)
        body |= draw.choice([{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.02}, {"presence_penalty": 0.5}])
    body |= draw.choice([{}, {}, {"ignore_eos": True}, {"stop": [" the"]}, {"logit_bias": {"17": -50}}])
    words = " ".join(draw.choices(WORDS, k=draw.choice([3, 9, 40, 120])))
    kind = draw.randrange(3)
    if kind == 0:
        body |= {"messages": [{"role": "user", "content": words}]}
        body |= draw.choice([{}, {"logprobs": True, "top_logprobs": 3}])
        return "/v1/chat/completions", body
    body |= draw.choice([{}, {}, {"logprobs": 2}])
    ids = [draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 17, 64, 65, 300]))]
    return "/v1/completions", body | {"prompt": words if kind == 1 else ids}


class Reader:
    """Collects the text of one answer; `cut` may end the connection after so many events."""

    def __init__(self, *, stream: bool, cut: int | None, connection: Connection) -> None:
        self.text = ""
        self.reason: str | None = None
        self.tokens: int | None = None
        self.problem: str | None = None
        self.was_cut = False
        self._cut = cut
        self._connection = connection
        self._events = EventParser() if stream else None
        self._body = bytearray()

    def __call__(self, data: bytes, _now: float) -> None:
        if self._events is None:
            self._body += data
            return
        for event in self._events.feed(data):
            if event != b"[DONE]":
                self._read(event)
            if self._cut is not None:
                self._cut -= 1
                if self._cut <= 0:
                    self.was_cut = True
                    self._connection.close()
                    return

    def finish(self, status: int) -> None:
        if self._events is None:
            self._read(bytes(self._body))
        if status != 200:
            self.problem = f"{status}: {bytes(self._body[:200])!r}"
        elif self.reason not in ("stop", "length"):
            self.problem = f"finish_reason is {self.reason}"

    def _read(self, data: bytes) -> None:
        answer = msgspec.json.decode(data)
        if answer.get("error"):
            self.problem = str(answer["error"])[:200]
        for choice in answer.get("choices", ()):
            part = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content")
            self.text += part or ""
            self.reason = choice.get("finish_reason") or self.reason
        if answer.get("usage"):
            self.tokens = answer["usage"]["completion_tokens"]


async def one(address: tuple[str, int], connection: Connection | None, number: int, seen: Seen) -> Connection | None:
    """Request `number`. Returns the connection if it can be used again."""
    draw = random.Random(-1 - number)  # noqa: S311 (as above)
    path, body = body_of(number % BODIES)
    stream = draw.random() < 0.5
    cut = draw.randint(1, 6) if stream and draw.random() < CUT_SHARE else None
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if connection is None or not connection.usable:
        connection = await Connection.open(*address)
    reader = Reader(stream=stream, cut=cut, connection=connection)
    head = {"Content-Type": "application/json"}
    request = request_bytes("POST", path, f"{address[0]}:{address[1]}", msgspec.json.encode(body), head)
    began = time.perf_counter()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            response = await connection.ask(request, reader)
    except WireError as error:
        if cut is None:
            seen.problems.append(f"request {number}: {error}")
        seen.cut += cut is not None
        return None
    except TimeoutError:
        seen.problems.append(f"request {number}: no answer within {TIMEOUT_S:g} s")
        return None
    if reader.was_cut:  # with the last bytes of the answer
        seen.cut += 1
        return None
    reader.finish(response.status)
    if reader.problem is None:
        expected = seen.texts.setdefault(number % BODIES, reader.text)
        if reader.text != expected:
            reader.problem = f"another text than before: {reader.text!r}, {expected!r}"
        if reader.tokens is None or not 0 < reader.tokens <= body["max_tokens"]:
            reader.problem = f"usage.completion_tokens is {reader.tokens}, max_tokens {body['max_tokens']}"
    if reader.problem is not None:
        seen.problems.append(f"request {number} ({path}): {reader.problem}")
    seen.answered += 1
    seen.tokens += reader.tokens or 0
    seen.seconds.append(time.perf_counter() - began)
    return connection if connection.usable else None


async def load(url: str, connections: int, numbers: range, seconds: float) -> Seen:
    """All requests of one process, or those that begin within `seconds`."""
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    waiting = iter(numbers)
    seen = Seen()
    end = time.perf_counter() + seconds

    async def client() -> None:
        connection: Connection | None = None
        for number in waiting:
            if time.perf_counter() > end:
                break
            seen.sent += 1
            connection = await one(address, connection, number, seen)
        if connection is not None:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(client())
    return seen


def work(arguments: tuple[str, int, range, float]) -> Seen:
    return uvloop.run(load(*arguments))


def merge(parts: list[Seen]) -> Seen:
    """One Seen of all processes; the same body must have had one text in all of them."""
    whole = Seen()
    for part in parts:
        whole.sent += part.sent
        whole.answered += part.answered
        whole.cut += part.cut
        whole.tokens += part.tokens
        whole.seconds += part.seconds
        whole.problems += part.problems
        for body, text in part.texts.items():
            if whole.texts.setdefault(body, text) != text:
                whole.problems.append(f"body {body} has two texts")
    return whole


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Serve, load, stop; what was seen."""
    served = Served(["--max-batch-size", "32", *options.serve], device=options.device)
    shares = [range(i, options.requests, options.processes) for i in range(options.processes)]
    with served as daemon, multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        work_each = max(1, options.connections // options.processes)
        resident, busy = daemon.resident_kib(), daemon.cpu_seconds()
        began = time.perf_counter()
        seen = merge(pool.map(work, [(daemon.url, work_each, share, options.seconds) for share in shares], chunksize=1))
        elapsed = time.perf_counter() - began
        drift = daemon.device_drift()
        grown, busy = daemon.resident_kib() - resident, daemon.cpu_seconds() - busy
    problems = list(seen.problems)
    if drift:
        problems.append(f"the device has {drift} bytes less than when the daemon was ready")
    if daemon.totals["allocations_after_open"]:
        problems.append(f"{daemon.totals['allocations_after_open']} allocations after ready")
    if seen.answered + seen.cut != seen.sent:
        problems.append(f"{seen.answered} answered and {seen.cut} cut of {seen.sent}")
    latency = spread([seconds * 1e3 for seconds in seen.seconds])
    return {
        "device": options.device,
        "asked": options.requests,
        "requests": seen.sent,
        "connections": options.connections,
        "answered": seen.answered,
        "cut_off": seen.cut,
        "seconds": elapsed,
        "requests_per_s": seen.sent / elapsed,
        "tokens": seen.tokens,
        "latency_ms": None if latency is None else msgspec.to_builtins(latency),
        "device_drift_bytes": drift,
        "resident_growth_kib": grown,
        "daemon_cpu_s": busy,
        "engine_totals": daemon.totals,
        "errors": len(problems),
        "problems": problems[:SHOWN],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=48)
    parser.add_argument("--processes", type=int, default=2, help="that send; their connections are shared out")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no request begins later")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result as one object")
    parser.add_argument("serve", nargs="*", help="behind --: more arguments of colibrid serve")
    options = parser.parse_args(arguments)
    try:
        result = run(options)
    except ServedError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"soak {result['device']}: {result['answered']} answered and {result['cut_off']} cut off of {result['requests']} "
        f"in {result['seconds']:.1f} s ({result['requests_per_s']:.0f}/s), {result['errors']} errors; device memory "
        f"{-result['device_drift_bytes']:+d} B, {result['engine_totals']['allocations_after_open']} allocations after "
        f"ready, host memory {result['resident_growth_kib']:+d} KiB"
    )
    for problem in result["problems"]:
        print(f"  {problem}")
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
