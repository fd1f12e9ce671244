"""Reports: what sums up, and what is kept in files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from bench_runs import FORM, make_load, make_report

from colibrid.cli.bench_result import MOST_PROBLEMS, Outcome, Sample, read_report, summarise
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_numbers_of_a_run() -> None:
    """Rates are over the whole time; times of tokens come from the requests that have them."""
    samples = [
        Sample(at=0, e2e_ms=100, ttft_ms=20, tokens=5, prompt_tokens=8, gaps_ms=[10.0, 30.0]),
        Sample(at=1, e2e_ms=50, ttft_ms=50, tokens=1, prompt_tokens=10),
        Sample(at=2, e2e_ms=10, tokens=None),
    ]
    report = make_report(samples, elapsed=4.0)
    assert (report.ok, report.requests_per_s, report.output_tokens_per_s, report.tokens_per_request) == (
        3,
        0.75,
        1.5,
        2,
    )
    assert report.prompt_tokens_per_request == 9
    assert report.e2e_ms is not None
    assert report.ttft_ms is not None
    assert report.tpot_ms is not None
    assert report.itl_ms is not None
    assert (report.e2e_ms.max, report.ttft_ms.mean, report.tpot_ms.max, report.itl_ms.mean) == (100, 35, 10, 20)
    assert report.late_ms is report.goodput is None


@pytest.mark.parametrize(("rate", "share"), [(None, 0.25), (5.0, 0.2)])
def test_goodput_counts_what_was_to_be_answered(rate: float | None, share: float) -> None:
    """Failures count as not good; so do refusals of an open loop, which nobody sends again."""
    outcome = Outcome()
    outcome.samples = [Sample(at=0, e2e_ms=time, tokens=1) for time in (1.0, 5.0, 7.0)]
    outcome.fail("broken")
    outcome.refused, outcome.elapsed_s = 1, 2.0
    report = summarise(make_load(rate=rate, slo="e2e_ms<5"), FORM, "m", outcome, "")
    assert report.goodput is not None
    assert (report.goodput.good, report.goodput.share, report.goodput.requests_per_s) == (1, share, 0.5)


def test_problems_are_counted_by_kind_and_bounded() -> None:
    """The first different ones with how often each came; many kinds do not fill the report."""
    outcome = Outcome()
    for number in range(9):
        outcome.fail("a")
        outcome.fail(f"b{number}")
    assert outcome.problems == ["a (9 times)", *(f"b{number}" for number in range(MOST_PROBLEMS - 1))]
    assert outcome.failed == 18


def test_requests_under_way_are_counted() -> None:
    """The most at one time is kept."""
    outcome = Outcome()
    for begins in (True, True, False, True, False, False):
        (outcome.begin if begins else outcome.end)()
    assert outcome.most_in_flight == 2


def test_the_key_is_not_kept() -> None:
    """A report can be shown to others."""
    assert b"secret" not in msgspec.json.encode(make_report([], api_key="secret"))


def test_reports_are_read_back(tmp_path: Path) -> None:
    """Everything is the same; what is no report, or of another format, is refused by name."""
    path = tmp_path / "a.json"
    report = make_report([Sample(at=0, e2e_ms=1.5, tokens=2, ttft_ms=1.0, gaps_ms=[0.5])], rate=3.0)
    path.write_bytes(msgspec.json.encode(report))
    assert read_report(path) == report
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(report, format=99)))
    with pytest.raises(ConfigError, match="format 99"):
        read_report(path)
    path.write_text('{"ok": 3}')
    with pytest.raises(ConfigError, match="is no report of `bench http`"):
        read_report(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_report(tmp_path / "b.json")


@pytest.mark.parametrize("edited", [{"e2e_ms": -5}, {"at": 1e300}, {"tokens": 10**30}, {"gaps_ms": [-1.0]}])
def test_a_report_that_no_run_could_have_made_is_refused(edited: dict[str, object], tmp_path: Path) -> None:
    """An edited file is named, instead of drawn until something breaks."""
    path = tmp_path / "a.json"
    report = msgspec.to_builtins(make_report([Sample(at=0, e2e_ms=1.5, tokens=2, ttft_ms=1.0, gaps_ms=[0.5])]))
    report["samples"][0] |= edited
    path.write_bytes(msgspec.json.encode(report))
    with pytest.raises(ConfigError, match=next(iter(edited))):
        read_report(path)
