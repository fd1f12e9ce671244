"""Many thousands of mutated requests against a daemon: bytes, JSON values and HTTP heads that no client would send.

    python tests/mutation_trial.py --cases 50000 --seed 1      (starts a daemon of its own)

Each case takes a good request and changes it a few times: bits flipped, bytes cut, doubled or moved, JSON values put in
place of others, keys taken away or doubled, headers and lengths that lie. Exits 1 if an answer is a server error or not
in the contract of errors, if one does not come, if a canary asked in between answers differently, or if the daemon logs
an error or does not end with 0. A case is told by its number, and is the same whenever it is made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))  # where daemon_process has a part of it

from daemon_process import DaemonProcess

if TYPE_CHECKING:
    from collections.abc import Callable

COMPLETION = {
    "prompt": "Once upon a time",
    "max_tokens": 3,
    "temperature": 0.5,
    "seed": 5,
    "stop": ["x"],
    "logprobs": 1,
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "top_logprobs": 2, "logprobs": True}
TOOLS = {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
SEEDS: tuple[tuple[str, Any], ...] = (
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}, "n": 2}),
    ("/v1/completions", {"prompt": [[1, 2, 3], [4]], "max_tokens": 2, "logit_bias": {"5": -1.5}, "echo": True}),
    ("/v1/completions", {**COMPLETION, "structured_outputs": {"choice": ["a", "b"]}, "experts": {"per_token": 1}}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True, "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {**TOOLS, "tool_choice": "auto", "timeout_s": 5.0, "priority": 1}),
    ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 8, "encoding_format": "base64"}),
    ("/tokenize", {"prompt": "a b c"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/generate", {"prompt": "a", "max_tokens": 2}),
)
STRANGE = (None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 1e308, -0.0, 0.1, "", "\x00", "\ud800", "日本", "a" * 999,
           [], {}, [[]], [None], {"": None}, [1] * 300, {"a": {"a": {"a": []}}}, "NaN", "1", "null")  # fmt: skip
RAW = (
    b"NaN",
    b"Infinity",
    b"1e999",
    b"0x1",
    b"01",
    b"1.",
    b"'a'",
    b"tru",
    b"\xff",
    b"\xef\xbb\xbf",
    b"/*",
    b",",
    b"}",
    b"]",
    b'"',
)
HEADERS = (
    b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 1, 2",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Content-Encoding: gzip", b"Expect: 100-continue",
    b"Content-Type: text/plain", b"Content-Type: application/json; charset=utf-16", b"Host: evil.example", b"Host:",
    b"Origin: https://evil.example", b"Authorization: Bearer x", b"X-Request-Id: \x00\r\n", b"Upgrade: websocket",
    b"Connection: close", b"Connection: upgrade", b"A" * 9000 + b": b", b"No colon", b": empty", b" folded: yes",
    b"X-Forwarded-For: 1.2.3.4", b"Range: bytes=0-1", b"Accept: text/html", b"Cookie: " + b"a=b; " * 500,
)  # fmt: skip
METHODS = (b"GET", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"post", b"POST POST", b"", b"PRI")
PATHS = (b"/", b"/v1/models", b"/v1/models/x", b"/health", b"/metrics", b"/admin", b"/v1/../admin", b"//", b"/%00", b"*",
         b"/v1/completions?x=y", b"/docs", b"/openapi.json", b"http://a/b", b"/" + b"a" * 9000, b"/\xff")  # fmt: skip
PATIENCE_S = 60.0
LIAR_PATIENCE_S = 0.3
CANARY_EVERY = 500
SERVER_ERROR, UNAVAILABLE, TIMEOUT = 500, 503, 504
ERROR_KEYS = {"message", "type", "param", "code"}


class Case(NamedTuple):
    """What is sent."""

    data: bytes
    framed: bool  # the head tells the truth about the body, so that an answer must come


def make_case(number: int, seed: int) -> Case:
    """Always the same for a number and a seed."""
    draw = random.Random(f"{seed} {number}")
    path, value = draw.choice(SEEDS)
    body = _encode(value)
    values, raw = draw.random() < 0.6, draw.random() < 0.4
    if values or not raw:
        changed = json.loads(body)
        for _ in range(draw.randint(1, 3)):
            changed = _change_value(changed, draw)
        body = _encode(changed)
    if raw:
        for _ in range(draw.randint(1, 4)):
            body = _change_bytes(body, draw)
    if draw.random() < 0.8:
        return Case(_request(b"POST", path.encode(), body), framed=True)
    return Case(_change_head(path.encode(), body, draw), framed=False)


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _request(method: bytes, path: bytes, body: bytes, more: tuple[bytes, ...] = ()) -> bytes:
    lines = (method + b" " + path + b" HTTP/1.1", b"Host: 127.0.0.1", b"Content-Type: application/json", *more)
    return b"\r\n".join((*lines, b"Content-Length: %d" % len(body), b"", b"")) + body


def _change_value(value: Any, draw: random.Random) -> Any:
    """One value somewhere below is another, or one key is missing, new or named differently."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        choice = draw.randrange(5)
        if choice == 0:
            return {name: entry for name, entry in value.items() if name != key}
        if choice == 1:
            return {**value, draw.choice(["x", key.upper(), f"{key}s", "model", "", "best_of"]): draw.choice(STRANGE)}
        return {**value, key: _change_value(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.6:
        at = draw.randrange(len(value))
        if draw.random() < 0.3:
            return value * draw.choice([0, 2, 40])
        return [*value[:at], _change_value(value[at], draw), *value[at + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and draw.random() < 0.5:
        return draw.choice([value + 1, -value, value * 1000, value / 3, str(value)])
    return draw.choice(STRANGE)


def _change_bytes(body: bytes, draw: random.Random) -> bytes:
    at, other = draw.randrange(len(body) + 1), draw.randrange(len(body) + 1)
    low, high = min(at, other), max(at, other)
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: body[:at] + bytes([draw.randrange(256)]) + body[at + 1 :],
        lambda: body[:at] + bytes([(body[at : at + 1] or b"\0")[0] ^ 1 << draw.randrange(8)]) + body[at + 1 :],
        lambda: body[:low] + body[high:],
        lambda: body[:high] + body[low:],
        lambda: body[:at] + draw.choice(RAW) + body[at:],
        lambda: body[:at],
    )
    return draw.choice(changes)()


def _change_head(path: bytes, body: bytes, draw: random.Random) -> bytes:
    method, more = b"POST", tuple(draw.sample(HEADERS, draw.randint(0, 3)))
    if draw.random() < 0.3:
        method = draw.choice(METHODS)
    if draw.random() < 0.3:
        path = draw.choice(PATHS)
    data = _request(method, path, body, more)
    if draw.random() < 0.4:
        end = data.index(b"\r\n\r\n") + 4
        data = _change_bytes(data[:end], draw) + data[end:]
    return data * draw.choice([1, 1, 1, 2])


class Trial:
    """One daemon under trial. Not `assert`: this is no test module, so `python -O` would leave it out."""

    def __init__(self, daemon: DaemonProcess, seed: int) -> None:
        self._daemon = daemon
        self._seed = seed
        self._expected: Any = None
        self.statuses: Counter[int] = Counter()
        self.problems: list[str] = []

    async def run(self, cases: int, at_once: int = 16) -> None:
        self._expected = await self._canary()
        numbers = iter(range(cases))

        async def client() -> None:
            connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
            for number in numbers:
                if len(self.problems) > 20:
                    break
                case = make_case(number, self._seed)
                try:
                    connection = await asyncio.wait_for(self._try(number, case, connection), PATIENCE_S)
                except TimeoutError:
                    self._problem(number, f"no answer within {PATIENCE_S:g} s")
                    connection = None
                if number % CANARY_EVERY == 0 and await self._canary() != self._expected:
                    self._problem(number, "the canary's answer has changed")
            if connection is not None:
                connection[1].close()

        await asyncio.gather(*(client() for _ in range(at_once)))

    async def _try(
        self, number: int, case: Case, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Send one case; the connection if it can be used again. Those whose head lies have one of their own."""
        reused = connection is not None and case.framed
        reader, writer = connection if connection is not None and case.framed else await self._connect()
        keep = connection if not case.framed else None
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            writer.write(case.data)
            await writer.drain()
            # A daemon may rightly wait for the rest of a body that was announced longer than it is.
            wait = None if case.framed else LIAR_PATIENCE_S
            try:
                status, head, body = await asyncio.wait_for(_answer(reader, case.data), wait)
            except TimeoutError:
                writer.transport.abort()
                return keep
            self._judge(number, case, status, head, body)
            if case.framed and b"connection: close" not in head:
                return reader, writer
            writer.close()
            return keep
        writer.close()
        if case.framed and reused:  # it was closed while it waited: once more, on a new one
            return await self._try(number, case, None)
        if case.framed:
            self._problem(number, "the connection was closed without an answer")
        return keep

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._daemon.port, limit=1 << 20)

    def _judge(self, number: int, case: Case, status: int, head: bytes, body: bytes) -> None:
        self.statuses[status] += 1
        late = status == TIMEOUT and b"timeout_s" in case.data
        full = status == UNAVAILABLE and b"retry-after" in head
        if status >= SERVER_ERROR and not late and not full:
            self._problem(number, f"{status}: {body[:300]!r}")
        if status < 400 or b"application/json" not in head or not body:  # HEAD has no body
            return
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            self._problem(number, f"{status} is not in the contract: {body[:300]!r}")
            return
        if set(error) != ERROR_KEYS or not error["message"] or b"Traceback" in body:
            self._problem(number, f"{status} is not in the contract: {body[:300]!r}")

    async def _canary(self) -> Any:
        reader, writer = await self._connect()
        writer.write(_request(b"POST", b"/v1/completions", _encode(COMPLETION)))
        status, _, body = await asyncio.wait_for(_answer(reader), PATIENCE_S)
        writer.close()
        return json.loads(body)["choices"] if status == 200 else body

    def _problem(self, number: int, what: str) -> None:
        self.problems.append(f"case {number} of seed {self._seed}: {what}")


async def _answer(reader: asyncio.StreamReader, asked: bytes = b"") -> tuple[int, bytes, bytes]:
    """Status, head in small letters, body. IncompleteReadError: there is none, or it is cut off."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(None, 2)[1])
        if status >= 200:
            break
    fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    if asked.startswith(b"HEAD "):
        return status, head, b""
    if b"content-length" in fields:
        return status, head, await reader.readexactly(int(fields[b"content-length"]))
    if fields.get(b"transfer-encoding") != b"chunked":
        return status, head, b""
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return status, head, body


def trial(folder: Path, cases: int, seed: int) -> tuple[list[str], Counter[int]]:
    """Problems, and how many answers had which status."""
    with DaemonProcess(folder, "--max-seq-len", "128", "--device", "cpu") as daemon:
        one = Trial(daemon.wait_ready(), seed)
        asyncio.run(one.run(cases))
        daemon.signal(signal.SIGTERM)
        code = daemon.wait()
        loud = [event for event in daemon.events if event["level"] in ("error", "critical")]
        if code or loud:
            one.problems.append(f"the daemon ended with {code} and logged {loud[:3]}")
        return one.problems, one.statuses


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        problems, statuses = trial(Path(folder), options.cases, options.seed)
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(
        f"{options.cases} cases in {time.monotonic() - start:.0f} s, statuses {dict(sorted(statuses.items()))}\n"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
