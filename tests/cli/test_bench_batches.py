"""Bounds of figures: what they hold, and when there are none."""

from __future__ import annotations

import numpy as np
import pytest

from colibrid.cli.bench_batches import LEAST_INDEPENDENT, Bounds, Values, independent, rate, ratio


def one_each(values: np.typing.NDArray[np.float64]) -> Values:
    return Values(values, np.arange(len(values)), len(values))


def wandering(count: int, stays: float, seed: int = 1) -> np.typing.NDArray[np.float64]:
    """Each value is the last one, as far as it stays, and chance."""
    chance = np.random.default_rng(seed).normal(size=count)
    for index in range(1, count):
        chance[index] += stays * chance[index - 1]
    return chance


def test_bounds_hold_what_is_true() -> None:
    """Of many series of independent values, nine in ten and more have the true mean and quantiles between their bounds."""
    held = {"mean": 0, "p50": 0, "p90": 0}
    for seed in range(100):
        values = one_each(np.random.default_rng(seed).exponential(size=400))
        for name, found, true in (
            ("mean", values.mean(), 1.0),
            ("p50", values.percentile(0.5), np.log(2)),
            ("p90", values.percentile(0.9), np.log(10)),
        ):
            assert found.low <= found.value <= found.high
            held[name] += not found.enough or found.low <= true <= found.high
    assert min(held.values()) >= 92


def test_values_are_there_as_often_as_requests_have_them() -> None:
    """A mean and a percentile are of all values; a request without any changes neither."""
    values = Values(np.array([1.0, 2.0, 3.0, 10.0]), np.array([0, 0, 0, 2]), 4)
    assert values.mean().value == 4
    assert values.percentile(0.5).value == 2
    assert values.percentile(0.99).value == 10


def test_the_larger_a_tail_is_the_less_it_needs() -> None:
    """The last hundredth of 200 has no bounds, of 20,000 it has; what lies in one part only has none at any size."""
    source = np.random.default_rng(1)
    short, long = (one_each(source.exponential(size=count)) for count in (200, 20_000))
    assert short.percentile(0.99).needs > 2
    assert long.percentile(0.99).enough
    stalled = source.exponential(size=20_000)
    stalled[7000:7300] += 100
    assert not one_each(stalled).percentile(0.99).enough
    assert one_each(stalled).percentile(0.5).enough


def test_equal_values_are_on_one_side() -> None:
    """A percentile among values that requests of one batch share is as uncertain as the batch."""
    values = np.random.default_rng(2).exponential(size=400)
    values[100:108] = 50.0  # the last fiftieth, all at once
    assert not one_each(values).percentile(0.99).enough
    same = one_each(np.full(400, 3.0)).percentile(0.99)
    assert (same.low, same.value, same.high) == (3, 3, 3)


def test_series_that_change_slowly_are_worth_little() -> None:
    """Chance is worth about all its parts, the sum of chances next to none; bounds grow with what goes over."""
    assert independent(wandering(4000, 0.0)) > 25
    assert independent(wandering(4000, 0.9999)) < 4
    even, slow = (one_each(10 + wandering(4000, stays)).mean() for stays in (0.0, 0.98))
    assert even.enough
    assert slow.high - slow.low > 5 * (even.high - even.low)
    assert one_each(20 + np.linspace(0, 10, 400)).mean().needs > LEAST_INDEPENDENT / 4


def test_finer_parts_widen_what_ten_understate() -> None:
    """Where each value goes over to a few dozen others, 19 in 20 of the bounds that are given hold the mean all the same."""
    found = [one_each(100 + wandering(1000, 0.97, seed)).mean() for seed in range(300)]
    given = [bounds for bounds in found if bounds.enough]
    held = sum(bounds.low <= 100 <= bounds.high for bounds in given)
    assert len(given) > 100
    assert held >= 0.93 * len(given)  # of ten parts alone: 0.90


def test_a_rate_of_nothing_is_nothing() -> None:
    """Neither amounts nor times of zero have bounds to speak of; even ones are sure."""
    ones = np.ones(20)
    assert rate(0 * ones, ones) == Bounds(0, 0, 0, 0)
    assert rate(ones, 0 * ones) == Bounds(0, 0, 0, 0)
    even = rate(ones, 2 * ones)
    assert (even.value, even.low, even.high, even.enough) == (0.5, 0.5, 0.5, True)


def test_a_ratio_is_bound_by_both_sides() -> None:
    """Fieller's interval where bounds are symmetrical; nearly the other side's own where one side is sure."""
    low, high = ratio(Bounds(2, 2, 2, 0), Bounds(3, 2.4, 3.8, 0))
    assert (low, high) == pytest.approx((1.2, 1.9))
    low, high = ratio(Bounds(2, 1.5, 4, 0), Bounds(3, 3, 3, 0))
    assert (low, high) == pytest.approx((0.75, 2))
    a, b = Bounds(10, 9, 11, 0), Bounds(12, 10, 14, 0)
    for edge in ratio(a, b):  # where the difference is as large as its own bound
        assert edge is not None
        assert (b.value - edge * a.value) ** 2 == pytest.approx(2**2 + edge**2)
    low, high = ratio(Bounds(1, -0.5, 1.2, 0), b)
    assert (12 - low) ** 2 == pytest.approx(2**2 + (0.2 * low) ** 2)
    assert high is None
    assert ratio(a, Bounds(0, 0, 0, 0)) == (0, 0)
