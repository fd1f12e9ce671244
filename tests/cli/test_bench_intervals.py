"""Two runs compared: values, intervals, and how often these are right."""

from __future__ import annotations

import random

import pytest
from bench_runs import run_of

from colibrid.cli.bench_intervals import Comparison, Figure, block_length, compare
from colibrid.errors import ConfigError
from colibrid.report.percentiles import percentile


def figures_of(found: Comparison) -> dict[str, Figure]:
    return {figure.name: figure for figure in found.figures}


def test_values_are_those_of_the_reports() -> None:
    """Every figure is what the report itself says, and the ratio is theirs."""
    source = random.Random(1)
    a, b = run_of(source, 50), run_of(source, 60, mean_ms=50, slo="e2e_ms<40")
    found = figures_of(compare([a], [b], slo="e2e_ms<40", resamples=100))
    assert found["requests/s"].a == pytest.approx(a.requests_per_s)
    assert found["tokens/s out"].b == pytest.approx(b.output_tokens_per_s)
    assert b.goodput is not None
    assert found["goodput"].b == pytest.approx(b.goodput.requests_per_s)
    for name, kind in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("e2e", "e2e_ms")):
        for part in ("mean", "p50", "p90", "p99"):
            figure = found[f"{name} {part}"]
            assert figure.a == pytest.approx(getattr(getattr(a, kind), part))
            assert figure.b == pytest.approx(getattr(getattr(b, kind), part))
            assert figure.ratio == pytest.approx(figure.b / figure.a)
            assert figure.low is not None
            assert figure.high is not None
            assert figure.low <= figure.ratio <= figure.high


def test_a_real_difference_is_found_and_has_a_direction() -> None:
    """Half the time is better for times and for rates; the other way round it is worse."""
    source = random.Random(2)
    slow, fast = run_of(source, 300), run_of(source, 300, mean_ms=50)
    better, worse = (
        figures_of(compare([slow], [fast], resamples=200)),
        figures_of(compare([fast], [slow], resamples=200)),
    )
    for name in ("requests/s", "tokens/s out", "TTFT mean", "ITL p50", "e2e p90"):
        assert (better[name].verdict, worse[name].verdict) == ("better", "worse")


def test_equal_runs_are_seldom_told_apart() -> None:
    """Of many pairs of the same load, whose requests come in groups that share their fate, few have an interval without 1."""
    source = random.Random(3)
    wrong = 0
    for _ in range(40):
        a, b = (run_of(source, 240, together=8) for _ in range(2))
        found = figures_of(compare([a], [b], resamples=150))
        wrong += found["e2e mean"].verdict != "unclear"
    assert wrong <= 8  # perfect intervals: 2; those from single requests: more than half


def test_the_same_seed_gives_the_same_intervals() -> None:
    """To the last digit."""
    source = random.Random(4)
    a, b = run_of(source, 40), run_of(source, 40)
    assert compare([a], [b], resamples=100) == compare([a], [b], resamples=100)


def test_several_runs_are_one_side() -> None:
    """Their requests count together, their time is added, and a p99 is over all of them."""
    source = random.Random(5)
    a, b, c = (run_of(source, 30) for _ in range(3))
    found = compare([a], [b, c], resamples=100)
    assert found.requests == (30, 60)
    figure = figures_of(found)["requests/s"]
    assert figure.b == pytest.approx(60 / (b.elapsed_s + c.elapsed_s))
    times = [sample.e2e_ms for report in (b, c) for sample in report.samples]
    assert figures_of(found)["e2e p99"].b == percentile(times, 0.99)


def test_blocks_hold_what_runs_together() -> None:
    """At least as many as are under way; at least eight blocks; never none."""
    assert block_length(1000, 1.0) == 10
    assert block_length(1000, 32.0) == 64
    assert block_length(100, 32.0) == 12
    assert block_length(5, 3.0) == 1


def test_what_differs_is_said() -> None:
    """Loads that are not the same, failures, and runs too short for a p99."""
    source = random.Random(6)
    a, b = run_of(source, 20, clients=4, slo="e2e_ms<9"), run_of(source, 20, clients=8, url="http://other")
    text = "\n".join(compare([a], [b], resamples=100).warnings)
    assert "the loads differ in clients: 4 and 8" in text
    assert "different limits" in text
    assert "url" not in text
    assert "the second side has 20 requests" in text


def test_too_few_requests_have_no_interval() -> None:
    """The side is named."""
    source = random.Random(7)
    with pytest.raises(ConfigError, match="the second side has 9 answered requests, and 10 are needed"):
        compare([run_of(source, 10)], [run_of(source, 9)])


def test_figures_of_zero_have_no_ratio() -> None:
    """Nothing was good on one side: no ratio, and no verdict."""
    source = random.Random(8)
    a, b = run_of(source, 20), run_of(source, 20)
    figure = figures_of(compare([a], [b], slo="e2e_ms<0.001", resamples=100))["goodput"]
    assert (figure.a, figure.ratio, figure.verdict) == (0, None, "unclear")
