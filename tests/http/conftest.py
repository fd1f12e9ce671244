"""A scripted stand-in for the scheduler, and a server in front of it on a real socket."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from array import array
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import msgspec
import pytest

import colibrid
from colibrid.batch.interfaces import EngineInfo
from colibrid.batch.measures import ExpertLoad, Measures
from colibrid.batch.reports import EngineReport, SlotReport, Traffic
from colibrid.batch.request import ExpertUsage, FinishReason, GenerateRequest, GenerateResult, TokenRecord
from colibrid.config.settings import Settings
from colibrid.engine import abi
from colibrid.engine.state import EngineStatus, Readiness
from colibrid.errors import OverloadedError
from colibrid.http.auth import KeyRing
from colibrid.http.server import start_server
from colibrid.http.state import AppState
from colibrid.plugin_host import Plugins
from colibrid.text.model_text import ModelText
from colibrid.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from colibrid.errors import RequestError
    from colibrid.http.admin_state import AdminState

MODEL_DIR = Path(colibrid.__file__).parent / "models" / "hummingbird-13m"
END = 4093  # <|im_end|>


@pytest.fixture(scope="session")
def model_text() -> ModelText:
    return ModelText.load(
        tokenizer=MODEL_DIR / "tokenizer.json",
        tokenizer_config=MODEL_DIR / "tokenizer_config.json",
        generation_config=MODEL_DIR / "generation_config.json",
        eos_token_ids=(END, 4091),
    )


@pytest.fixture(scope="session")
def with_start() -> Tokenizer:
    """The bundled model's tokenizer, but with a special token that it puts first."""
    described = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    start = {"id": "<|endoftext|>", "type_id": 0}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": start}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [4091], "tokens": ["<|endoftext|>"]}},
    }
    return Tokenizer(json.dumps(described))


class FakeGeneration:
    """Yields the tokens of its service's reply, one batch a turn."""

    def __init__(self, request: GenerateRequest, service: FakeService, choice: int = 0) -> None:
        self.request = request
        self.choice = choice
        self.prompt_records: tuple[TokenRecord, ...] = ()
        self.result: GenerateResult | None = None
        self.cancelled = False
        self.ended = False
        self.masks: list[bytes] = []
        self.paces: list[float] = []
        self._service = service
        self._sent = 0

    def submit_mask(self, position: int, mask: bytes) -> None:
        assert position == len(self.masks), "positions are masked in order, each once"
        assert len(mask) == self._service.info.mask_bytes
        self.masks.append(mask)

    def pace(self, interval_s: float) -> None:
        self.paces.append(interval_s)

    def cancel(self) -> None:
        if not self.ended:
            self.cancelled = self.ended = True
            self._service.live.discard(self)

    def stop(self) -> None:
        if not self.ended:
            if self._service.knows_stopped:
                self.result = self._result("stop", None)
            self.ended = True
            self._service.live.discard(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[list[TokenRecord]]:
        request, service = self.request, self._service
        if request.prompt_logprobs is not None:
            self.prompt_records = tuple(
                record(token, request.prompt_logprobs) if place else TokenRecord(token)
                for place, token in enumerate(request.prompt_ids)
            )
        sent = 0
        reason: FinishReason = "length"
        stop_token = None
        reply = [*service.choice_starts.get(self.choice, ()), *service.reply]
        for start in range(0, len(reply), service.batch):
            batch = []
            for token in reply[start : start + service.batch]:
                if sent == request.max_tokens or stop_token is not None:
                    break
                wanted, less = request.logprobs, service.choice_logprobs.get(self.choice, 0.0)
                batch.append(TokenRecord(token) if wanted is None else record(token, wanted, less))
                sent += 1
                if token in request.stop_token_ids and sent > request.min_tokens:
                    reason, stop_token = "stop", token
            self._sent = sent
            if batch:
                await asyncio.sleep(service.pause_s)
                if self.ended:
                    return
                yield batch
            if service.failure is not None and sent >= service.fail_after:
                raise service.failure
        self.result = self._result(reason, stop_token)
        self.ended = True
        service.live.discard(self)

    def _per_token(self) -> int:
        asked = self.request.experts.per_token
        return asked if isinstance(asked, int) else 2

    def _result(self, reason: FinishReason, stop_token: int | None) -> GenerateResult:
        return GenerateResult(
            finish_reason=reason,
            stop_token=stop_token,
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=self._sent,
            cached_tokens=0 if self.choice else self._service.cached_tokens,
            experts=ExpertUsage(self._per_token(), 12 * self._sent, 0, 0, self._service.info.batch_dependent),
            pooled=None if self.request.pooling is None else pooled(self.request.prompt_ids),
            queue_ms=1.0,
            prefill_ms=2.0,
            decode_ms=3.0,
        )


def record(token: int, top: int, less: float = 0.0) -> TokenRecord:
    """The token with log-probability -0.5 - less, then its upper neighbours, each one less."""
    listed = tuple(((token + rank) % 4096, -0.5 - less - rank) for rank in range(top))
    return TokenRecord(token, -0.5 - less, listed)


def pooled(prompt: Sequence[int]) -> bytes:
    """Eight values of length 1 that tell prompts apart."""
    values = [1.0 + (sum(prompt) * (column + 1)) % 7 for column in range(8)]
    length = math.hypot(*values)
    return array("f", [value / length for value in values]).tobytes()


class FakeService:
    """Implements batch.interfaces.GenerationService."""

    def __init__(self, reply: Sequence[int]) -> None:
        self.reply = list(reply)
        self.choice_starts: dict[int, list[int]] = {}  # tokens before the reply, by choice
        self.choice_logprobs: dict[int, float] = {}  # how much less likely each token of a choice is
        self.cached_tokens = 0
        self.batch = 1  # tokens that arrive at once
        self.pause_s = 0.0  # before each batch
        self.failure: RequestError | None = None
        self.fail_after = 0  # tokens
        self.knows_stopped = True  # False: as if the engine had died before stop() was called
        self.refusal: RequestError | None = None
        self.readiness = Readiness(phase="ready", last_step_age_s=0.01)
        self.draining = False
        self.measures = Measures(ExpertLoad((3, 0, 2), 3, 2048))
        self.expert_swaps = 2
        self.holds = 0  # answers that are held
        self.begun = 0  # requests that held answers have added
        self.seen: list[GenerateRequest] = []
        self.live: set[FakeGeneration] = set()
        self.generations: list[FakeGeneration] = []
        self.info = EngineInfo(
            model_id="hummingbird-13m",
            family="Qwen2MoeForCausalLM",
            vocab_size=4096,
            max_seq_len=2048,
            slots=32,
            experts_per_token=2,
            experts_most=2,
            batch_dependent=False,
            hidden=8,
            device="cpu",
            fingerprint="fp_0123456789ab",
        )

    @property
    def engines(self) -> tuple[EngineStatus, ...]:
        """One, that does what the service does."""
        state = msgspec.structs.asdict(self.readiness)
        return (EngineStatus(index=0, device="cpu", slots=32, running=len(self.live), queued=0, memory=None, **state),)

    @property
    def reports(self) -> tuple[EngineReport, ...]:
        counters = {name: number for number, (name, _) in enumerate(abi.Stats._fields_)}  # type: ignore[misc]
        return tuple(
            EngineReport(status=one, measures=self.measures, counters=counters, traffic=Traffic(1000, 10))
            for one in self.engines
        )

    @property
    def slot_reports(self) -> tuple[tuple[SlotReport, ...], ...]:
        busy = SlotReport(slot=0, state="running", waiting=False, request_id="cmpl-1", prompt_tokens=5, output_tokens=2)
        return ((busy, SlotReport(slot=1, state="free", waiting=False)),)

    @contextmanager
    def held(self) -> Iterator[None]:
        self.holds += 1
        try:
            yield
        finally:
            self.holds -= 1

    def check_room(self) -> None:
        if isinstance(self.refusal, OverloadedError):
            raise self.refusal

    def submit(self, request: GenerateRequest, *, begun: bool = False) -> FakeGeneration:
        assert self.holds or not begun, "an answer that goes on is held"
        self.begun += begun
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[GenerateRequest]) -> tuple[FakeGeneration, ...]:
        if self.refusal is not None:
            raise self.refusal
        self.seen.extend(requests)
        made = tuple(FakeGeneration(request, self, choice) for request in requests for choice in range(request.n))
        self.live.update(made)
        self.generations.extend(made)
        return made

    @property
    def last(self) -> GenerateRequest:
        return self.seen[-1]


