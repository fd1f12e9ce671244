"""One client connection, as aiohttp's RequestHandler but for its errors: bytes that are no HTTP get the error contract."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import structlog
from aiohttp import web

from colibrid.errors import RequestError
from colibrid.http.errors import error_response
from colibrid.http.limits import HEAD_TIMEOUT_S, WRITE_HIGH, WRITE_LOW, WRITE_TIMEOUT_S
from colibrid.http.origin import address_of

if TYPE_CHECKING:
    from aiohttp.web_request import BaseRequest
    from aiohttp.web_server import Server

    from colibrid.http.gate import Gate

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_BROKEN = 500
_TURN_AWAY_S = 1.0  # for the client to take the answer and close


class Connection(web.RequestHandler):
    """Answers what never reaches the application, and keeps the time of heads."""

    __slots__ = ("_address", "_caught_up", "_gate", "_head_timer", "_stall_timer", "_told", "_turned_away", "bound")

    def __init__(self, manager: Server, bound: str, gate: Gate | None, **options: Any) -> None:
        """`bound`: the address that the socket was bound to, which it has been accepted from."""
        super().__init__(manager, **options)
        self.bound = bound
        self._gate = gate
        self._address: str | None = None  # that counts at the gate
        self._turned_away = False
        self._told = False  # with an answer, which takes a moment
        self._head_timer: asyncio.TimerHandle | None = None
        self._caught_up: asyncio.Future[None] | None = None  # while the client takes less than it is sent ...
        self._stall_timer: asyncio.TimerHandle | None = None  # ... it has so long

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected; one that the gate does not let in is told so and closed."""
        if self._gate is not None:
            address = address_of(transport.get_extra_info("peername"))
            refusal = self._gate.enter(address)
            if refusal is not None:
                self._turn_away(transport, refusal, self._gate)
                return
            self._address = address
        cast("asyncio.Transport", transport).set_write_buffer_limits(high=WRITE_HIGH, low=WRITE_LOW)
        super().connection_made(transport)
        self._head_begins()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client is gone."""
        self._head_ends()
        self._stall_ends()
        if self._address is not None and self._gate is not None:
            self._gate.leave(self._address)
            self._address = None
        if self._told and self._gate is not None:
            self._told = False
            self._gate.told()
        if not self._turned_away:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a client. The head of a request must be complete HEAD_TIMEOUT_S after its first byte."""
        if self._turned_away:
            return
        super().data_received(data)
        if not self._waits:
            self._head_ends()
        elif self._head_timer is None:
            self._head_begins()

    def pause_writing(self) -> None:
        """More waits for the client than WRITE_HIGH: it has WRITE_TIMEOUT_S to take all but WRITE_LOW of it."""
        super().pause_writing()
        self._caught_up = self._loop.create_future()
        self._stall_timer = self._loop.call_later(WRITE_TIMEOUT_S, self.cut_off, WRITE_TIMEOUT_S)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._stall_ends()
        super().resume_writing()

    async def room(self, within_s: float | None = None) -> bool:
        """Waits until the client has caught up, or so long; whether it has. ConnectionError when it is gone.

        Others may wait for the same. A timeout that cancels would cost several times as much, for each slow reader.
        """
        caught_up = True
        if self._caught_up is not None:
            caught_up = bool((await asyncio.wait((self._caught_up,), timeout=within_s))[0])
        if self.transport is None:
            raise ConnectionResetError("the client is gone")
        return caught_up

    def cut_off(self, after_s: float) -> None:
        """Ends the connection of a client that has been behind for so long."""
        if self.transport is not None:
            _log.info("slow_reader_cut", seconds=after_s)
            self.transport.abort()

    def _stall_ends(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if self._caught_up is not None:
            self._caught_up.set_result(None)
            self._caught_up = None

    @property
    def _waits(self) -> bool:
        """True while no request is there to be answered."""
        if self._request_count == 0:  # maybe before aiohttp's own task has begun to wait
            return True
        return self._waiter is not None and not self._waiter.done()

    def _head_begins(self) -> None:
        self._head_timer = self._loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_ends(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._waits:
            self.force_close()

    def _turn_away(self, transport: asyncio.BaseTransport, refusal: bytes, gate: Gate) -> None:
        """What the client sends meanwhile is read and forgotten: closing at once would take the answer from it."""
        writing = cast("asyncio.Transport", transport)  # uvloop's own class is no child of it
        self._turned_away = True
        self._told = gate.tell()
        if not self._told:
            writing.abort()
            return
        writing.write(refusal)
        if writing.can_write_eof():
            writing.write_eof()
            self._loop.call_later(_TURN_AWAY_S, writing.abort)
        else:
            writing.close()

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to a request that could not be read, or that broke outside the application. Closes the connection.

        aiohttp's own message is left out, as it holds what the client sent.
        """
        if isinstance(exc, UnicodeError) and "Expect" in request.headers:
            # aiohttp writes that header's value into its refusal, and breaks where it is no UTF-8.
            response = error_response(_refused(web.HTTPExpectationFailed()))
        else:
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
