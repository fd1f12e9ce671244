"""One client connection, as aiohttp's RequestHandler but for its errors: bytes that are no HTTP get the error contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from colibrid.errors import RequestError
from colibrid.http.errors import error_response

if TYPE_CHECKING:
    from aiohttp.web_request import BaseRequest
    from aiohttp.web_server import Server

_BROKEN = 500


class Connection(web.RequestHandler):
    """Answers what never reaches the application."""

    __slots__ = ("bound",)

    def __init__(self, manager: Server, bound: str, **options: Any) -> None:
        """`bound`: the address that the socket was bound to, which it has been accepted from."""
        super().__init__(manager, **options)
        self.bound = bound

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to a request that could not be read, or that broke outside the application. Closes the connection.

        aiohttp's own message is left out, as it holds what the client sent.
        """
        super().handle_error(request, status, exc, message)  # logs; raises if an answer has begun already
        response = error_response(_unread(status) if status < _BROKEN else _broken(status))
        response.headers["Server"] = "colibrid"
        response.force_close()
        return response

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends a response. Only what never reached the middleware is still one of aiohttp's exceptions."""
        if isinstance(resp, web.HTTPException):
            resp = error_response(_refused(resp))
            resp.force_close()
        return await super().finish_response(request, resp, start_time)


def _unread(status: int) -> RequestError:
    error = RequestError(
        "The request is not valid HTTP/1.1, or its head is too large (at most 8190 bytes a line, 128 headers); correct it.",
        code="invalid_http",
    )
    error.status = status
    return error


def _refused(found: web.HTTPException) -> RequestError:
    if isinstance(found, web.HTTPExpectationFailed):
        error = RequestError("Of the header Expect, only the value 100-continue is known; leave it out.")
    else:
        error = RequestError(f"The request cannot be answered ({found.reason}); correct it.")
    error.status = found.status
    return error


def _broken(status: int) -> RequestError:
    error = RequestError("The server failed to answer; try again.", code="internal_error")
    error.status = status
    error.type = "server_error"
    return error
