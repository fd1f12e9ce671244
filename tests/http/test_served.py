"""colibrid.http.served: counts with fixed places."""

from __future__ import annotations

import asyncio
import time

import pytest

from colibrid.errors import EngineFaultError, OverloadedError, RequestError
from colibrid.http.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    ForbiddenError,
    InternalError,
    InvalidKeyError,
    MediaTypeError,
    MethodError,
    NotFoundError,
    RateLimitError,
    RequestTimeoutError,
)
from colibrid.http.served import REASONS, Served, reason_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OverloadedError("x", code="server_is_overloaded", retry_after_s=1), "overloaded"),
        (OverloadedError("x", code="model_loading", retry_after_s=1), "loading"),
        (OverloadedError("x", code="draining", retry_after_s=1), "draining"),
        (EngineFaultError("x"), "failed"),
        (InternalError("id"), "failed"),
        (InvalidKeyError(), "key"),
        (ForbiddenError("x"), "forbidden"),
        (NotFoundError("x"), "not_found"),
        (MethodError("PUT", frozenset({"GET"})), "not_found"),
        (BodyTimeoutError("x"), "timeout"),
        (RequestTimeoutError(1), "timeout"),
        (BodyTooLargeError("x"), "too_large"),
        (RateLimitError("x", retry_after_s=1), "rate_limit"),
        (MediaTypeError("x"), "invalid"),
        (RequestError("x", code="whatever"), "invalid"),
    ],
)
def test_reasons(error: RequestError, reason: str) -> None:
    """Every error has one of the listed reasons."""
    assert reason_of(error) == reason
    assert reason in REASONS


def test_answers_have_fixed_places() -> None:
    """Known routes count by themselves, all others and odd statuses together; nothing makes a new place."""
    served = Served()
    served.count_routes(["/a", "/b", "/a"])
    places = set(served.answers)
    served.answered("/a", 200)
    served.answered("/a", 499)
    for route, status in ((None, 404), ("/made/up", 404), ("/a", 999), ("/a", 0)):
        served.answered(route, status)
    assert set(served.answers) == places
    assert (served.answers["/a", "2xx"], served.answers["/a", "4xx"]) == (1, 1)
    assert (served.answers["other", "4xx"], served.answers["other", "5xx"]) == (2, 2)


async def test_a_blocked_loop_is_seen() -> None:
    """Lag is about 0 while the loop turns, and as long as it was held otherwise."""
    served = Served()
    watching = asyncio.create_task(served.watch_loop(0.01))
    await asyncio.sleep(0.05)
    time.sleep(0.3)  # noqa: ASYNC251 - that is what shall be seen
    await asyncio.sleep(0.05)
    watching.cancel()
    assert sum(served.lag_s.counts) > 2
    assert served.lag_s.sum >= 0.25
