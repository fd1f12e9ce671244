"""Runs a job and answers with it, whole or as a stream; the routes say what choices look like."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import structlog
from aiohttp import web

from colibrid.errors import RequestError
from colibrid.http.context import current
from colibrid.http.errors import InternalError, RequestTimeoutError
from colibrid.http.limits import CROWDED_WRITE_S, HELD_BYTES
from colibrid.http.quota import Spending, served_as
from colibrid.http.run import Choices
from colibrid.http.sending import ReaderLeftError, send_json
from colibrid.http.sse import EventStream
from colibrid.http.usage import LOGGED_EXPERTS, named, server_timing, times, usage_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from colibrid.http.params import Job
    from colibrid.http.run import Choice, Delta
    from colibrid.http.state import AppState

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


_WHOLE_PACE_S = 0.1  # how often tokens are taken over while nobody waits for them one by one
_INLINE_LOGPROBS = 4000  # written down on the event loop: about 2 ms
LOGPROB_BYTES = 300  # of a log-probability that waits to be written down: values take more memory than text
ID_BYTES = 100  # of a token that waits to be written down, about
_Result = TypeVar("_Result")


class ChoiceWriter(Protocol):
    """One choice being written down. Its methods are called one after another, but not all by the same thread."""

    @property
    def weight(self) -> int:
        """Log-probabilities that the next `chunk`, or `whole`, has to write down."""

    @property
    def pending(self) -> int:
        """Bytes of the next `chunk`, about."""

    def take(self, delta: Delta) -> None:
        """Adds what is new."""

    def opening(self) -> bytes:
        """Events before the first text."""

    def chunk(self) -> bytes:
        """An event of what was taken since the last one; empty when there is nothing to say."""

    def closing(self) -> bytes:
        """The event with the finish reason."""

    def whole(self) -> dict[str, Any]:
        """The choice as an object, with all that was taken."""


class AnswerWriter(Protocol):
    """The body around the choices."""

    @property
    def weight(self) -> int:
        """Log-probabilities that `whole` has to write down, beside those of the choices."""

    def choice(self, choice: Choice) -> ChoiceWriter:
        """A fresh writer of one choice."""

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer as an object; `choices`, where it has them, are an empty list, to be filled when it is sent."""

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The last event, if the client asked for it; else empty."""


async def answer(
    request: web.Request, state: AppState, job: Job, writer: AnswerWriter, *, stream: bool
) -> web.StreamResponse:
    """Submits the job and answers. Ending early, for whatever reason, cancels it."""
    context = current(request)
    requests = served_as(context.meter, job.requests, context.tenant)
    with Spending(context.meter, requests) as spending:
        generations = state.scheduler.submit_all(requests)
        async with Choices(job, generations, state.text.tokenizer) as choices:
            try:
                if stream:
                    with state.streaming():
                        return await _streamed(request, state, choices, writer, job.timeout_s)
                return await _whole(request, state, choices, writer, job.timeout_s)
            finally:
                spending.used = choices.tokens
                context.facts = _begun(state, choices) | context.facts


def json_response(value: object, status: int = 200) -> web.Response:
    """`value` as JSON."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


async def within(request: web.Request, timeout_s: float | None, work: Awaitable[_Result]) -> _Result:
    """The result of `work`, waited for until the request is `timeout_s` old. Raises RequestTimeoutError."""
    if timeout_s is None:
        return await work
    try:
        async with asyncio.timeout(timeout_s - current(request).elapsed_ms / 1000) as deadline:
            return await work
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise RequestTimeoutError(timeout_s) from error


async def _whole(
    request: web.Request, state: AppState, choices: Choices, writer: AnswerWriter, timeout_s: float | None
) -> web.StreamResponse:
    writers = {choice: writer.choice(choice) for choice in choices.all}

    async def collect(choice: Choice) -> None:
        choice.pace(_WHOLE_PACE_S)
        await choice.feed(writers[choice].take)

    await within(request, timeout_s, choices.each(collect))
    usage = _note(request, state, choices)
    parts: list[bytes] = []
    for choice in choices.best():
        target = writers[choice]
        parts.append(await _off_loop(state, target.weight, functools.partial(_encoded, target.whole)))
        await asyncio.sleep(0)  # many small choices together would hold the event loop for long
    frame = await _off_loop(state, writer.weight, functools.partial(_encoded, functools.partial(writer.whole, usage)))
    return await send_json(request, _filled(frame, parts))


