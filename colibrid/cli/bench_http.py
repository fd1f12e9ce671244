"""A closed loop of clients against a server that speaks the OpenAI API, and what they saw.

Each client sends its next request as soon as it has the answer to the one before. Prompts are lists of random token
ids, so that no cache of prompts helps and the length is exact.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop

from colibrid.cli.bench_stats import Spread, spread
from colibrid.cli.bench_wire import Connection, EventParser, ResponseParser, StaleError, WireError, request_bytes
from colibrid.errors import ConfigError, EngineError

_REFUSALS = frozenset({429, 503})
_LONGEST_WAIT_S = 30.0  # after a refusal, whatever it asks for
_SHOWN_PROBLEMS = 5
_FIRST_ANSWER_BYTES = 1 << 20  # of /v1/models


class HttpLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent. Exactly one of `requests` and `seconds` ends it."""

    url: str
    clients: int
    requests: int | None
    seconds: float | None
    warmup: int
    prompt_tokens: int
    max_tokens: int
    vocab_size: int
    seed: int = 0
    stream: bool = True
    ignore_eos: bool = True
    model: str | None = None
    fields: dict[str, Any] = msgspec.field(default_factory=dict)
    api_key: str | None = None
    timeout: float = 120.0


class HttpReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen. Times only of requests that were answered whole."""

    load: HttpLoad  # without the key
    model: str
    elapsed_s: float  # from the first request to the last answer
    ok: int
    refused: int  # 503 or 429 with Retry-After; sent again as a new request
    failed: int
    problems: list[str]  # the first different ones
    requests_per_s: float
    output_tokens_per_s: float
    tokens_per_request: float
    request_ms: Spread | None  # None: nothing was answered, or the number is of streams only
    first_token_ms: Spread | None
    between_tokens_ms: Spread | None  # of each request: (last - first event) / (tokens - 1)
    between_events_ms: Spread | None  # of all events; one may hold several tokens


@dataclass(slots=True)
class _Tally:
    """Seconds and counts of one run."""

    requests: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    between_events: list[float] = field(default_factory=list)
    tokens: int = 0
    refused: int = 0
    failed: int = 0
    problems: dict[str, None] = field(default_factory=dict)

    def fail(self, problem: str) -> None:
        self.failed += 1
        if len(self.problems) < _SHOWN_PROBLEMS:
            self.problems[problem] = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int


class _Answer(msgspec.Struct, frozen=True):
    """What is read of an answer or of an event of a stream."""

    choices: list[dict[str, Any]] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


_ANSWER = msgspec.json.Decoder(_Answer)


class _Reader:
    """Collects one answer: a stream's events with their times, or a whole body."""

    def __init__(self, *, stream: bool) -> None:
        self.times: list[float] = []  # of events with text
        self.tokens: int | None = None
        self.problem: str | None = None
        self._events = EventParser() if stream else None
        self._body = bytearray()

    def __call__(self, data: bytes, now: float) -> None:
        self._body += data
        if self._events is None:
            return
        for event in self._events.feed(data):
            if event != b"[DONE]" and self._read(event):
                self.times.append(now)

    def finish(self, response: ResponseParser) -> None:
        """Reads what is left. Sets `problem` if this is not a whole answer."""
        if response.status != 200:
            self.problem = f"{response.status}: {self._body[:200].decode('utf-8', 'replace').strip()}"
        elif self._events is None:
            self._read(bytes(self._body))
        if self.problem is None and self.tokens is None:
            self.problem = "the answer does not say usage.completion_tokens"

    def _read(self, data: bytes) -> bool:
        """Whether `data` brought something of the text."""
        try:
            answer = _ANSWER.decode(data)
        except msgspec.MsgspecError as error:
            self.problem = f"not an answer of this API ({error}): {data[:100].decode('utf-8', 'replace')}"
            return False
        if answer.error is not None:
            self.problem = f"error in the answer: {str(answer.error)[:200]}"
        if answer.usage is not None:
            self.tokens = answer.usage.completion_tokens
        # The last event of a text may bring no more than its finish_reason.
        return any(choice.get("text") or choice.get("token_ids") for choice in answer.choices)


class _Generator:
    """The clients of one run: `limit` requests, or as many as start before `until`."""

    def __init__(self, load: HttpLoad, model: str, tally: _Tally, seed: int) -> None:
        self._load = load
        self._model = model
        self._tally = tally
        self._random = random.Random(seed)  # noqa: S311 (repeatable prompts, not secrets)
        self._left: float = 0
        self._until = float("inf")
        self.ended = 0.0

    async def run(self, limit: float, seconds: float) -> float:
        """Seconds from the first request to the last answer."""
        began = self.ended = time.perf_counter()
        self._left, self._until = limit, began + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(self._load.clients):
                group.create_task(self._client())
        return self.ended - began

    async def _client(self) -> None:
        connection: Connection | None = None
        try:
            while self._left > 0 and time.perf_counter() < self._until:
                self._left -= 1
                connection = await self._one(connection)
        finally:
            if connection is not None:
                connection.close()

    async def _one(self, connection: Connection | None) -> Connection | None:
        """One request. Returns the connection if it can be used again."""
        request, reader = self._request(), _Reader(stream=self._load.stream)
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._load.timeout):
                connection, response = await _exchange(self._load, connection, request, reader)
        except TimeoutError:
            self._tally.fail(f"no answer within {self._load.timeout:g} s")
            return None
        except (OSError, WireError) as error:
            self._tally.fail(str(error))
            return None
        wait = _refusal(response)
        if wait is not None:
            self._tally.refused += 1
            self._left += 1
            await asyncio.sleep(max(0.0, min(wait, self._until - time.perf_counter())))
            return connection
        now = time.perf_counter()
        reader.finish(response)
        self.ended = max(self.ended, now)
        self._add(reader, began, now)
        return connection

    def _add(self, reader: _Reader, began: float, now: float) -> None:
        tally = self._tally
        if reader.problem is not None or reader.tokens is None:
            tally.fail(reader.problem or "")
            return
        tally.requests.append(now - began)
        tally.tokens += reader.tokens
        if reader.times:
            times = reader.times
            tally.first.append(times[0] - began)
            tally.between_events += [later - earlier for earlier, later in pairwise(times)]
            if reader.tokens > 1:
                tally.between_tokens.append((times[-1] - times[0]) / (reader.tokens - 1))

    def _request(self) -> bytes:
        load = self._load
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": [self._random.randrange(load.vocab_size) for _ in range(load.prompt_tokens)],
            "max_tokens": load.max_tokens,
            "temperature": 0,
        }
        if load.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if load.ignore_eos:
            body["ignore_eos"] = True
        return _encode(load, "POST", "/v1/completions", msgspec.json.encode(body | load.fields))


