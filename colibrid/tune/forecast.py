"""How long a run will take: what is left of each kind of work, times what that kind has taken so far.

Nothing is guessed: as long as a kind that is still to come has never been seen, only a lower bound is known, and said.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from colibrid.tune.progress import Progress

    Report = Callable[[int, int, str], None]  # of what is done, of all, and what is going on

_PARTS = 1000  # of one piece of work, in reports
_MINUTE = 60
_HOUR = 3600


class Left(NamedTuple):
    """Seconds."""

    seconds: float
    whole: bool  # False: at least so many

    def __str__(self) -> str:
        least = "" if self.whole else "more than "
        if self.seconds < 1 and not self.whole:
            return "unknown time left"
        if self.seconds < _MINUTE:
            return f"{least}{max(1, round(self.seconds))} s left"
        if self.seconds < _HOUR:
            return f"{least}{self.seconds / _MINUTE:.0f} min left"
        return f"{least}{self.seconds / _HOUR:.1f} h left"


class Forecast:
    """Counts pieces of work by kind. One piece is under way at a time."""

    def __init__(self, report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._planned: dict[str, int] = {}
        self._seconds: dict[str, list[float]] = {}
        self._done = 0

    def plan(self, kind: str, pieces: int) -> None:
        """So many more are to be done."""
        self._planned[kind] = self._planned.get(kind, 0) + pieces

    def drop(self, kind: str, pieces: int = 1) -> None:
        """So many are not needed after all."""
        assert self.planned(kind) >= pieces, "only what was planned is dropped"
        self._planned[kind] = self.planned(kind) - pieces

    def planned(self, kind: str) -> int:
        """Pieces of this kind that are left."""
        return self._planned.get(kind, 0)

    @contextmanager
    def piece(self, kind: str, what: str) -> Iterator[Progress]:
        """One piece is done inside; what is given says how far it is."""
        assert self._planned[kind] > 0, "only what was planned is done"
        began = self._clock()
        self._tell(kind, began, 0.0, what)

        def progress(done: int, total: int) -> None:
            self._tell(kind, began, done / total if total else 1.0, what)

        yield progress
        self._planned[kind] -= 1
        self._done += 1
        self._seconds.setdefault(kind, []).append(self._clock() - began)

    def left(self) -> Left:
        """Of all that is planned, as if nothing were under way."""
        return self._left({})

    def _left(self, under_way: dict[str, float]) -> Left:
        """under_way: seconds that the piece of a kind still takes, which is among those that are planned."""
        seconds, whole = 0.0, True
        for kind, pieces in self._planned.items():
            rest = pieces - (kind in under_way)
            seconds += under_way.get(kind, 0.0)
            if rest <= 0:
                continue
            if kind in self._seconds:
                seconds += rest * sum(self._seconds[kind]) / len(self._seconds[kind])
            else:
                whole = False
        return Left(seconds, whole)

    def _tell(self, kind: str, began: float, share: float, what: str) -> None:
        passed = self._clock() - began
        known = self._seconds.get(kind)
        if share > 0:
            rest = passed / share - passed
        elif known is not None:
            rest = max(0.0, sum(known) / len(known) - passed)
        else:
            rest = None
        left = self._left({} if rest is None else {kind: rest})
        total = self._done + sum(self._planned.values())
        self._report(int(_PARTS * (self._done + min(share, 1.0))), _PARTS * total, f"{left}: {what}")


def pieces(parts: int) -> str:
    """The numbers of a report for people."""
    return f"{parts / _PARTS:.0f}"
