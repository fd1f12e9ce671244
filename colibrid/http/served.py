"""What the HTTP side counts of its own: answers by route, refusals by reason, how late the event loop is.

Every count has its place from the start, so that nothing a client sends makes a new one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from colibrid.batch.measures import SHORT_S, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable

    from colibrid.errors import RequestError

OTHER = "other"  # routes and statuses that are none of ours
STATUSES = ("2xx", "3xx", "4xx", "5xx")
_BY_CODE = {"server_is_overloaded": "overloaded", "model_loading": "loading", "draining": "draining"}
_BY_STATUS = {
    401: "key",
    403: "forbidden",
    404: "not_found",
    405: "not_found",
    408: "timeout",
    413: "too_large",
    429: "rate_limit",
    504: "timeout",
}
REASONS = (*dict.fromkeys([*_BY_CODE.values(), *_BY_STATUS.values()]), "invalid", "failed")
_LAG_INTERVAL_S = 0.25


def reason_of(error: RequestError) -> str:
    """One of REASONS."""
    known = _BY_CODE.get(error.code or "") or _BY_STATUS.get(error.status)
    return known or ("failed" if error.status >= 500 else "invalid")


class Served:
    """See the module's docstring. Lives on the event loop."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], int] = {}  # by route and kind of status
        self.refusals = dict.fromkeys(REASONS, 0)
        self.lag_s = Histogram(SHORT_S)

    def count_routes(self, routes: Iterable[str]) -> None:
        """Patterns of paths by which answers are counted; once, before the first answer."""
        self.answers = {(route, status): 0 for route in (*dict.fromkeys(routes), OTHER) for status in STATUSES}

    def answered(self, route: str | None, status: int) -> None:
        """A request of a route of ours, or None, was answered."""
        key = (route or OTHER, f"{status // 100}xx")
        if key not in self.answers:
            key = (OTHER, key[1] if key[1] in STATUSES else STATUSES[-1])
        self.answers[key] += 1

    def refused(self, error: RequestError) -> None:
        """A request was not answered as asked."""
        self.refusals[reason_of(error)] += 1

    def overloaded(self, route: str) -> None:
        """A request of a route was refused before anything was made of it."""
        self.answered(route, 503)
        self.refusals["overloaded"] += 1

    async def watch_loop(self, interval_s: float = _LAG_INTERVAL_S) -> None:
        """Measure how much later than asked the event loop comes back; runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            wanted = loop.time() + interval_s
            await asyncio.sleep(interval_s)
            self.lag_s.add(max(loop.time() - wanted, 0.0))
