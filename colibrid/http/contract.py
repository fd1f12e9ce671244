"""What every request of an application passes through besides its own checks: the error contract, one log line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from colibrid.errors import RequestError
from colibrid.http.errors import InternalError, MethodError

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.http.context import RequestContext
    from colibrid.http.errors import NotFoundError

_PATH = 200  # characters
_NAME = 64
_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def as_contract(
    error: Exception, request: web.Request, context: RequestContext, no_route: Callable[[web.Request], NotFoundError]
) -> RequestError:
    """Any exception as an error of the contract; `no_route` tells where else to go."""
    if isinstance(error, RequestError):
        found = error
    elif isinstance(error, web.HTTPNotFound):
        found = no_route(request)
    elif isinstance(error, web.HTTPMethodNotAllowed):
        found = MethodError(request.method, frozenset(error.allowed_methods))
    elif isinstance(error, web.HTTPClientError):
        found = RequestError(f"The request cannot be answered ({error.reason}); correct it.")
        found.status = error.status
    else:
        _log.exception("request_broken", request_id=context.id, path=request.path)
        found = InternalError(context.id)
    context.error = found
    return found


def forget_frames(error: BaseException) -> None:
    """Lets go of the calls that `error` and those behind it came through.

    They hold the request, whose context holds the error: a circle that only the garbage collector would find, and under
    overload it is made of hundreds of objects a second that have grown old meanwhile.
    """
    behind: BaseException | None = error
    while behind is not None and behind.__traceback__ is not None:
        behind.__traceback__ = None
        behind = behind.__cause__ or behind.__context__


def log_request(request: web.Request, context: RequestContext, status: int, *, quiet: bool = False) -> None:
    """The one canonical line of a request; a quiet one is of interest when debugging only.

    Holds nothing of prompts, answers and keys; what clients choose is cut, so that the line is always whole.
    """
    log = _log.debug if quiet else _log.info
    if context.ignored:
        context.facts["ignored"] = [name[:_NAME] for name in context.ignored[:20]]
    if context.key is not None:
        context.facts["key"] = context.key.id
    if context.error is not None:
        context.facts["error"] = context.error.code or context.error.type
    log(
        "request",
        request_id=context.id,
        method=request.method,
        path=request.path[:_PATH],
        status=status,
        ms=round(context.elapsed_ms, 1),
        **context.facts,
    )
