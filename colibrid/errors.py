"""Errors that cross module borders. They import nothing of ours.

Every message ends with what to do next. Messages may reach HTTP clients unless the class says otherwise,
so they never hold a path, an address, a class name or a traceback.
"""

from __future__ import annotations


class ColibridError(Exception):
    """Base of all errors that a user can cause or must be told about."""


class ConfigError(ColibridError):
    """A setting is wrong. Operator-facing (may name files); the process exits with 78."""


class ModelError(ColibridError):
    """A checkpoint or pack cannot be used. Operator-facing (may name files); exits with 78."""


class EngineError(ColibridError):
    """The engine could not be started or died."""


class RequestError(ColibridError):
    """A request cannot be served as asked: HTTP 400 unless `status` says otherwise.

    `param` is the name of the offending field or None; `code` is OpenAI's error code or None.
    """

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class OverloadedError(RequestError):
    """The queue is full, the engine is loading or draining: 503 with Retry-After (seconds)."""

    status = 503
    type = "server_error"

    def __init__(self, message: str, *, code: str, retry_after_s: float) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class EngineFaultError(RequestError):
    """The engine died or failed this request after it was accepted: 500."""

    status = 500
    type = "server_error"
