"""An OpenAI server as `colibrid bench http` uses it: connections that are kept, bodies as it takes them, answers read."""

from __future__ import annotations

import itertools
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec

from colibrid.cli.bench_result import Form
from colibrid.cli.bench_wire import (
    Connection,
    EventParser,
    ResponseParser,
    StaleError,
    WireError,
    request_bytes,
    whole_number,
)
from colibrid.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from colibrid.cli.bench_load import HttpLoad, Planned

_REFUSALS = frozenset({429, 503})
_LONGEST_WAIT_S = 30.0  # after a refusal, whatever it asks for
_FIRST_ANSWER_BYTES = 1 << 20  # of /v1/models
_TEXT = (
    "the of and to in is it for on was with as at by from they we say her or will one all would there their what so "
    "up out if about who get which go me when make can like time no just him know take people into year your good "
    "some could them see other than then now look only come its over think also back after use two how our work "
    "first well way even new want because any these give day most us are had has been more old great same big high "
    "small large next early young few public bad able house water room mother area money story fact month lot right "
    "study book eye job word side kind head far black long both little home since move live found still between "
    "hand high school"
)
_WORDS = _TEXT.split()

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]


class _Details(msgspec.Struct, frozen=True):
    completion_tokens: _Tokens
    prompt_tokens: _Tokens | None = None


class _Answer(msgspec.Struct, frozen=True):
    """What is read of an answer or of an event of a stream."""

    choices: list[dict[str, Any]] = []
    usage: _Details | None = None
    error: Any = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


_ANSWER = msgspec.json.Decoder(_Answer)