async def _streamed(
    request: web.Request, state: AppState, choices: Choices, writer: AnswerWriter, timeout_s: float | None
) -> web.StreamResponse:
    async with EventStream(request, state.settings.server.sse_ping_s) as stream:
        try:
            await within(
                request, timeout_s, choices.each(lambda choice: _Forwarder(stream, state, choice, writer).run())
            )
            usage = writer.usage_event(_note(request, state, choices))
            if usage:
                await stream.send(usage)
            await stream.finish()
        except RequestError as error:
            _log.warning("stream_failed", request_id=current(request).id, code=error.code, reason=error.message)
            current(request).error = error
            await stream.fail(error)
        except ReaderLeftError:
            raise  # nobody hears of it but the log
        except Exception:  # noqa: BLE001 - whatever it is, the client must hear of it
            _log.exception("stream_broken", request_id=current(request).id)
            broken = current(request).error = InternalError(current(request).id)
            await stream.fail(broken)
        return stream.response


class _Forwarder:
    """Sends one choice to its stream."""

    __slots__ = ("_choice", "_pace_s", "_state", "_stream", "_target")

    def __init__(self, stream: EventStream, state: AppState, choice: Choice, writer: AnswerWriter) -> None:
        self._stream = stream
        self._state = state
        self._choice = choice
        self._target = writer.choice(choice)
        self._pace_s = 0.0

    async def run(self) -> None:
        """From the first event to the last one of the choice."""
        target = self._target
        opening = target.opening()
        if opening:
            await self._stream.send(opening)
        await self._choice.feed(self._take)
        rest = await _off_loop(self._state, target.weight, target.chunk)
        await self._stream.send(rest + target.closing())

    def _take(self, delta: Delta) -> Awaitable[None] | None:
        """Sends what is new, at once or, where something has to be waited for, when that is awaited."""
        target, stream = self._target, self._stream
        target.take(delta)
        pace_s = self._state.stream_pace_s
        if pace_s != self._pace_s:
            self._pace_s = pace_s
            self._choice.pace(pace_s)
        if stream.behind:
            return None if target.pending < HELD_BYTES else self._send_later()
        if target.weight > _INLINE_LOGPROBS:
            return self._send_later()
        chunk = target.chunk()
        if chunk:
            stream.push(chunk)
        return None

    async def _send_later(self) -> None:
        await _caught_up(self._stream, self._state)
        chunk = await _off_loop(self._state, self._target.weight, self._target.chunk)
        if chunk:
            self._stream.push(chunk)


async def _caught_up(stream: EventStream, state: AppState) -> None:
    """Waits for a reader that is so far behind that its slot waits with it: not for long while others wait for a slot."""
    while stream.behind:
        caught_up = await stream.room(CROWDED_WRITE_S)
        if not caught_up and any(engine.queued for engine in state.scheduler.engines):
            stream.cut_off()


def _filled(frame: bytes, choices: Sequence[bytes]) -> list[bytes]:
    """The pieces of the JSON object `frame` with `choices` in it; put together, large ones would be copied at once."""
    head, place, tail = frame.partition(b'"choices":[]')  # in a string its quotes would be escaped
    if not place:
        return [frame]
    pieces = [head, b'"choices":[']
    for index, choice in enumerate(choices):
        pieces += [b",", choice] if index else [choice]
    return [*pieces, b"]", tail]


def _encoded(make: Callable[[], object]) -> bytes:
    return msgspec.json.encode(make())


async def _off_loop(state: AppState, weight: int, work: Callable[[], _Result]) -> _Result:
    """The result of `work`: at once when there is little to do, else from the scribe's thread."""
    if weight <= _INLINE_LOGPROBS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(state.scribe, work)


def _note(request: web.Request, state: AppState, choices: Choices) -> dict[str, Any]:
    """The usage; also for the headers and the log line."""
    context = current(request)
    outcomes = choices.outcomes
    usage = usage_of(outcomes, moe=state.scheduler.info.experts_per_token > 0, profile=choices.profile)
    context.server_timing = server_timing(outcomes)
    context.facts.update(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        finish_reasons=dict(Counter(outcome.finish_reason for outcome in outcomes)),
        **times([outcome.timing_ms for outcome in outcomes if outcome.timing_ms is not None]),
    )
    if "experts" in usage:
        context.facts["experts"] = {name: usage["experts"][name] for name in LOGGED_EXPERTS}
    return usage


def _begun(state: AppState, choices: Choices) -> dict[str, Any]:
    """For the log line, of requests that end early as well."""
    tokens = [choice.tokens[1] for choice in choices.all]
    return {
        "model": state.scheduler.info.model_id,
        **named(choices.profile),
        "choices": len(tokens),
        "prompt_tokens": choices.tokens - sum(tokens),
        "completion_tokens": sum(tokens),
    }
