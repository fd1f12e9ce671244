"""Percentiles and spreads."""

from __future__ import annotations

import pytest

from colibrid.report.percentiles import Spread, percentile, spread


@pytest.mark.parametrize(
    ("count", "share", "value"),
    [(100, 0.99, 99), (100, 0.07, 7), (101, 0.99, 100), (4, 0.5, 2), (5, 0.5, 3), (10, 1.0, 10), (1, 0.01, 1)],
)
def test_percentile_is_the_smallest_value_that_enough_do_not_exceed(count: int, share: float, value: int) -> None:
    """Of 1 .. n in any order it is the rounded-up share of n."""
    assert percentile(list(range(count, 0, -1)), share) == value


def test_spread_of_one_and_of_none() -> None:
    """One value is its own spread; no values have none."""
    assert spread([3.0]) == Spread(mean=3.0, p50=3.0, p90=3.0, p99=3.0, max=3.0)
    assert spread([]) is None


def test_spread_of_many() -> None:
    """Mean and maximum are of all values."""
    values = [float(value) for value in range(1, 201)]
    assert spread(values) == Spread(mean=100.5, p50=100.0, p90=180.0, p99=198.0, max=200.0)
