"""Two runs compared: values, intervals, and how often these are right."""

from __future__ import annotations

import math
import random
from collections import Counter

import msgspec
import pytest
from bench_runs import make_report, run_of
from interval_trial import GROUPS, SERVERS, decided, grouped, run_on, told_apart, verdicts

from colibrid.cli.bench_intervals import Comparison, Figure, compare
from colibrid.errors import ConfigError
from colibrid.report.percentiles import percentile


def figures_of(found: Comparison) -> dict[str, Figure]:
    return {figure.name: figure for figure in found.figures}


def test_values_are_those_of_the_reports() -> None:
    """Every figure is what the report itself says, and the ratio is theirs."""
    source = random.Random(1)
    a, b = run_of(source, 500), run_of(source, 600, mean_ms=90, slo="e2e_ms<40")
    found = figures_of(compare([a], [b], slo="e2e_ms<40"))
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
            if part != "p99":  # some have too few
                assert figure.ratio is not None
                assert figure.low is not None
                assert figure.high is not None
                assert figure.low <= figure.ratio <= figure.high


def test_a_real_difference_is_found_and_has_a_direction() -> None:
    """Half the time is better for times and for rates; the other way round it is worse."""
    source = random.Random(2)
    slow, fast = run_of(source, 300), run_of(source, 300, mean_ms=50)
    better, worse = (
        figures_of(compare([slow], [fast])),
        figures_of(compare([fast], [slow])),
    )
    for name in ("requests/s", "tokens/s out", "TTFT mean", "ITL p50", "e2e p90"):
        assert (better[name].verdict, worse[name].verdict) == ("better", "worse")


TRIAL = tuple(server for server in SERVERS if server.name != "arrivals at 90 %")  # which would need more requests


def test_equal_runs_are_seldom_told_apart() -> None:
    """Of pairs of equal runs of simulated servers, at most 7 % of those with enough data have an interval without 1."""
    total = {group: Counter[str]() for group in GROUPS}
    for server in TRIAL:
        for group, counts in grouped(verdicts(server, 600, 10)).items():
            total[group] += counts
    for group, counts in total.items():
        assert told_apart(counts) <= 0.07 * decided(counts), group
        assert decided(counts) >= (0.1 if group == "p99" else 0.5) * counts.total(), group


def test_slower_runs_are_found() -> None:
    """At 5,000 requests 30 % more time are, also in the p99 of a server whose requests wait for each other."""
    server = next(server for server in SERVERS if server.name == "16 clients, 8 slots")
    found = verdicts(server, 5000, 4, slower=1.3)
    for name in ("e2e p99", "ITL p99", "TTFT p99", "e2e mean", "TTFT p50"):
        assert found[name]["worse"] >= 3, name


def test_changes_as_slow_as_the_run_are_seen() -> None:
    """A machine that drifts over the whole run shows nothing, however many requests there are, and the warning says so."""
    server = next(server for server in SERVERS if server.drift)
    found = compare([run_on(server, 200, 1)], [run_on(server, 200, 2)])
    assert {figure.verdict for figure in found.figures} == {"few"}
    assert min(found.independent) < 8
    assert any("side changes slowly, or is short" in warning for warning in found.warnings)
    assert all(figure.needs is not None and figure.needs > 1 for figure in found.figures)


def test_a_tail_needs_requests() -> None:
    """200 are enough for a mean, but not for a p99; how many more it takes is said, and they do it."""
    source = random.Random(9)
    found = figures_of(compare([run_of(source, 200)], [run_of(source, 200)]))
    assert found["e2e mean"].verdict == "unclear"
    tail = found["e2e p99"]
    assert (tail.low, tail.high, tail.verdict) == (None, None, "few")
    assert tail.ratio is not None
    assert tail.needs is not None
    count = 2 * math.ceil(200 * tail.needs)
    longer = figures_of(compare([run_of(source, count)], [run_of(source, count)]))["e2e p99"]
    assert longer.verdict == "unclear"


def test_the_same_files_give_the_same_intervals() -> None:
    """To the last digit."""
    source = random.Random(4)
    a, b = run_of(source, 40), run_of(source, 40)
    assert compare([a], [b]) == compare([a], [b])


def test_several_runs_are_one_side() -> None:
    """Their requests count together, their time is added, and a p99 is over all of them."""
    source = random.Random(5)
    a, b, c = (run_of(source, 30) for _ in range(3))
    found = compare([a], [b, c])
    assert found.requests == (30, 60)
    figure = figures_of(found)["requests/s"]
    assert figure.b == pytest.approx(60 / (b.elapsed_s + c.elapsed_s))
    times = [sample.e2e_ms for report in (b, c) for sample in report.samples]
    assert figures_of(found)["e2e p99"].b == percentile(times, 0.99)


def test_what_differs_is_said() -> None:
    """Loads that are not the same, and their limits; not where they were sent."""
    source = random.Random(6)
    a, b = run_of(source, 20, clients=4, slo="e2e_ms<9"), run_of(source, 20, clients=8, url="http://other")
    text = "\n".join(compare([a], [b]).warnings)
    assert "the loads differ in clients: 4 and 8" in text
    assert "different limits" in text
    assert "url" not in text


def test_too_few_requests_have_no_interval() -> None:
    """The side is named."""
    source = random.Random(7)
    with pytest.raises(ConfigError, match="the second side has 9 answered requests, and 10 are needed"):
        compare([run_of(source, 10)], [run_of(source, 9)])


def test_figures_of_zero_have_no_ratio() -> None:
    """Nothing was good on the first side: no ratio, and no verdict. On the second: the ratio is 0, and that is worse."""
    source = random.Random(8)
    slow, fast = run_of(source, 300, mean_ms=1000), run_of(source, 300, mean_ms=10)
    figure = figures_of(compare([slow], [fast], slo="e2e_ms<50"))["goodput"]
    assert (figure.a, figure.ratio, figure.verdict) == (0, None, "zero")
    figure = figures_of(compare([fast], [slow], slo="e2e_ms<50"))["goodput"]
    assert (figure.b, figure.ratio, figure.low, figure.high, figure.verdict) == (0, 0, 0, 0, "worse")


def test_next_to_nothing_is_told_from_much() -> None:
    """Where hardly a request was good on one side, the ratio has one bound, which is enough for a verdict."""
    source = random.Random(10)
    much, little = run_of(source, 400, mean_ms=10), run_of(source, 400)
    limit = f"e2e_ms<={min(sample.e2e_ms for sample in little.samples)}"
    worse = figures_of(compare([much], [little], slo=limit))["goodput"]
    assert (worse.b > 0, worse.low, worse.verdict) == (True, 0, "worse")
    better = figures_of(compare([little], [much], slo=limit))["goodput"]
    assert (better.high, better.verdict) == (None, "better")
    assert better.low is not None
    assert better.low > 2


def test_what_lies_in_one_part_of_a_run_shows_nothing() -> None:
    """One stall that makes half of a run's mean: the mean may as well be next to nothing, and has no interval."""
    source = random.Random(11)
    a, b = run_of(source, 400), run_of(source, 400)
    samples = [
        msgspec.structs.replace(sample, e2e_ms=sample.e2e_ms + 5000) if 200 <= index < 240 else sample
        for index, sample in enumerate(b.samples)
    ]
    stalled = make_report(samples, elapsed=b.elapsed_s)
    figure = figures_of(compare([a], [stalled]))["e2e mean"]
    assert figure.b > 4 * figure.a
    assert (figure.low, figure.verdict) == (None, "few")