class Reader:
    """Collects one answer: a stream's events with their times, or a whole body."""

    def __init__(self, *, stream: bool) -> None:
        self.times: list[float] = []  # of events with text
        self.tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.problem: str | None = None
        self._events = EventParser() if stream else None
        self._body = bytearray()
        self._ended = False

    @property
    def stream(self) -> bool:
        return self._events is not None

    def __call__(self, data: bytes, now: float) -> None:
        self._body += data
        if self._events is None:
            return
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._ended = True
            elif self._read(event):
                self.times.append(now)

    def finish(self, response: ResponseParser) -> None:
        """Reads what is left. Sets `problem` if this is not a whole answer."""
        if response.status != 200:
            self.problem = f"{response.status}: {self._body[:200].decode('utf-8', 'replace').strip()}"
        elif self._events is None:
            self._read(bytes(self._body))
        elif not self._ended and self.problem is None:
            self.problem = "the stream ended without [DONE]"

    def _read(self, data: bytes) -> bool:
        """Whether `data` brought something of the text."""
        try:
            answer = _ANSWER.decode(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            self.problem = f"not an answer of this API ({error}): {data[:100].decode('utf-8', 'replace')}"
            return False
        if answer.error is not None:
            self.problem = f"error in the answer: {str(answer.error)[:200]}"
        if answer.usage is not None:
            self.tokens, self.prompt_tokens = answer.usage.completion_tokens, answer.usage.prompt_tokens
        # The last event of a text may bring no more than its finish_reason.
        return any(choice.get("text") or choice.get("token_ids") or _said(choice) for choice in answer.choices)


def _said(choice: dict[str, Any]) -> bool:
    """Whether a chat's event brings text, thinking or a tool call: not only a role."""
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role")


@dataclass(frozen=True, slots=True)
class _Address:
    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None


class Client:
    """Sends requests of one load. Idle connections are used again, the youngest first."""

    def __init__(self, load: HttpLoad) -> None:
        """ConfigError: the URL."""
        self._load = load
        self._address = _address(load.url)
        self._idle: list[Connection] = []
        self._headers = {"Content-Type": "application/json"}
        if load.api_key is not None:
            self._headers["Authorization"] = f"Bearer {load.api_key}"

    def request(self, form: Form, model: str, planned: Planned, source: random.Random) -> bytes:
        """A whole request for a completion."""
        load = self._load
        prompt: str | list[int]
        if planned.prompt is not None:
            prompt = planned.prompt
        elif form.ids:
            prompt = [source.randrange(load.vocab_size) for _ in range(planned.prompt_tokens)]
        else:
            count = max(1, round(planned.prompt_tokens * form.words_per_token))
            prompt = " ".join(source.choices(_WORDS, k=count))
        body: dict[str, Any] = {"model": model, "max_tokens": planned.max_tokens, "temperature": 0}
        if load.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if load.stream:
            body["stream"] = True
            if form.ask_usage:
                body["stream_options"] = {"include_usage": True}
        if form.ignore_eos:
            body["ignore_eos"] = True
        path = "/v1/chat/completions" if load.chat else "/v1/completions"
        return self._encode("POST", path, msgspec.json.encode(body | load.fields))

    async def exchange(self, request: bytes, sink: Callable[[bytes, float], None]) -> ResponseParser:
        """Sends it, on a new connection if no old one is left. OSError, WireError."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                try:
                    return await self._ask(connection, request, sink)
                except StaleError:
                    pass
        connection = await Connection.open(self._address.host, self._address.port, self._address.tls)
        return await self._ask(connection, request, sink)

    async def first_model(self) -> str:
        """EngineError: nobody answers, or there is no list."""
        url, body = self._load.url, bytearray()

        def collect(data: bytes, _now: float) -> None:
            body.extend(data[:_FIRST_ANSWER_BYTES])

        try:
            response = await self.exchange(self._encode("GET", "/v1/models", b""), collect)
            if response.status != 200:
                raise EngineError(f"{url}/v1/models answers {response.status}; name the model with --model")
            return msgspec.json.decode(bytes(body), type=_Models).data[0].id
        except (OSError, WireError) as error:
            raise EngineError(f"{url}: {error}; is a server running there?") from None
        except (msgspec.MsgspecError, RecursionError, IndexError):
            raise EngineError(f"{url}/v1/models lists no model; name it with --model") from None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _ask(
        self, connection: Connection, request: bytes, sink: Callable[[bytes, float], None]
    ) -> ResponseParser:
        response = await connection.ask(request, sink)
        if connection.usable:
            self._idle.append(connection)
        return response

    def _encode(self, method: str, path: str, body: bytes) -> bytes:
        address = self._address
        shown = f"[{address.host}]" if ":" in address.host else address.host
        return request_bytes(method, address.path + path, f"{shown}:{address.port}", body, self._headers)


def refusal(response: ResponseParser) -> float | None:
    """Seconds to wait if the server asks to come back later; None: something else."""
    if response.status not in _REFUSALS:
        return None
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        wait = whole_number(response.headers.get(name, ""))
        if wait is not None:
            return min(wait * unit, _LONGEST_WAIT_S)
    return None


def forms(load: HttpLoad) -> list[Form]:
    """Ways to ask, the ones that say most first: a server that refuses the first may take another."""
    ids = {"auto": (True, False), "ids": (True,), "text": (False,)}["text" if load.chat else load.prompt_form]
    eos = (True, False) if load.ignore_eos else (False,)
    usage = (True, False) if load.stream else (False,)
    ways = [Form(ids=a, ignore_eos=b, ask_usage=c) for a, b, c in itertools.product(ids, eos, usage)]
    return sorted(ways, key=lambda form: -(form.ids + form.ignore_eos + form.ask_usage))


def _address(url: str) -> _Address:
    try:
        parts = urlsplit(url)
        extra = parts.query or parts.fragment or "@" in parts.netloc
        if parts.scheme in {"http", "https"} and parts.hostname and not extra and _is_plain(url):
            parts.hostname.encode("idna")
            tls = ssl.create_default_context() if parts.scheme == "https" else None
            path = parts.path.rstrip("/").removesuffix("/v1")  # as clients of OpenAI write it
            return _Address(parts.hostname, parts.port or (443 if tls else 80), path, tls)
    except ValueError:
        pass
    raise ConfigError(
        f"--url {url!r}: write it like http://127.0.0.1:8080, in ASCII and without spaces, a user, a query or a fragment; a "
        "key goes into --api-key-file"
    )


def _is_plain(url: str) -> bool:
    return url.isascii() and url.isprintable() and " " not in url
