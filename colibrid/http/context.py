"""What is known of one HTTP request while it is answered."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from colibrid.errors import RequestError
    from colibrid.http.credentials import Key
    from colibrid.http.quota import Meter

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


@dataclass(slots=True)
class RequestContext:
    """Owned by the middleware; routes add what headers and the log line should say."""

    id: str
    started: float = field(default_factory=time.perf_counter)
    key: Key | None = None  # that it came with; None where there are no keys
    meter: Meter | None = None  # what the key has used
    page: str | None = None  # origin of another's web page that may read the answer
    ignored: list[str] = field(default_factory=list)  # fields unknown to the API
    server_timing: str | None = None
    error: RequestError | None = None  # why it was not answered as asked
    facts: dict[str, Any] = field(default_factory=dict)  # of the log line

    @property
    def tenant(self) -> str:
        """Who may share computed prompts; empty where there are no keys."""
        return "" if self.key is None else self.key.tenant

    @property
    def elapsed_ms(self) -> float:
        """Since the request's head was read."""
        return (time.perf_counter() - self.started) * 1000


_KEY = web.RequestKey("context", RequestContext)


def request_id(request: web.BaseRequest) -> str:
    """What a request is called: by its client, if that is harmless, else by us."""
    asked = request.headers.get("x-request-id", "")
    return asked if _SANE_ID.match(asked) else f"req-{secrets.token_hex(12)}"


def open_context(request: web.Request) -> RequestContext:
    """Makes the context of `request`; the client's own x-request-id is kept when it is harmless."""
    context = RequestContext(request_id(request))
    request[_KEY] = context
    return context


def context_of(request: web.BaseRequest) -> RequestContext | None:
    """The context of `request`; none for requests that never reached the middleware."""
    return request.get(_KEY)


def current(request: web.Request) -> RequestContext:
    """The context of a request that a route is answering."""
    return request[_KEY]
