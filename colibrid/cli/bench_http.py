"""Load on a server that speaks the OpenAI API, and what its clients see.

Closed loop: a fixed number of clients, each of which sends its next request when it has the answer to the one before.
Open loop: requests come at their own times, whatever happens to those before, and every time counts from then on: a
server that stops for a second delays everybody who came in that second, also those that could not even be sent.
Prompts are random and different, so that no cache of prompts helps.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import random
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import uvloop

from colibrid.cli.bench_client import Client, Reader, forms, refusal
from colibrid.cli.bench_interrupt import Interruption, NothingMeasuredError
from colibrid.cli.bench_load import arrivals, plan
from colibrid.cli.bench_result import CutShort, Outcome, Sample, summarise
from colibrid.cli.bench_wire import WireError
from colibrid.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.cli.bench_load import HttpLoad, Planned, Trace
    from colibrid.cli.bench_result import HttpReport

_LEAD_S = 0.02  # before the first arrival of an open loop
_TIMER_S = 0.002  # timers of the loop are late by up to a millisecond
_OTHER_FORM = frozenset({400, 415, 422, 500, 501})  # statuses by which servers refuse a field or its form


class _Generator:
    """One run of requests that `plan` says, written in one form."""

    def __init__(self, load: HttpLoad, client: Client, model: str, seed: int, trace: Trace | None) -> None:
        self.outcome = Outcome()
        self.form = forms(load)[0]
        self.problem_status = 0  # of the last request that failed; 0: not by a status
        self._load = load
        self._client = client
        self.model = model
        self._random = random.Random(seed)  # noqa: S311 (repeatable prompts, no secrets)
        self._plan = plan(load, trace, seed)
        self._began = self._ended = 0.0
        self._left: float = 0
        self._until = float("inf")

    async def adapt(self) -> None:
        """Sends one request, in the first form that the server takes, which the others will have, too.

        EngineError: it takes none. A server that is busy is asked again.
        """
        self._start(float("inf"))
        first: str | None = None
        for form in forms(self._load):
            self.form = form
            planned = next(self._plan)
            await self._one_patiently(planned)
            if self.outcome.samples:
                self._count_words(planned, self.outcome.samples[0])
                return
            first = first or "; ".join(self.outcome.problems) or "it refuses all requests as too many"
            if self.problem_status not in _OTHER_FORM:
                break
        raise EngineError(f"{self._load.url}: no request of the warm-up was answered: {first}")

    async def _one_patiently(self, planned: Planned) -> None:
        give_up = time.perf_counter() + self._load.timeout
        while True:
            wait = await self._one(self._encode(planned), None)
            if wait is None or time.perf_counter() + wait > give_up:
                return
            await asyncio.sleep(wait)

    async def run(self, times: Iterator[float]) -> None:
        """All of the load; `times` are those of an open loop."""
        if self._load.open:
            await self.open(times)
        else:
            limit = float("inf") if self._load.requests is None else self._load.requests
            await self.closed(limit, self._load.seconds or float("inf"))

    async def closed(self, limit: float, seconds: float) -> None:
        """`limit` requests, or as many as begin within `seconds`."""
        self._start(seconds)
        self._left = limit
        with self._timed():
            async with asyncio.TaskGroup() as group:
                for _ in range(self._load.clients):
                    group.create_task(self._loop())

    async def open(self, times: Iterator[float]) -> None:
        """Requests at their times."""
        self._start(float("inf"), _LEAD_S)
        room = asyncio.Semaphore(self._load.max_in_flight)
        with self._timed():
            async with asyncio.TaskGroup() as group:
                for at in times:
                    request = self._encode(next(self._plan))  # before its time comes
                    await _sleep_until(self._began + at)
                    await room.acquire()
                    group.create_task(self._arrived(request, self._began + at, room))

    def cut_short(self, at: float) -> None:
        """Requests that were under way at that time were cancelled: they are neither answered nor failed."""
        self.outcome.cut_short = CutShort(after_s=max(0.0, at - self._began), under_way=self.outcome.cancelled)

    def _start(self, seconds: float, lead: float = 0.0) -> None:
        self._began = self._ended = time.perf_counter() + lead
        self._until = self._began + seconds

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.outcome.elapsed_s = self._ended - self._began

    async def _loop(self) -> None:
        while self._left > 0 and time.perf_counter() < self._until:
            self._left -= 1
            wait = await self._one(self._encode(next(self._plan)), None)
            if wait is not None:
                self._left += 1
                await asyncio.sleep(max(0.0, min(wait, self._until - time.perf_counter())))

    async def _arrived(self, request: bytes, due: float, room: asyncio.Semaphore) -> None:
        try:
            await self._one(request, due)
        finally:
            room.release()

    async def _one(self, request: bytes, due: float | None) -> float | None:
        """One request, which was to be sent when it was `due`, or now. Seconds to wait if it is refused."""
        outcome, reader = self.outcome, Reader(stream=self._load.stream)
        self.problem_status = 0
        sent = time.perf_counter()
        outcome.begin()
        try:
            async with asyncio.timeout(self._load.timeout):
                response = await self._client.exchange(request, reader)
        except TimeoutError:
            outcome.fail(f"no answer within {self._load.timeout:g} s")
            return None
        except (OSError, WireError) as error:
            outcome.fail(str(error))
            return None
        except asyncio.CancelledError:
            outcome.cancelled += 1
            raise
        finally:
            outcome.end()
        now = time.perf_counter()
        wait = refusal(response)
        if wait is not None:
            outcome.refused += 1
            return wait
        reader.finish(response)
        self._ended = max(self._ended, now)
        if reader.problem is not None:
            self.problem_status = response.status
            outcome.fail(reader.problem)
        else:
            self._add(reader, due or sent, sent, now)
        return None

    def _add(self, reader: Reader, due: float, sent: float, now: float) -> None:
        times, tokens = reader.times, reader.tokens
        if tokens is None and reader.stream:
            self.outcome.counted_events = True
            tokens = len(times)
        self.outcome.samples.append(
            Sample(
                at=round(due - self._began, 6),
                e2e_ms=_ms(now - due),
                late_ms=_ms(sent - due),
                ttft_ms=_ms(times[0] - due) if times else None,
                tokens=tokens,
                prompt_tokens=reader.prompt_tokens,
                gaps_ms=[_ms(later - earlier) for earlier, later in pairwise(times)],
            )
        )

    def _encode(self, planned: Planned) -> bytes:
        return self._client.request(self.form, self.model, planned, self._random)

    def _count_words(self, planned: Planned, sample: Sample) -> None:
        """Prompts of words get as long as the server's tokenizer makes them."""
        if self.form.ids or planned.prompt is not None or not sample.prompt_tokens:
            return
        ratio = planned.prompt_tokens / sample.prompt_tokens
        self.form = msgspec.structs.replace(self.form, words_per_token=min(max(ratio, 0.05), 5.0))


