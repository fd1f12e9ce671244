"""How far a figure of a run may be from that of a run without end, and ratios of two such figures. Pure.

Requests that run together share their fate, so that single requests are no measure of chance. A run is cut into ten parts
instead; how their sums differ says how the sum of all varies, by Student's t, which knows that ten are few. Parts that are
short beside the time over which a server changes would be too alike: finer ones tell how much each resembles the next, and
a run that is worth too few independent parts has no bounds at all. Nothing is drawn at random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

CONFIDENCE = 0.95
PARTS = 10
LEAST_INDEPENDENT = 8.0
_STUDENT = 2.2622  # of PARTS - 1 degrees of freedom, for CONFIDENCE
_FINE_PARTS = 40
_MOST_ALIKE = 0.95


@dataclass(frozen=True, slots=True)
class Bounds:
    """A figure, and between which values it may be. They hold only if `needs` is below 1."""

    value: float
    low: float  # of a mean or a rate it may be below 0
    high: float
    needs: float  # how many times as many requests bounds would need

    @property
    def enough(self) -> bool:
        return self.needs < 1


class Values:
    """Values of one kind, of which a request may have none or many; requests are in order of their end."""

    def __init__(self, flat: Floats, owner: NDArray[np.int64], requests: int) -> None:
        """`owner` names the request of each value."""
        self._flat, self._owner, self._requests = flat, owner, requests
        self._ordered = np.sort(flat)
        self._sums = self._per_request(flat)
        self._sizes = self._per_request(np.ones_like(flat))

    @property
    def independent(self) -> float:
        """How many independent parts the run is worth, as the mean sees it."""
        return independent(self._sums - self._sums.sum() / self._sizes.sum() * self._sizes)

    def mean(self) -> Bounds:
        return rate(self._sums, self._sizes)

    def percentile(self, share: float) -> Bounds:
        """As report.percentiles.percentile. Bounds are values whose rank is as far off as that of this one may be."""
        count = len(self._flat)
        value = self._ordered[math.ceil(round(share * count, 9)) - 1]
        # Equal values: whether they are above the limit or below, all of them are.
        above = [self._shares(self._flat > value), self._shares(self._flat >= value)]
        reach = max(_reach(each) for each in above)
        needs = max(*map(_needs, above), ((reach + 1) / (min(share, 1 - share) * count)) ** 2)
        ranks = (math.floor(share * count - reach), math.ceil(share * count + reach) + 1)
        low, high = (self._ordered[min(max(rank, 1), count) - 1] for rank in ranks)
        return Bounds(float(value), float(low), float(high), needs)

    def _shares(self, chosen: NDArray[np.bool_]) -> Floats:
        """Of each request, how many of its values are chosen, less as many as would be on average."""
        return self._per_request(chosen.astype(np.float64)) - float(chosen.mean()) * self._sizes

    def _per_request(self, values: Floats) -> Floats:
        found: Floats = np.bincount(self._owner, weights=values, minlength=self._requests).astype(np.float64)
        return found


def rate(amounts: Floats, times: Floats) -> Bounds:
    """All amounts over all times, of requests in order of their end."""
    total = float(times.sum())
    value = float(amounts.sum()) / total if total > 0 else 0.0
    if value <= 0:
        return Bounds(0.0, 0.0, 0.0, 0.0)
    off = amounts - value * times
    reach = _reach(off) / total
    return Bounds(value, value - reach, value + reach, _needs(off))


def ratio(a: Bounds, b: Bounds) -> tuple[float, float | None]:
    """Between which values b / a may be; None: a may be next to nothing. Both have bounds.

    Of each side counts the bound that is nearer to the other one's (the method of variance estimates recovery); for
    bounds that are symmetrical this is Fieller's interval. 1 is in it if the difference of both may be 0.
    """
    both = a.value * b.value
    least_a, least_b = max(a.low, 0.0), max(b.low, 0.0)
    low_a, low_b = a.high * (2 * a.value - a.high), least_b * (2 * b.value - least_b)
    high_a, high_b = least_a * (2 * a.value - least_a), b.high * (2 * b.value - b.high)
    low = low_b / (both + math.sqrt(max(0.0, both**2 - low_a * low_b))) if both else 0.0
    high = (both + math.sqrt(max(0.0, both**2 - high_a * high_b))) / high_a if high_a else None
    return low, high


def independent(deviations: Floats) -> float:
    """How many independent parts a series around 0 is worth, at most one a request, or 40."""
    parts = _sums(deviations, _FINE_PARTS)
    alike = _alike(parts)
    return len(parts) * (1 - alike) / (1 + alike)


def _needs(deviations: Floats) -> float:
    return LEAST_INDEPENDENT / independent(deviations)


def _reach(deviations: Floats) -> float:
    """How far from 0 their sum may be: as the sums of the parts say, or, if that is more, the finer ones' likeness."""
    parts, fine = _sums(deviations, PARTS), _sums(deviations, _FINE_PARTS)
    alike = _alike(fine)
    variances = float(parts.var(ddof=1)) * len(parts), float(fine.var(ddof=1)) * len(fine) * (1 + alike) / (1 - alike)
    return _STUDENT * math.sqrt(max(variances))


def _sums(deviations: Floats, parts: int) -> Floats:
    parts = min(parts, len(deviations))
    found: Floats = np.add.reduceat(deviations, np.arange(parts) * len(deviations) // parts)
    return found


def _alike(parts: Floats) -> float:
    """How much of each goes over to the next, from 0 to nearly 1: their correlation, which a short series understates."""
    off = parts - parts.mean()
    square = float(off @ off)
    found = float(off[1:] @ off[:-1]) / square if square > 0 else 0.0
    return min(max(0.0, found + (1 + 3 * max(0.0, found)) / len(parts)), _MOST_ALIKE)
