"""colibrid.http.quota, by itself and over HTTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibrid.batch.request import GenerateRequest, Sampling
from colibrid.config.settings import KeyLimits
from colibrid.errors import OverloadedError, RequestError
from colibrid.http.auth import KeyRing
from colibrid.http.credentials import Key, digest_of
from colibrid.http.errors import RateLimitError
from colibrid.http.quota import Bucket, Meter, Meters, Spending, Window, limit_headers, served_as

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.http.conftest import Server

KEY = "secret-key-1"
SENT = {"Authorization": f"Bearer {KEY}"}


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def request_of(prompt: int = 4, max_tokens: int = 6, **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", prompt_ids=(5,) * prompt, max_tokens=max_tokens, sampling=Sampling(seed=0), **fields
    )


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 10)), max_size=60))
def test_buckets_hold_over_any_time(steps: list[tuple[float, int]]) -> None:
    """Whatever is asked for when, no more is taken than what was there and has come in; waiting helps as told."""
    bucket, now, taken = Bucket(10, 60.0, 0.0), 0.0, 0
    for pause, amount in steps:
        now += pause
        wait = bucket.wait_s(amount, now)
        if wait == 0:
            bucket.take(amount)
            taken += amount
        else:
            assert bucket.wait_s(amount, now + wait * 1.0001 + 1e-6) == 0
            now += wait * 1.0001 + 1e-6
        assert taken <= 10 + now / 6 + 1e-6
        assert 0 <= bucket.level(now).remaining <= 10


def test_windows_begin_anew() -> None:
    """A window's budget is back, as a whole, a period after its first use."""
    window = Window(10, 100.0)
    assert window.wait_s(8, 50.0) == 0
    window.take(8)
    assert window.wait_s(3, 60.0) == 90.0
    assert window.level(60.0) == (10, 2, 90.0)
    assert window.wait_s(10, 150.0) == 0
    window.take(10)
    window.give_back(30, 150.0)  # of the period before
    assert window.level(160.0).remaining == 0
    window.give_back(30, 250.0)
    assert window.level(160.0).remaining == 10


def test_requests_a_minute(clock: Clock) -> None:
    """The key's requests of a minute go through at once, the next one when the first place is free again."""
    meter = Meter(KeyLimits(requests_per_minute=3), clock)
    for _ in range(3):
        with meter.request():
            pass
    with pytest.raises(RateLimitError, match="3 requests a minute") as caught, meter.request():
        pass
    assert caught.value.retry_after_s == pytest.approx(20)
    clock.now += 20
    with meter.request():
        pass


def test_requests_at_once(clock: Clock) -> None:
    """Requests that run count until they end, however they end."""
    meter = Meter(KeyLimits(requests_at_once=1), clock)
    with pytest.raises(ZeroDivisionError), meter.request():
        with pytest.raises(RateLimitError, match="1 at once"), meter.request():
            pass
        raise ZeroDivisionError
    assert meter.running == 0
    with meter.request():
        pass


def test_tokens_are_paid_in_advance_and_given_back(clock: Clock) -> None:
    """A request pays for all that it could use, and gets back what it did not; by minute and by day."""
    meter = Meter(KeyLimits(tokens_per_minute=100, tokens_per_day=150), clock)
    with Spending(meter, [request_of(10, 20, n=2)]) as spending:
        assert meter.levels()[1] is not None
        assert meter.levels()[1] == (100, 50, pytest.approx(30))
        spending.used = 12
        with pytest.raises(RateLimitError, match="100 tokens a minute, and 50 are left") as caught:
            Spending(meter, [request_of(20, 40)])
        assert caught.value.retry_after_s == pytest.approx(6)
    tokens = meter.levels()[1]
    assert tokens is not None
    assert tokens.remaining == 88
    clock.now += 60
    with Spending(meter, [request_of(50, 50)]) as spending:
        spending.used = 100
    clock.now += 60
    with pytest.raises(RateLimitError, match="150 tokens a day, and 38 are left"):
        Spending(meter, [request_of(30, 9)])
    with pytest.raises(RequestError, match="100 a minute") as never:
        Spending(meter, [request_of(60, 41)])
    assert (never.value.status, never.value.param) == (400, "max_tokens")


def test_failed_requests_cost_nothing(clock: Clock) -> None:
    """Where nothing was used, all is given back."""
    meter = Meter(KeyLimits(tokens_per_minute=100), clock)
    with pytest.raises(OverloadedError), Spending(meter, [request_of(50, 50)]):
        raise OverloadedError("full", code="x", retry_after_s=1)
    tokens = meter.levels()[1]
    assert tokens is not None
    assert tokens.remaining == 100


def test_priorities() -> None:
    """A key's best priority is what its requests get by default; a better one is refused, a worse one taken."""
    meter = Meter(KeyLimits(priority=5), Clock())
    found = served_as(meter, [request_of(), request_of(priority=7)], "who")
    assert [(one.priority, one.tenant) for one in found] == [(5, "who"), (7, "who")]
    with pytest.raises(RequestError, match="priority = 4 is below 5"):
        served_as(meter, [request_of(priority=4)], "")
    assert served_as(Meter(KeyLimits(priority=-5), Clock()), [request_of()], "")[0].priority == 0
    assert served_as(None, [request_of(priority=-9)], "")[0].priority == -9


