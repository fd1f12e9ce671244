"""Tries points one after another: quality of all of them first, then what those cost that may still be chosen.

A point is given up as soon as it cannot keep the limits any more: after a part of the data, where it is far from them;
after all of the data, before its cost is measured. What was measured of it stays, and says of how much it is. The first
point, the model's own setting, is always measured to the end. Figures of finished points never change: a run that is
interrupted goes on with the next one.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import msgspec

from colibrid.tune.points import experts_only, point_name
from colibrid.tune.progress import silent
from colibrid.tune.result import Tried
from colibrid.tune.slo import quality_misses, read_figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from colibrid.tune.forecast import Forecast
    from colibrid.tune.progress import Progress
    from colibrid.tune.result import Cost, Point, Quality
    from colibrid.tune.slo import Limit
    from colibrid.tune.store import Store

ROUNDS = 5  # that costs of a point are measured in at most
LONG_ENOUGH_S = 5.0  # all rounds of a point together
FAR = 0.25  # a part of the data counts against a point that is so far beyond a limit, as a share of its bound
GLIMPSE, QUALITY, COST = "glimpse", "quality", "cost"  # kinds of work


class Lab(Protocol):
    """What measures."""

    def prepare(self) -> None:
        """Called before the first quality is asked for."""
        ...

    def glimpse(self, point: Point, progress: Progress) -> Quality | None:
        """Quality on a part of the data; None: the data is so small that it is not worth it."""
        ...

    def quality(self, point: Point, progress: Progress) -> Quality: ...

    def cost(self, point: Point, progress: Progress) -> Cost:
        """Measures one more round: of all rounds of this point."""
        ...


class Sweep:
    """One run over points."""

    def __init__(
        self,
        lab: Lab,
        store: Store,
        forecast: Forecast,
        limits: Sequence[Limit] = (),
        *,
        to_the_end: bool = False,
    ) -> None:
        """to_the_end: no point is given up."""
        self._lab = lab
        self._store = store
        self._forecast = forecast
        self._limits = () if to_the_end else tuple(limits)
        self._qualities: dict[Point, Quality] = {}  # by what decides about answers
        self._rounds: int | None = None  # of each point's costs
        self._expected = 0  # points
        self._lost: dict[Point, Tried] = {}  # given up, by the same

    def expect(self, points: int) -> None:
        """So many will come later, about: they are part of the forecast until this is said anew."""
        more = points - self._expected
        kinds = {QUALITY: 1, GLIMPSE: 1 if self._limits else 0, COST: self._rounds or 1}
        for kind, pieces in kinds.items():
            (self._forecast.plan if more > 0 else self._forecast.drop)(kind, abs(more) * pieces)
        self._expected = points

    def assess(self, points: Sequence[Point], own: Point) -> list[Tried]:
        """Quality, in the order of the points. `own` is never given up."""
        found = {point: self._known(point) for point in points}
        self._plan(found, own)
        if any(tried is None for tried in found.values()):
            self._lab.prepare()
        for point in sorted(points, key=_answers_key):
            tried = found[point]
            if tried is None or (tried.cost is None and tried.hopeless is None):
                found[point] = self._quality(point, own)
        return [tried for tried in found.values() if tried is not None]

    def measure(self, assessed: Sequence[Tried]) -> list[Tried]:
        """What those cost that were not given up, in the same order. All that will be compared belong in one call."""
        seen = {tried.point: tried for tried in assessed}
        left = [tried.point for tried in assessed if tried.cost is None and tried.hopeless is None]
        for _, group in groupby(sorted(left, key=_service_key), _service_key):
            seen.update(self._costs([seen[point] for point in group], len(left)))
        return list(seen.values())

    def _costs(self, group: Sequence[Tried], waiting: int) -> Iterator[tuple[Point, Tried]]:
        """Points of one service in turn, round by round, so that a machine that is slower for a while is so for all of
        them. How many rounds there are is seen after the first. waiting: points that none was measured of yet.
        """
        number = 0
        while number < (self._rounds or 1):
            number += 1
            for tried in group:
                with self._forecast.piece(COST, f"cost of {point_name(tried.point)}") as progress:
                    cost = self._lab.cost(tried.point, progress)
                if self._rounds is None:
                    self._rounds = max(1, min(ROUNDS, math.ceil(LONG_ENOUGH_S / cost.seconds)))
                    self._forecast.plan(COST, (self._rounds - 1) * (waiting + self._expected))
                if number == self._rounds:
                    yield tried.point, self._keep(msgspec.structs.replace(tried, cost=cost), whole=True)

    def _known(self, point: Point) -> Tried | None:
        tried = self._store.record(point, self._limits)
        if tried is not None:
            if tried.hopeless is None:
                self._qualities[experts_only(point)] = tried.quality
            else:
                self._lost[experts_only(point)] = tried
        return tried

    def _plan(self, found: dict[Point, Tried | None], own: Point) -> None:
        new = {experts_only(point) for point, tried in found.items() if tried is None}
        new -= {*self._qualities, *self._lost, own}
        self._forecast.plan(QUALITY, len(new))
        self._forecast.plan(GLIMPSE, len(new) if self._limits else 0)
        unmeasured = sum(tried is None or not (tried.cost or tried.hopeless) for tried in found.values())
        self._forecast.plan(COST, (self._rounds or 1) * unmeasured)

    def _quality(self, point: Point, own: Point) -> Tried:
        """Of one point, finished but for its cost, or given up."""
        decides = experts_only(point)
        quality = self._qualities.get(decides)
        if quality is None and decides == own:  # all others are compared with it, so it is known
            quality = self._qualities[decides] = self._lab.quality(own, silent)
        if quality is None:
            if (lost := self._lost.get(decides)) is not None:
                return self._give_up(msgspec.structs.replace(lost, point=point), whole=False)
            if (lost := self._glimpse(point)) is not None:
                self._lost[decides] = lost
                self._forecast.drop(QUALITY)
                return self._give_up(lost, whole=False)
            with self._forecast.piece(QUALITY, f"quality of {point_name(point)}") as progress:
                quality = self._lab.quality(point, progress)
            self._qualities[decides] = quality
        missed = quality_misses(self._limits, quality)
        if missed and point != own:
            return self._give_up(Tried(point=point, quality=quality, hopeless="; ".join(missed)), whole=True)
        return self._keep(Tried(point=point, quality=quality), whole=True)

    def _glimpse(self, point: Point) -> Tried | None:
        """The point if a part of the data is enough to give it up."""
        if not self._limits:
            return None
        with self._forecast.piece(GLIMPSE, f"first look at {point_name(point)}") as progress:
            part = self._lab.glimpse(point, progress)
        far = [] if part is None else far_beyond(self._limits, part)
        if part is None or not far:
            return None
        return Tried(point=point, quality=part, hopeless=f"after {part.tokens} tokens: {'; '.join(far)}")

    def _give_up(self, tried: Tried, *, whole: bool) -> Tried:
        self._forecast.drop(COST, self._rounds or 1)
        return self._keep(tried, whole=whole)

    def _keep(self, tried: Tried, *, whole: bool) -> Tried:
        self._store.keep(tried, self._limits, whole=whole)
        return tried


def far_beyond(limits: Sequence[Limit], quality: Quality) -> list[str]:
    """Limits that quality misses by so much that the rest of the data cannot be expected to mend it."""
    found = []
    for limit in limits:
        value = read_figure(limit.name, quality, None)
        if value is None or limit.holds(value):
            continue
        if abs(value - limit.bound) > FAR * abs(limit.bound):
            found.append(limit.miss(value))
    return found


def _answers_key(point: Point) -> tuple[int, ...]:
    """Points that one service can answer for follow one another; the one without a limit on experts is first."""
    limit = point.max_tokens_per_expert
    return (0,) if limit is None else (1, limit, point.slots or 0)


def _service_key(point: Point) -> tuple[float, ...]:
    return (point.max_tokens_per_expert or 0, point.slots or 0, -1.0 if point.window_ms is None else point.window_ms)
