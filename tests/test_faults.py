"""Every row of the faults table, small, with ten times the time: what is asserted here is measured by `make faults`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fault_kit import FaultError, Figure, Victim, count, require, took, wait_for
from faults import ROWS, Outcome, main, markdown, run_row

if TYPE_CHECKING:
    from pathlib import Path

SLACK = 10.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_row_holds(name: str) -> None:
    """What the faults table promises for this fault is true of a real daemon."""
    outcome = run_row(name, quick=True)
    assert outcome.error is None
    over = [figure for figure in outcome.figures if not figure.holds(SLACK)]
    assert over == []
    assert outcome.figures or name == "read_only"


def test_limits_are_limits() -> None:
    """Times may be longer by the slack, numbers may not."""
    assert took("t", [0.05, 0.2], 0.1).value == 200.0
    assert not took("t", [0.2], 0.1).holds(1.0)
    assert took("t", [0.2], 0.1).holds(SLACK)
    assert not took("t", [2.0], 0.1).holds(SLACK)
    assert not count("n", 1).holds(SLACK)
    assert count("n", 1, None).holds(1.0)
    assert count("n", -1).holds(1.0)


def test_the_page_shows_figures_and_failures() -> None:
    """A row a line; what does not hold stands out."""
    good = Outcome(row="a", fault="A.", seconds=1.0, figures=[Figure(name="x", value=3.0, unit="ms", limit=9.0)])
    bad = Outcome(row="b", fault="B.", seconds=2.0, figures=[], error="broken\nin two lines")
    assert not bad.holds(SLACK)
    page = markdown([good, bad], "head")
    assert "| a | x | 3 ms | 9 ms |" in page
    assert "| b | **does not hold** | broken | |" in page


def test_a_row_that_does_not_hold_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The exit code is 1, and what was measured before is kept."""

    def broken(_folder: Path, _size: int) -> object:
        yield count("before", 1, None)
        require(False, "it is not")

    monkeypatch.setitem(ROWS, "crash_loop", ROWS["crash_loop"]._replace(run=broken))  # type: ignore[arg-type]
    assert main(["crash_loop", "--quick", "--out", str(tmp_path / "out")]) == 1
    assert "it is not" in (tmp_path / "out.md").read_text()
    assert '"before"' in (tmp_path / "out.json").read_text()


def test_a_daemon_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    """The error says what was waited for and what the daemon said."""
    with (
        Victim(tmp_path, ["--set", "no.such=1"]) as daemon,
        pytest.raises(FaultError, match=r"ended with 78(.|\n)*no\.such"),
    ):
        wait_for(lambda: False, "never", daemon)