def test_meters_follow_the_keys(clock: Clock) -> None:
    """What a key has used outlives a reload, with its new limits; a key that is gone takes its meter along."""
    meters = Meters(KeyLimits(requests_per_minute=2), clock)
    key = Key(id="a", digest=b"1")
    with meters.of(key).request(), meters.of(key).request():
        pass
    other = Key(id="a", digest=b"2", limits=KeyLimits(requests_per_minute=3, tokens_per_day=10))
    meters.renew([other], KeyLimits())
    assert dict(limit_headers(meters.of(other)))["x-ratelimit-remaining-requests"] == "1"
    assert dict(limit_headers(meters.of(other)))["x-ratelimit-limit-tokens"] == "10"
    meters.renew([], KeyLimits())
    assert dict(limit_headers(meters.of(other)))["x-ratelimit-remaining-requests"] == "3"
    assert dict(limit_headers(meters.of(Key(id="b", digest=b"3")))) == {}


async def limited(make_server: Callable[..., Any], reply: Any = "Oslo.", **limits: int) -> Server:
    key = Key(id="a", digest=digest_of(KEY), limits=KeyLimits(**limits))
    server: Server = await make_server(reply, ring=KeyRing([key]))
    server.state.meters._clock = Clock()  # it stands: nothing comes in while requests take their time
    return server


async def test_too_many_requests_over_http(make_server: Callable[..., Any]) -> None:
    """Beyond its requests a key gets 429 with Retry-After, and headers tell the budget on every answer."""
    server = await limited(make_server, requests_per_minute=2)
    answers = [await server.post("/v1/completions", {"prompt": "Hi"}, **SENT) for _ in range(3)]
    assert [one.status for one in answers] == [200, 200, 429]
    assert [one.headers["x-ratelimit-remaining-requests"] for one in answers] == ["1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert answers[2].error["type"] == "rate_limit_error"
    assert answers[2].error["code"] == "slow_down"
    assert answers[2].headers["Retry-After"] == "30"
    assert len(server.service.seen) == 2
    assert (await server.get("/v1/models", **SENT)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_over_http(make_server: Callable[..., Any], stream: bool) -> None:
    """What an answer did not use of its max_tokens is there again when it ends; then 429 names the numbers."""
    server = await limited(make_server, tokens_per_minute=1000)
    body = {"prompt": [5] * 10, "max_tokens": 500, "stream": stream}
    first = await server.post("/v1/completions", body, **SENT)
    assert first.status == 200
    used = 10 + len(server.service.reply)
    again = await server.post("/v1/completions", body | {"stream": False}, **SENT)
    assert int(again.headers["x-ratelimit-remaining-tokens"]) in range(1000 - 2 * used - 500, 1000 - 2 * used + 1)
    refused = await server.post("/v1/completions", {"prompt": [5] * 500, "max_tokens": 490}, **SENT)
    assert (refused.status, refused.error["code"]) == (429, "slow_down")
    assert "1000 tokens a minute" in refused.error["message"]
    never = await server.post("/v1/completions", {"prompt": [5] * 600, "max_tokens": 900}, **SENT)
    assert (never.status, never.error["param"]) == (400, "max_tokens")


async def test_embeddings_are_paid_for(make_server: Callable[..., Any]) -> None:
    """Texts to embed count as prompts do."""
    server = await limited(make_server, tokens_per_day=100)
    assert (await server.post("/v1/embeddings", {"input": [[5] * 30, [6] * 30]}, **SENT)).status == 200
    refused = await server.post("/v1/embeddings", {"input": [[5] * 50]}, **SENT)
    assert refused.status == 429
    assert refused.headers["x-ratelimit-remaining-tokens"] == "40"


async def test_requests_at_once_over_http(make_server: Callable[..., Any]) -> None:
    """While one answer runs the next is 429; when its client has left there is room again."""
    server = await limited(make_server, reply=[5] * 2000, requests_at_once=1)
    server.service.pause_s = 0.05
    url, body = f"{server.url}/v1/completions", {"prompt": "Hi", "stream": True, "max_tokens": 1000}
    async with server.session.post(url, json=body, headers=SENT) as response:
        await response.content.readline()
        refused = await server.post("/v1/completions", {"prompt": "Hi"}, **SENT)
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
    server.service.pause_s = 0.0
    for _ in range(6000):
        answer = await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, **SENT)
        if answer.status == 200:
            break
        await asyncio.sleep(0.01)
    assert answer.status == 200


async def test_priority_over_http(make_server: Callable[..., Any]) -> None:
    """The scheduler gets the key's priority; a better one is 400 by name."""
    server = await limited(make_server, priority=3)
    assert (await server.post("/v1/completions", {"prompt": "Hi"}, **SENT)).status == 200
    assert server.service.last.priority == 3
    refused = await server.post("/v1/completions", {"prompt": "Hi", "priority": 1}, **SENT)
    assert (refused.status, refused.error["param"]) == (400, "priority")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/generate"])
async def test_no_room_is_told_before_the_body_comes(server: Server, path: str) -> None:
    """When the queue is full a request is 503 with Retry-After as soon as its head is there, and costs the key nothing."""
    server.service.refusal = OverloadedError("the queue is full", code="server_is_overloaded", retry_after_s=2.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(60):
        found = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert found.startswith(b"HTTP/1.1 503")
    assert b"Retry-After: 3\r\n" in found
    assert not server.service.seen


def test_nothing_of_a_day_is_given_back_to_the_next(clock: Clock) -> None:
    """What was paid before midnight and ends after it leaves the new day's budget as it is."""
    meter = Meter(KeyLimits(tokens_per_day=100), clock)
    early = Spending(meter, [request_of(10, 90)])
    clock.now += 86400.0
    meter.pay(80)
    with early:
        early.used = 1
    with pytest.raises(RateLimitError, match="20 are left"):
        meter.pay(21)
    meter.pay(20)
