"""The error contract."""

from __future__ import annotations

import json

import pytest

from colibrid.errors import EngineFaultError, OverloadedError, RequestError
from colibrid.http.errors import MethodError, error_headers, error_object, error_response, shown


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("m", param="p", code="c"), 400),
        (RequestError("m"), 400),
        (OverloadedError("m", code="c", retry_after_s=1), 503),
        (EngineFaultError("m"), 500),
        (MethodError("GET", frozenset({"POST"})), 405),
    ],
)
def test_all_four_keys_always(error: RequestError, status: int) -> None:
    """Every error has message, type, param and code, whatever it knows."""
    response = error_response(error)
    assert response.status == status
    assert isinstance(response.body, bytes)
    assert set(json.loads(response.body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("seconds", "header", "milliseconds"), [(0.001, "1", "1"), (1.2, "2", "1200"), (30, "30", "30000")]
)
def test_retry_after_is_rounded_up(seconds: float, header: str, milliseconds: str) -> None:
    """Retry-After is never zero and never too early."""
    headers = error_headers(OverloadedError("m", code="c", retry_after_s=seconds))
    assert (headers["Retry-After"], headers["retry-after-ms"]) == (header, milliseconds)


def test_values_are_shown_short_and_on_one_line() -> None:
    """A client's value in a message is JSON, cut, and cannot break lines."""
    assert shown("a\nb") == '"a\\nb"'
    assert len(shown("x" * 1000)) < 100
    assert shown(object()) == "a value that JSON cannot hold"
    nested: object = 1
    for _ in range(5000):
        nested = [nested]
    assert len(shown(nested)) < 100


def test_error_object_keeps_what_is_known() -> None:
    """param and code are given as they are."""
    error = RequestError("m", param="p", code="c")
    assert error_object(error)["error"] == {"message": "m", "type": "invalid_request_error", "param": "p", "code": "c"}
