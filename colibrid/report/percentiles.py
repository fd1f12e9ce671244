"""Numbers that describe many measurements. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Of many values, in their unit."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least `share` (0 < share <= 1) of them do not exceed: one that was seen."""
    assert values, "there is no percentile of nothing"
    assert 0 < share <= 1, "a share of the values"
    # Rounded, because 0.07 * 100 is a little more than 7.
    return sorted(values)[math.ceil(round(share * len(values), 9)) - 1]


def spread(values: Sequence[float]) -> Spread | None:
    """None of no values."""
    if not values:
        return None
    return Spread(
        mean=math.fsum(values) / len(values),
        p50=percentile(values, 0.50),
        p90=percentile(values, 0.90),
        p99=percentile(values, 0.99),
        max=max(values),
    )