def measure_http(load: HttpLoad, trace: Trace | None = None, interruption: Interruption | None = None) -> HttpReport:
    """Warm up, run the load, report. EngineError: the server does not answer at all. ConfigError: the URL.

    NothingMeasuredError: interrupted before the load; later, the report is of what finished.
    """
    return uvloop.run(_measure(load, trace, Client(load), interruption or Interruption()))


async def _measure(load: HttpLoad, trace: Trace | None, client: Client, interruption: Interruption) -> HttpReport:
    made = dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds")
    generators: list[_Generator] = []

    async def prepare() -> None:
        model = load.model or await _first_model(load, client)
        generator = _Generator(load, client, model, load.seed, trace)
        if load.warmup:
            # Not the texts of a trace, which the server may keep.
            warm = _Generator(load, client, model, load.seed + 1, None)
            await warm.adapt()
            await warm.closed(load.warmup - 1, float("inf"))
            generator.form = warm.form
        generators.append(generator)

    try:
        if not await interruption.run(prepare()):
            raise NothingMeasuredError("interrupted before the load began: nothing was measured")
        (generator,) = generators
        if not await interruption.run(generator.run(arrivals(load, trace))):
            generator.cut_short(interruption.at or 0.0)
    finally:
        client.close()
    return summarise(load, generator.form, generator.model, generator.outcome, made)


async def _first_model(load: HttpLoad, client: Client) -> str:
    try:
        async with asyncio.timeout(load.timeout):
            return await client.first_model()
    except TimeoutError:
        raise EngineError(f"{load.url} does not answer within {load.timeout:g} s") from None


async def _sleep_until(due: float) -> None:
    """A thread's sleep ends within a tenth of a millisecond and takes no processor time from the server."""
    left = due - time.perf_counter()
    if left > 2 * _TIMER_S:
        await asyncio.sleep(left - _TIMER_S)
        left = due - time.perf_counter()
    if left > 0:
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, left)
    else:
        await asyncio.sleep(0)  # behind its time: those that are under way go on


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
