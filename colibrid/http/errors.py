"""The error contract: `{"error": {"message", "type", "param", "code"}}`, all four keys always."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from colibrid.errors import OverloadedError, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHOWN_CHARS = 80
_PARAM_CHARS = 200  # a name that the client made up may be part of it


class InvalidKeyError(RequestError):
    """No key, or none that is known: 401."""

    status = 401

    def __init__(
        self, message: str = "Missing or incorrect API key; send the header 'Authorization: Bearer <key>'."
    ) -> None:
        super().__init__(message, code="invalid_api_key")


class ForbiddenError(RequestError):
    """Host or Origin is not one of ours, or the key does not open this: 403."""

    status = 403


class NotFoundError(RequestError):
    """No such route or model: 404."""

    status = 404


class MethodError(RequestError):
    """The route exists, the method does not: 405."""

    status = 405

    def __init__(self, method: str, allowed: frozenset[str]) -> None:
        names = ", ".join(sorted(allowed))
        super().__init__(f"This route does not answer {shown(method)}; use {names}.", code="method_not_allowed")
        self.allowed = names


class BodyTimeoutError(RequestError):
    """The body did not arrive in time: 408."""

    status = 408


class BodyTooLargeError(RequestError):
    """The body is larger than server.max_body_bytes: 413."""

    status = 413


class MediaTypeError(RequestError):
    """The body is not plain JSON: 415."""

    status = 415


class RateLimitError(RequestError):
    """The key has used up what it may: 429 with Retry-After."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, code="slow_down")
        self.retry_after_s = retry_after_s


class RequestTimeoutError(RequestError):
    """The answer took longer than the request's timeout_s: 504."""

    status = 504
    type = "server_error"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"The answer was not complete within timeout_s = {timeout_s:g} s; ask for fewer tokens, or allow more time.",
            param="timeout_s",
            code="timeout",
        )


class InternalError(RequestError):
    """A mistake of ours: 500. Details go to the log only."""

    status = 500
    type = "server_error"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"The server failed to answer; report request id {request_id} to its operator, and try again.",
            code="internal_error",
        )


def shown(value: object) -> str:
    """A client's value as error messages show it: JSON, shortened, on one line."""
    try:
        text = msgspec.json.encode(_head_of(value)).decode("utf-8", "replace")
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        text = "a value that JSON cannot hold"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _head_of(value: object) -> object:
    """As much of `value` as can be shown: to write down all of a large one would take long."""
    if isinstance(value, str):
        return value[: _SHOWN_CHARS + 1]
    if isinstance(value, list):
        return [_head_of(entry) for entry in value[: _SHOWN_CHARS // 2]]
    if isinstance(value, dict):
        return {
            str(key)[: _SHOWN_CHARS + 1]: _head_of(entry) for key, entry in islice(value.items(), _SHOWN_CHARS // 4)
        }
    return value


def error_object(error: RequestError) -> dict[str, object]:
    """What a body or an SSE event says about `error`."""
    param = None if error.param is None else error.param[:_PARAM_CHARS]
    return {"error": {"message": error.message, "type": error.type, "param": param, "code": error.code}}


def error_headers(error: RequestError) -> Mapping[str, str]:
    """Headers that belong to `error`."""
    if isinstance(error, OverloadedError | RateLimitError):
        headers = {
            "Retry-After": str(max(1, math.ceil(error.retry_after_s))),
            "retry-after-ms": str(max(1, math.ceil(error.retry_after_s * 1000))),
        }
        if error.code == "draining":
            headers["Connection"] = "close"
        return headers
    if isinstance(error, MethodError):
        return {"Allow": error.allowed}
    if isinstance(error, InvalidKeyError):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def error_response(error: RequestError) -> web.Response:
    """`error` as a whole response."""
    response = web.Response(
        status=error.status,
        body=msgspec.json.encode(error_object(error)),
        content_type="application/json",
        headers=error_headers(error),
    )
    if isinstance(error, OverloadedError) and error.code == "draining":
        response.force_close()
    return response