@dataclass
class Server:
    """A running server and a client of it."""

    service: FakeService
    state: AppState
    url: str
    session: aiohttp.ClientSession
    stack: AsyncExitStack
    extra: dict[str, str] = field(default_factory=dict)

    async def post(self, path: str, body: object, **headers: str) -> Answer:
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return Answer(response.status, response.headers, await response.read())

    async def raw(self, path: str, data: bytes, **headers: str) -> Answer:
        sent = {"Content-Type": "application/json"} | {key.replace("_", "-"): value for key, value in headers.items()}
        async with self.session.post(self.url + path, data=data, headers=sent) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, **headers: str) -> Answer:
        async with self.session.get(self.url + path, headers=headers) as response:
            return Answer(response.status, response.headers, await response.read())


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The data of each event; [DONE] as a string; comments left out."""
        found: list[Any] = []
        for block in self.raw.decode().split("\n\n"):
            if block.startswith("data: "):
                data = block.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
        return found


@pytest.fixture
async def make_server(model_text: ModelText) -> AsyncIterator[Callable[..., Any]]:
    """Starts a server: make_server(reply="text", keys=[...], server={...}, limits={...}, text=ModelText)."""
    async with AsyncExitStack() as stack:

        async def make(
            reply: str | Sequence[int] = "The capital of Norway is Oslo.",
            *,
            keys: Sequence[str] = (),
            ring: KeyRing | None = None,
            text: ModelText = model_text,
            admin: AdminState | None = None,
            plugins: Plugins | None = None,
            **sections: dict[str, Any],
        ) -> Server:
            ids = [*text.tokenizer.encode(reply, add_special_tokens=False), END] if isinstance(reply, str) else reply
            service = FakeService(ids)
            state = AppState(
                settings=msgspec.convert(sections, Settings),
                scheduler=service,
                text=text,
                keys=KeyRing.of_plain(keys, "test") if ring is None else ring,
                plugins=plugins or Plugins(),
            )
            listening = socket.create_server(("127.0.0.1", 0))
            stack.callback(listening.close)
            await start_server(state, [listening], stack, admin=admin)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            return Server(service, state, url, session, stack)

        yield make


@pytest.fixture
async def server(make_server: Callable[..., Any]) -> Server:
    return await make_server()