def measure_http(load: HttpLoad) -> HttpReport:
    """Warm up, run the load, report. EngineError: the server does not answer at all. ConfigError: the URL."""
    _address(load)
    return uvloop.run(_measure(load))


async def _measure(load: HttpLoad) -> HttpReport:
    model = load.model or await _first_model(load)
    if load.warmup:
        warm = _Tally()
        await _Generator(load, model, warm, load.seed + 1).run(load.warmup, float("inf"))
        if not warm.requests:
            raise EngineError(f"{load.url}: no request of the warm-up was answered: {'; '.join(warm.problems)}")
    tally = _Tally()
    generator = _Generator(load, model, tally, load.seed)
    elapsed = await generator.run(
        float("inf") if load.requests is None else load.requests, load.seconds or float("inf")
    )
    return _report(load, model, tally, elapsed)


def _report(load: HttpLoad, model: str, tally: _Tally, elapsed: float) -> HttpReport:
    ok = len(tally.requests)
    return HttpReport(
        load=msgspec.structs.replace(load, api_key=None),
        model=model,
        elapsed_s=elapsed,
        ok=ok,
        refused=tally.refused,
        failed=tally.failed,
        problems=list(tally.problems),
        requests_per_s=ok / elapsed if elapsed else 0.0,
        output_tokens_per_s=tally.tokens / elapsed if elapsed else 0.0,
        tokens_per_request=tally.tokens / ok if ok else 0.0,
        request_ms=_ms(tally.requests),
        first_token_ms=_ms(tally.first),
        between_tokens_ms=_ms(tally.between_tokens),
        between_events_ms=_ms(tally.between_events),
    )


def _ms(seconds: list[float]) -> Spread | None:
    return spread([value * 1e3 for value in seconds])


async def _exchange(
    load: HttpLoad, connection: Connection | None, request: bytes, reader: _Reader
) -> tuple[Connection, ResponseParser]:
    """Sends a request, on a new connection if the old one is gone. OSError, WireError."""
    if connection is not None and connection.usable:
        try:
            return connection, await connection.ask(request, reader)
        except StaleError:
            pass
    connection = await Connection.open(*_address(load))
    return connection, await connection.ask(request, reader)


def _refusal(response: ResponseParser) -> float | None:
    """Seconds to wait if the server asks to come back later; None: something else."""
    if response.status not in _REFUSALS:
        return None
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        text = response.headers.get(name, "")
        if text.isdigit():
            return min(int(text) * unit, _LONGEST_WAIT_S)
    return None


async def _first_model(load: HttpLoad) -> str:
    reader = bytearray()

    def collect(data: bytes, _now: float) -> None:
        reader.extend(data[:_FIRST_ANSWER_BYTES])

    try:
        async with asyncio.timeout(load.timeout):
            connection = await Connection.open(*_address(load))
            try:
                response = await connection.ask(_encode(load, "GET", "/v1/models", b""), collect)
            finally:
                connection.close()
        if response.status != 200:
            raise EngineError(f"{load.url}/v1/models answers {response.status}; name the model with --model")
        return msgspec.json.decode(bytes(reader), type=_Models).data[0].id
    except TimeoutError:
        raise EngineError(f"{load.url} does not answer within {load.timeout:g} s") from None
    except (OSError, WireError) as error:
        raise EngineError(f"{load.url}: {error}; is a server running there?") from None
    except (msgspec.MsgspecError, IndexError):
        raise EngineError(f"{load.url}/v1/models lists no model; name it with --model") from None


def _encode(load: HttpLoad, method: str, path: str, body: bytes) -> bytes:
    host, port = _address(load)
    headers = {"Content-Type": "application/json"}
    if load.api_key is not None:
        headers["Authorization"] = f"Bearer {load.api_key}"
    shown = f"[{host}]" if ":" in host else host
    return request_bytes(method, urlsplit(load.url).path.rstrip("/") + path, f"{shown}:{port}", body, headers)


def _address(load: HttpLoad) -> tuple[str, int]:
    try:
        parts = urlsplit(load.url)
        if parts.scheme == "http" and parts.hostname and not parts.query:
            return parts.hostname, parts.port or 80
    except ValueError:
        pass
    raise ConfigError(f"--url {load.url!r}: write it like http://127.0.0.1:8080")
