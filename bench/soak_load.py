"""The load of bench/soak.py: mixed requests over many connections, each answer judged and compared with earlier ones."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import random
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop

from colibrid.cli.bench_wire import Connection, EventParser, WireError, request_bytes

BODIES = 400  # different ones
VOCABULARY = 4000
CUT_SHARE = 0.1  # of streams
TIMEOUT_S = 120.0
REFUSED: tuple[dict[str, Any], ...] = ({"temperature": 9}, {"max_tokens": 100_000}, {"n": 10_000}, {"stop": [""]})
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
    exact: dict[str, str] = field(default_factory=dict)  # body and form of its answer -> digest of all that is in it


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """Path and body of kind `number`, always the same, without `stream`."""
    draw = random.Random(number)  # noqa: S311 (repeatable requests, not secrets)
    body: dict[str, Any] = {"max_tokens": draw.randint(1, 24), "temperature": draw.choice([0, 0, 0.7, 1.3])}
    if body["temperature"]:
        body["seed"] = draw.randrange(1 << 30)
        body |= draw.choice([{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.02}, {"presence_penalty": 0.5}])
    body |= draw.choice([{}, {}, {"ignore_eos": True}, {"stop": [" the"]}, {"logit_bias": {"17": -50}}])
    words = " ".join(draw.choices(WORDS, k=draw.choice([3, 9, 40, 120])))
    kind = draw.randrange(8)
    if kind == 7:
        return "/v1/embeddings", {"input": words, "encoding_format": draw.choice(["float", "base64"])}
    if kind == 6:
        return "/v1/completions", {"prompt": words, **draw.choice(REFUSED)}
    if kind < 3:
        body |= {"messages": [{"role": "user", "content": words}]}
        body |= draw.choice([{}, {"logprobs": True, "top_logprobs": 3}, {"n": 2, "max_tokens": 6}])
        return "/v1/chat/completions", body
    body |= draw.choice([{}, {}, {"logprobs": 2}])
    ids = [draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 17, 64, 65, 300]))]
    return "/v1/completions", body | {"prompt": words if kind == 3 else ids}


class Reader:
    """Collects all that is in one answer; `cut` may end the connection after so many events."""

    def __init__(self, *, stream: bool, cut: int | None, connection: Connection) -> None:
        self._texts: dict[int, str] = {}  # by choice
        self.reasons: dict[int, str] = {}  # by choice
        self.tokens: int | None = None
        self.problem: str | None = None
        self.was_cut = False
        self.choices = 1
        self._vectors: list[object] = []
        self._parts: dict[str, list[object]] = {}  # lists by choice and name: the same however they were cut up
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

    def finish(self, status: int, expected: int = 200) -> None:
        """Judge the whole answer."""
        if self._events is None or status != 200:
            self._read(bytes(self._body))
        if status != expected:
            self.problem = f"{status}: {bytes(self._body[:200])!r}"
        elif status != 200:
            self.problem = None
        elif self._vectors:
            return
        elif len(self.reasons) != self.choices or set(self.reasons.values()) - {"stop", "length"}:
            self.problem = f"finish_reason is {self.reasons} of {self.choices} choices"

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self._texts.get(0, "")

    def digest(self) -> str:
        """Changes with any bit of text, log-probabilities, vectors or ends."""
        lists = sorted(self._parts.items())
        whole = (sorted(self._texts.items()), self._vectors, sorted(self.reasons.items()), lists)
        return hashlib.sha256(msgspec.json.encode(whole)).hexdigest()

    def _read(self, data: bytes) -> None:
        answer = msgspec.json.decode(data)
        if answer.get("error"):
            self.problem = str(answer["error"])[:200]
        self._vectors += [entry["embedding"] for entry in answer.get("data", ())]
        for choice in answer.get("choices", ()):
            index = choice.get("index", 0)
            part = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content")
            self._texts[index] = self._texts.get(index, "") + (part or "")
            if choice.get("finish_reason"):
                self.reasons[index] = choice["finish_reason"]
            for name, values in (choice.get("logprobs") or {}).items():
                if name != "text_offset" and values is not None:
                    self._parts.setdefault(f"{index} {name}", []).extend(values)
        if answer.get("usage"):
            self.tokens = answer["usage"].get("completion_tokens", 0)


def touch(url: str, kv_tokens: int, length: int = 1900) -> None:
    """Prompts that are kept until every page of the KV memory was used: a page is the system's until then."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    for number in range(2 * kv_tokens // length):
        body = {"prompt": [100 + number, *range(200, 199 + length)], "max_tokens": 1}
        connection.request("POST", "/v1/completions", msgspec.json.encode(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise WireError(f"a long prompt is {response.status}: {response.read()!r}")
        response.read()
    connection.close()


async def one(address: tuple[str, int], connection: Connection | None, number: int, seen: Seen) -> Connection | None:
    """Request `number`. Returns the connection if it can be used again."""
    draw = random.Random(-1 - number)  # noqa: S311 (as above)
    path, body = body_of(number % BODIES)
    refused = any(body.items() >= wrong.items() for wrong in REFUSED)
    stream = draw.random() < 0.5 and path != "/v1/embeddings" and not refused
    cut = draw.randint(1, 6) if stream and draw.random() < CUT_SHARE else None
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if connection is None or not connection.usable:
        connection = await Connection.open(*address)
    reader = Reader(stream=stream, cut=cut, connection=connection)
    reader.choices = body.get("n", 1)
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
    reader.finish(response.status, 400 if refused else 200)
    if reader.problem is None:
        key = f"{number % BODIES} {'streamed' if stream else 'whole'}"
        if seen.exact.setdefault(key, reader.digest()) != reader.digest():
            reader.problem = f"another answer than before: {reader.text!r}"
        if "max_tokens" in body and not refused and not 0 < (reader.tokens or 0) <= body["max_tokens"] * reader.choices:
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
        for body, digest in part.exact.items():
            if whole.exact.setdefault(body, digest) != digest:
                whole.problems.append(f"body {body} has two answers")
    return whole
